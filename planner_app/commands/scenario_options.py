"""The options that commands share: every field of a scenario by its name, and how a trace is read.

    @with_scenario
    def plan_command(trace: TraceArgument, given: Given, slo: ... = "") -> None:
        work, scenario = load(trace, given)

A command declares `given: Given`; the decorator puts one option for each field of `Scenario`, and those for
reading a trace, in its place. A field that `Scenario` gains is an option of every command.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pagecast.planner_app.commands.trace_view import read_with_progress
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.profile import PROFILES
from pagecast.sim.scenario import Scenario
from pagecast.traces.bundled import sample_names
from pagecast.traces.operations import scale
from pagecast.traces.schema import Trace

Opt = typer.Option
TraceArgument = Annotated[
    str, typer.Argument(help="trace file of any known format, a sample's name, or a folder of replay --out")
]
_MORE: dict[str, str] = {  # what a user of the command line needs to know beyond the field's description
    "profile": f": {', '.join(PROFILES)}",
    "gpu_memory_utilization": "; newer vLLM: 0.92",
    "kv_tokens": "; of the three limits the lesser wins",
    "num_gpu_blocks": "; vLLM's own number counts its null block too: give one less",
    "scheduling_policy": ": fcfs or priority",
}
_NAMES: dict[str, tuple[str, ...]] = {"num_gpu_blocks": ("--num-gpu-blocks", "--num-gpu-blocks-override")}


@dataclass(frozen=True, slots=True)
class Given:
    """What was given on the command line: a scenario file, fields that replace its own, and how to read."""

    scenario: Path | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    reading: dict[str, Any] = field(default_factory=dict)


def _reading(
    speedup: Annotated[
        float, Opt(help="divide arrival times by this: 2 doubles the load; think times stay")
    ] = 1.0,
    limit: Annotated[int | None, Opt(help="read only the first N requests")] = None,
    sort: Annotated[bool, Opt("--sort", help="put requests out of order in order of arrival")] = False,
    tokenizer: Annotated[Path | None, Opt(help="transformers folder, for traces that hold texts")] = None,
    session_rate: Annotated[
        float | None, Opt(help="sessions per second, for traces that have no absolute times")
    ] = None,
) -> None:
    """The options of reading a trace, as a signature."""


def with_scenario(command: Callable[..., None]) -> Callable[..., None]:
    """Puts the shared options in the place of the parameter `given` of a command."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    reading = list(inspect.signature(_reading, eval_str=True).parameters.values())
    shared = [*_scenario_options(), *reading]
    at = next(index for index, parameter in enumerate(own) if parameter.name == "given")
    parameters = [*own[:at], *shared, *own[at + 1 :]]

    @wraps(command)
    def wrapper(**options: Any) -> None:
        fields = {name: options.pop(name) for name in Scenario.model_fields}
        given = Given(
            options.pop("scenario"),
            {name: value for name, value in fields.items() if value is not None},
            {parameter.name: options.pop(parameter.name) for parameter in reading},
        )
        command(given=given, **options)

    keyword = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature([parameter.replace(kind=keyword) for parameter in parameters])
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _scenario_options() -> list[inspect.Parameter]:
    """One option a field, without a value unless it is given, and `--scenario` before them."""
    about = "YAML file of scenario fields; options given here win"
    annotations = {"scenario": Annotated[Path | None, Opt(help=about)]}
    for name, info in Scenario.model_fields.items():
        default = "" if info.default is None else f" [{_word(info.default)}]"
        about = f"{info.description}{_MORE.get(name, '')}{default}"
        option = Opt(*_NAMES.get(name, ()), help=about)
        annotations[name] = Annotated[_simple(info.annotation) | None, option]
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, kind, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]


def _simple(annotation: Any) -> Any:
    """The type a field's option has: choices are texts here, and checked by the scenario."""
    types = [kind for kind in get_args(annotation) if kind is not NoneType]
    if get_origin(annotation) is Literal:
        return str
    return types[0] if types else annotation


def _word(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)


def scenario_from(given: Given) -> Scenario:
    """The file's scenario, or the default one, with the options that were given. Errors: BadInput."""
    if given.scenario is not None:
        return Scenario.load(given.scenario, **given.fields)
    return Scenario.make(given.fields, "options")


def trace_from(name: str, scenario: Scenario, given: Given) -> Trace:
    """Reads a trace as the options say. Errors: BadInput."""
    return load_trace(name, scenario, **given.reading)


def load(name: str, given: Given) -> tuple[Trace, Scenario]:
    """Reads the trace and the scenario; of a folder that `replay --out` wrote, both. Errors: BadInput."""
    folder = Path(name)
    if name not in sample_names() and os.path.isfile(folder / "trace.parquet"):
        beside = folder / "scenario.yaml"
        if given.scenario is None and beside.is_file():
            given = Given(beside, given.fields, given.reading)
        name = str(folder / "trace.parquet")
    scenario = scenario_from(given)
    return trace_from(name, scenario, given), scenario


def load_trace(name: str, scenario: Scenario, *, speedup: float = 1.0, **options: Any) -> Trace:
    """Reads a trace with `read`'s options and compresses its time. Errors: BadInput."""
    if not 0 < speedup < float("inf"):
        raise BadInput(f"--speedup is {speedup}; it must be above 0")
    trace = read_with_progress(name, seed=scenario.seed, **options)
    return trace if speedup == 1 else scale(trace, speedup)
