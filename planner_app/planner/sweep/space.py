"""The space a sweep walks through: fields of the scenario, each with the values it may take.

`block_size=16,32,64` lists values; `gpu_memory_utilization=0.8:0.95:0.05` steps from one to another, both
included; `max_num_seqs=32:512:x2` multiplies. `kv_tokens=100000:400000`, without a step, is for a search,
which draws from all that lies between. A sweep of fleets has the knobs `replicas`, `prefill_replicas` and
`router` as well, and one whose load is known its fields: `concurrency=1,4,16`.

    >>> from pagecast.planner_app.planner.sweep.space import parse_space
    >>> from pagecast.sim.scenario import Scenario
    >>> parse_space(["block_size=16,32", "max_num_seqs=8:64:x2"], Scenario()).size
    8
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import product
from typing import Any

import yaml
from pagecast.planner_app.planner.fleet import knobs as fleet_knobs
from pagecast.planner_app.planner.load_fields import checked_field, load_fields
from pagecast.sim.core.errors import BadInput
from pagecast.sim.documents import unknown_field
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.scenario import Scenario, value_type
from pagecast.sim.yaml_documents import parse_yaml

KnobValue = str | int | float | bool | None
Point = dict[str, KnobValue]

MOST_VALUES = 1_000
MOST_POINTS = 20_000
_BUDGET = ("gpu_memory_utilization", "free_gpu_memory_fraction", "kv_tokens")


@dataclass(frozen=True, slots=True)
class Knob:
    """A field of the scenario and what it may be: any of `values`, or without those `low` to `high`."""

    name: str
    values: tuple[KnobValue, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False

    @property
    def ordered(self) -> bool:
        """Whether its values are numbers, so that a neighbour's figures say something of its own."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)

    def __str__(self) -> str:
        if not self.values:
            return f"{self.name}={self.low:g}:{self.high:g}"
        return f"{self.name}={','.join(map(shown, self.values))}"


@dataclass(frozen=True, slots=True)
class Space:
    """Knobs in the order they were given: the last turns fastest."""

    knobs: tuple[Knob, ...]

    @property
    def size(self) -> int | None:
        """How many points there are; None where a knob is continuous."""
        if any(not knob.values for knob in self.knobs):
            return None
        return math.prod(len(knob.values) for knob in self.knobs)

    def grid(self) -> list[Point]:
        """Every point. Errors: BadInput for a range without a step, or more than `MOST_POINTS`."""
        for knob in self.knobs:
            if not knob.values:
                raise BadInput(f"{knob}: a grid needs a step ({knob}:STEP); --search N does without")
        if (self.size or 0) > MOST_POINTS:
            raise BadInput(f"the grid has {self.size:,} points; give fewer values, or --search N")
        names = [knob.name for knob in self.knobs]
        points = product(*(knob.values for knob in self.knobs))
        return [dict(zip(names, values, strict=True)) for values in points]

    def __str__(self) -> str:
        return " ".join(map(str, self.knobs))


def shown(value: KnobValue) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def parse_space(settings: Sequence[str], base: Scenario, *, fleet: bool = False, load: bool = False) -> Space:
    """Reads `name=values` of each knob; with `fleet` those of a fleet (`fleet.knobs`), with `load` a load's.

    Errors: BadInput for what no scenario like `base` could have. It begins with the text at fault, and names
    no option: commands have several for it.
    """
    if not settings:
        raise BadInput("nothing to sweep; say --set block_size=16,32,64 (any field of the scenario)")
    knobs: dict[str, Knob] = {}
    for text in settings:
        knob = _knob(text, base, (*(fleet_knobs.KNOBS if fleet else ()), *(load_fields() if load else ())))
        if knob.name in knobs:
            raise BadInput(f"{text}: {knob.name} is set twice; put its values into one list")
        knobs[knob.name] = knob
    idle = [name for name in _BUDGET if name in knobs]
    if idle and base.num_gpu_blocks is not None and "num_gpu_blocks" not in knobs:
        raise BadInput(
            f"{knobs[idle[0]]}: num_gpu_blocks replaces the memory budget, so that {idle[0]} would "
            "change nothing; leave one of them out"
        )
    return Space(tuple(knobs.values()))


def knob_name(text: str) -> str:
    """The name in a setting."""
    return text.partition("=")[0].strip().replace("-", "_")


def _knob(text: str, base: Scenario, others: Collection[str]) -> Knob:
    name, (_, equals, values_text) = knob_name(text), text.partition("=")
    if not equals or not values_text.strip():
        raise BadInput(f"{text}: write NAME=VALUE,VALUE or NAME=FROM:TO:STEP")
    if name not in Scenario.flat_fields() and name not in others:
        raise BadInput(f"{text}: {unknown_field(name, [*Scenario.flat_fields(), *load_fields(), *others])}")
    parts = [part.strip() for part in values_text.split(",")]
    if is_number(name) and len(parts) == 1 and parts[0].count(":") == 1:
        return _between(name, text, parts[0], base)
    values: list[KnobValue] = []
    for part in parts:
        for written in _stepped(text, part) if is_number(name) and ":" in part else (part,):
            values.append(_value(name, text, written, base))
            if len(values) > MOST_VALUES:
                raise BadInput(f"{text}: more than {MOST_VALUES:,} values; take a larger step")
    if len(set(values)) < len(values):
        raise BadInput(f"{text}: a value is given twice")
    return Knob(name, tuple(values))


def is_number(name: str) -> bool:
    """Whether a field of the scenario or of a load, or a knob of a fleet, holds numbers."""
    if name in fleet_knobs.KNOBS:
        return name in fleet_knobs.COUNTS
    if name in load_fields():
        return value_type(load_fields()[name]) in (int, float)
    return value_type(Scenario.flat_fields()[name]) in (int, float)


def _between(name: str, text: str, part: str, base: Scenario) -> Knob:
    low, high = (_value(name, text, bound, base) for bound in part.split(":"))
    if not isinstance(low, int | float) or not isinstance(high, int | float) or not low < high:
        raise BadInput(f"{text}: give a lower and a higher bound")
    return Knob(name, (), low, high, isinstance(low, int))


def _stepped(text: str, part: str) -> Iterator[str]:
    """The numbers of `from:to:step` (or `from:to:xfactor`), reckoned in decimals, so that 0.1 x 3 is 0.3."""
    pieces = part.split(":")
    try:
        factor = pieces[2].startswith("x")
        low, high, step = Decimal(pieces[0]), Decimal(pieces[1]), Decimal(pieces[2].removeprefix("x"))
    except (IndexError, InvalidOperation):
        raise BadInput(f"{text}: {part!r} is no range; write FROM:TO:STEP or FROM:TO:xFACTOR") from None
    if len(pieces) != 3 or not (low.is_finite() and high.is_finite() and step.is_finite()):
        raise BadInput(f"{text}: {part!r} is no range; write FROM:TO:STEP or FROM:TO:xFACTOR")
    if low > high or step <= (1 if factor else 0) or (factor and low <= 0):
        raise BadInput(f"{text}: {part!r} never gets there; FROM is below TO, the step goes up")
    while low <= high:
        yield format(low.normalize(), "f")
        low = low * step if factor else low + step


def _value(name: str, text: str, written: str, base: Scenario) -> KnobValue:
    """A value as a scenario file would read it, checked in the same way. Errors: BadInput."""
    if not written:
        raise BadInput(f"{text}: a value is missing between commas")
    if name in fleet_knobs.KNOBS:
        try:
            return fleet_knobs.checked(name, written)
        except BadInput as error:
            raise BadInput(f"{text}: {error}") from None
    if name in load_fields():
        return _of_load(name, text, written)
    try:
        value: Any = None if written.lower() == "none" else parse_yaml(written)
    except yaml.YAMLError:
        value = written
    changed = Scenario.make({**base.flat(), name: value}, text)
    try:
        if name == "gpu":
            return find_gpu(changed.gpu).name
        if name == "model":
            changed.facts()
        elif name == "kv_cache_dtype":
            changed.facts().kv_element_bytes(changed.kv_cache_dtype)
    except BadInput as error:
        raise BadInput(f"{text}: {error}") from None
    return changed.flat()[name]


def _of_load(name: str, text: str, written: str) -> KnobValue:
    """A value of a load's field. What it needs beside it is checked with each trial's load."""
    value: Any = None if written.lower() == "none" else parse_yaml(written) if is_number(name) else written
    try:
        return checked_field(name, float(value) if value == "inf" else value)
    except BadInput as error:
        raise BadInput(f"{text}: {error}") from None
