"""Calibration and its file: coefficients of step costs, their provenance, noise and errors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.option_costs import UNKNOWN, OptionCosts
from pagecast.sim.costs.families.registry import family
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.documents import read_json

FORMAT = 2
KIND = "pagecast step costs"
_APART = ("shape", "replicates", "hosts", "options")  # fields that `save` writes in its own form
RECORDING, SEGMENT = "recording", "segment"  # the part left out, in a row of `cross_validation`

_MOST_BYTES = 16 << 20
_MOST_NS = 1e15  # eleven days, for one term of one step
_MOST_TOKENS = 1 << 40
_MOST_SD = 10.0  # of a natural logarithm
_NOISE = {
    "correlation": (-1, 1),
    "prompt_share": (0, 1),
    "freedom": (1e-9, 1e15),
    "kind_freedom": (1e-9, 1e15),
}

# Where a calibration's `Host` comes from.
MEASURED = "the scheduler's and hand-over time as recorded: a lower bound"
FITTED = "fitted from runs with asynchronous scheduling"


@dataclass(frozen=True, slots=True)
class Host:
    """The host's share of a step, in nanoseconds: CPU time that the device waits for in a synchronous run.

    `step_ns` is a constant, `request_ns` is added for each request. Where steps are planned ahead, the device
    hides this time. In steps with prompts it then hides `launch_ns` as well, but is slower by the share
    `busy`, since it never rests. `single_ns` is the host time to launch such a step kernel by kernel,
    measured in runs that plan ahead; 0: as in a synchronous run. `source` is `MEASURED` or `FITTED`.
    """

    step_ns: float
    request_ns: float
    launch_ns: float
    busy: float
    source: str
    single_ns: float = 0.0

    @property
    def numbers(self) -> tuple[float, float, float, float, float]:
        """All fields but `source`."""
        return self.step_ns, self.request_ns, self.launch_ns, self.busy, self.single_ns


@dataclass(frozen=True, slots=True)
class Noise:
    """Standard deviations of natural logarithms of times, from which forecasts draw (`fitting/noise.py`).

    Of a single step around the fit: `decode_sd` for pure decode steps, `prompt_sd` for steps with prompt
    chunks; `correlation` is that of consecutive steps with prompt chunks.

    Of a run's total time: `run_sd` between runs of one set-up and load, `level_sd` of the fitted level (the
    mean of few runs), `model_sd` between loads (effects that no term describes), `gpu_sd` between GPUs of one
    type. `kind_sd`: of a run's steps with prompts against its pure decode steps, without the GPU's part.

    `freedom`: degrees of freedom behind the total's (Student's t), `kind_freedom` behind `kind_sd`.
    `prompt_share`: share of the fitted time in steps with prompts, which `draw.py` uses to change the two
    kinds of steps without changing the total.
    """

    decode_sd: float
    prompt_sd: float
    correlation: float
    run_sd: float
    kind_sd: float
    level_sd: float
    model_sd: float = 0.0
    freedom: float = 1e9
    prompt_share: float = 0.0
    gpu_sd: float = 0.0
    kind_freedom: float = 1e9

    @property
    def total_sd(self) -> float:
        """Of the total time of another run, of a load like those fitted."""
        return math.hypot(self.run_sd, self.level_sd, self.model_sd, self.gpu_sd)


@dataclass(frozen=True)
class Calibration:
    """Fitted step costs of one engine, model and GPU.

    `curve_ns` is the matrix work at `knots` (tokens), `terms_ns` has the coefficient of each term.
    `replicates` are bootstrap copies of the same numbers in the same order, `hosts` the host's share of each
    copy (or empty). `made_for` names engine, model, GPU and options, `provenance` the recorded runs.
    `regions` has errors of the fit, `cross_validation` errors on recordings or segments left out of it ("left
    out" says which), in percent. `fitted` has the largest values of the fitted steps: `tokens`,
    `decode_requests`, and of one request `decode_context` and `prompt_context`. `options` are the costs of
    n-grams and of a host tier, where recorded.
    """

    name: str
    made_for: dict[str, Any]
    shape: TileShape
    knots: tuple[int, ...]
    curve_ns: tuple[float, ...]
    terms_ns: dict[str, float]
    host: Host
    noise: Noise
    provenance: dict[str, Any]
    regions: list[dict[str, Any]] = field(default_factory=list)
    cross_validation: list[dict[str, Any]] = field(default_factory=list)
    fitted: dict[str, int] = field(default_factory=dict)
    replicates: tuple[tuple[float, ...], ...] = ()
    hosts: tuple[Host, ...] = ()
    options: OptionCosts = UNKNOWN

    def save(self, path: str | Path) -> Path:
        """Writes the file; returns its path."""
        where = Path(path)
        body = {
            "format": FORMAT,
            "kind": KIND,
            **{key: value for key, value in asdict(self).items() if key not in _APART},
            "shape": self.shape.as_dict(),
            "replicates": [[float(f"{value:.5g}") for value in row] for row in self.replicates],
            "hosts": [[float(f"{value:.5g}") for value in host.numbers] for host in self.hosts],
        }
        if self.options != UNKNOWN:
            body["options"] = {name: float(f"{value:.5g}") for name, value in self.options.as_dict().items()}
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(_compact(body), encoding="utf-8")
        except OSError as error:
            raise BadInput(f"{where}: can't be written ({error.strerror})") from None
        return where

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads a file. Errors: BadInput for another version of the format, a missing field, or NaN."""
        where = Path(path)
        body = read_json(where, _MOST_BYTES, "give a file that `pagecast calibrate` wrote")
        if not isinstance(body, dict) or body.get("kind") != KIND:
            raise BadInput(f"{where}: not a calibration; `pagecast calibrate` writes one")
        if body.get("format") != FORMAT:
            raise BadInput(
                f"{where}: version {body.get('format')!r} of the calibration format; this pagecast reads "
                f"{FORMAT}: calibrate again"
            )
        try:
            calibration = cls._from(body)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BadInput(f"{where}: field missing or of the wrong kind ({error})") from None
        calibration._check(where)
        return calibration

    @classmethod
    def _from(cls, body: dict[str, Any]) -> Calibration:
        return cls(
            name=str(body["name"]),
            made_for=dict(body["made_for"]),
            shape=TileShape.from_dict(body["shape"]),
            knots=tuple(int(knot) for knot in body["knots"]),
            curve_ns=tuple(float(value) for value in body["curve_ns"]),
            terms_ns={str(name): float(value) for name, value in body["terms_ns"].items()},
            host=_host(body["host"]),
            noise=Noise(**{name: float(value) for name, value in body["noise"].items()}),
            provenance=dict(body["provenance"]),
            regions=_rows(body, "regions", "region"),
            cross_validation=_rows(body, "cross_validation", "run"),
            fitted={str(name): int(value) for name, value in body.get("fitted", {}).items()},
            replicates=tuple(tuple(float(value) for value in row) for row in body.get("replicates", [])),
            hosts=tuple(_host_of(row, str(body["host"]["source"])) for row in body.get("hosts", [])),
            options=OptionCosts.read(dict(body.get("options", {}))),
        )

    def _check(self, where: Path) -> None:
        self.shape.check(f"{where}: shape")
        block_size = self.made_for.get("block_size")
        if block_size is not None and type(block_size) is not int:
            raise BadInput(f"{where}: made_for: block_size is {block_size!r}, must be a whole number")
        for name, value, least, most in self._bounds():
            if not math.isfinite(value):
                raise BadInput(f"{where}: {name} is NaN or infinite: calibrate again")
            if not least <= value <= most:
                raise BadInput(
                    f"{where}: {name} is {value:g}, must be from {least:g} to {most:g}: calibrate again"
                )
        size = len(self.knots) + len(self.terms_ns)
        if not self.knots or len(self.knots) != len(self.curve_ns) or sorted(self.knots) != list(self.knots):
            raise BadInput(f"{where}: 'knots' and 'curve_ns' don't fit together: calibrate again")
        try:
            family_terms = family(self.shape.family).names
        except BadInput as error:
            raise BadInput(f"{where}: shape: {error}") from None
        unknown = [name for name in self.terms_ns if name not in family_terms]
        if unknown:
            raise BadInput(f"{where}: term {unknown[0]!r} is not known to this pagecast: calibrate again")
        if any(len(row) != size for row in self.replicates):
            raise BadInput(f"{where}: 'replicates' need {size} numbers each: calibrate again")
        if self.hosts and len(self.hosts) != len(self.replicates):
            raise BadInput(f"{where}: 'hosts' and 'replicates' don't fit together: calibrate again")

    def _bounds(self) -> Iterator[tuple[str, float, float, float]]:
        """All numbers that costs are computed from: name, value, lowest and highest valid value."""
        yield from ((f"knot {at}", knot, 1, _MOST_TOKENS) for at, knot in enumerate(self.knots))
        yield from ((f"curve_ns {at}", value, 0, _MOST_NS) for at, value in enumerate(self.curve_ns))
        yield from ((f"term {name}", value, 0, _MOST_NS) for name, value in self.terms_ns.items())
        for at, row in enumerate(self.replicates):
            yield from ((f"replicate {at}", value, -_MOST_NS, _MOST_NS) for value in row)
        titles = ["host", *(f"hosts {at}" for at in range(len(self.hosts)))]
        for title, host in zip(titles, (self.host, *self.hosts), strict=True):
            yield from ((title, value, -_MOST_NS, _MOST_NS) for value in host.numbers)
        for name, value in asdict(self.noise).items():
            yield f"noise: {name}", value, *_NOISE.get(name, (0, _MOST_SD))
        yield from ((f"fitted: {name}", value, 0, 1 << 62) for name, value in self.fitted.items())


def _host_of(numbers: list[Any], source: str) -> Host:
    """A row of `hosts`; those written by earlier versions have four numbers. Raises ValueError."""
    step, request, launch, busy, *single = map(float, numbers)
    return Host(step, request, launch, busy, source, *single[:1])


def _host(fields: dict[str, Any]) -> Host:
    numbers: dict[str, Any] = {
        key: value if key == "source" else float(value) for key, value in fields.items()
    }
    return Host(**numbers)


def _rows(body: dict[str, Any], name: str, key: str) -> list[dict[str, Any]]:
    """A table of errors. Raises TypeError or KeyError for rows that are none."""
    rows = [dict(row) for row in body.get(name, [])]
    for row in rows:
        for column in (key, "steps", "error_percent", "p50_percent"):
            kinds = (str,) if column == key else (int, float)
            if type(row[column]) not in kinds:
                raise TypeError(f"{name}: {column} is {row[column]!r}")
    return rows


def _compact(body: dict[str, Any]) -> str:
    """JSON with one line per field, and one per row of lists of rows."""
    lines = []
    for key, value in body.items():
        if isinstance(value, list) and value and isinstance(value[0], list | dict):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            lines.append(f"{json.dumps(key)}: [\n  {rows}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def shipped() -> dict[str, Path]:
    """The calibrations that come with pagecast, by name."""
    folder = files("pagecast.sim.costs").joinpath("calibrations")
    entries = [Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".json")]
    return {path.stem: path for path in sorted(entries)}


@cache
def read_shipped(path: Path) -> Calibration:
    """One of those that `shipped` names; kept, for a study asks for its costs at every replay."""
    return Calibration.load(path)


def all_shipped() -> list[Calibration]:
    """The calibrations that come with pagecast."""
    return [read_shipped(path) for path in shipped().values()]


def own_folder() -> Path:
    """Where calibrations of one's own are kept by name: $PAGECAST_CALIBRATIONS, or a folder of the user's."""
    given = os.environ.get("PAGECAST_CALIBRATIONS")
    return Path(given) if given else Path.home() / ".local" / "share" / "pagecast" / "calibrations"


def own_names() -> list[str]:
    """The calibrations of one's own."""
    return sorted(path.stem for path in own_folder().glob("*.json"))


def own(name: str) -> Path | None:
    """The file of a calibration of one's own; None where there is none of that name."""
    path = own_folder() / f"{name}.json"
    return path if "/" not in name and path.is_file() else None


def load(name: str) -> Calibration:
    """A shipped calibration by name, one's own, or a file. Errors: BadInput naming those there are."""
    names = shipped()
    if name in names:
        return read_shipped(names[name])
    path = own(name) or Path(name)
    if path.is_file():
        return Calibration.load(path)
    raise BadInput(
        f"no costs {name!r}: give a calibration's file, auto, measured, roofline, or one of "
        f"{', '.join([*names, *own_names()])}"
    )
