"""Baseline of the gate: stored figures of a scenario, draw by draw, to compare later ones with.

`pagecast check --write-baseline DIR` writes `baseline.json`, small enough to keep with the code: all figures
of each draw, and the trace, scenario and costs behind them. A comparison makes the same draws of costs and
workload again (common random numbers), so that only changes of the scenario or of pagecast remain. A folder
of `pagecast replay --out` serves too: its scenario is replayed again, draw by draw.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from pagecast import __version__
from pagecast.planner_app.planner.execution.interface import Executor, Progress
from pagecast.planner_app.planner.gate.check_file import CheckFile
from pagecast.planner_app.planner.gate.figures import compared
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.choose import AUTO
from pagecast.sim.documents import read_text
from pagecast.sim.replay.replicates import ReplicateJob, Study, by_name
from pagecast.sim.replay.resample import resample
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pagecast.traces.schema import COLUMNS, Trace
from pagecast.traces.write import replacing
from pydantic import BaseModel, ConfigDict, ValidationError

FILE = "baseline.json"
TOKENS = ("input_tokens", "output_tokens")
_MOST_BYTES = 64 << 20
_AGAIN = "write it again with --write-baseline"


class Baseline(BaseModel):
    """`figures` has one list per figure, with one value per draw (null: the draw has no such figure).

    `reading` has the options with which the trace was read: limit, speedup and so on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = 1
    made_with: str
    trace: str
    trace_digest: str
    costs: str
    reading: dict[str, Any] = {}
    scenario: dict[str, Any]
    figures: dict[str, list[float | None]]

    @property
    def draws(self) -> int:
        """How many draws it holds."""
        return min((len(values) for values in self.figures.values()), default=0)


def digest(trace: Trace) -> str:
    """A trace's content in 32 hexadecimal digits: equal for equal requests of equal generators."""
    state = xxhash.xxh3_128()
    for name in COLUMNS:
        if name in trace.requests:
            state.update(name.encode())
            values = trace.requests[name]
            if values.dtype.kind in "if":
                state.update(np.ascontiguousarray(values.to_numpy()).tobytes())
            else:
                state.update(repr(values.astype(object).where(values.notna(), None).tolist()).encode())
    if trace.spans is not None:
        for part in (trace.spans.start, trace.spans.content, trace.spans.offset, trace.spans.length):
            state.update(np.ascontiguousarray(part).tobytes())
    for ids in trace.token_ids or ():
        state.update(len(ids).to_bytes(8, "little") + np.ascontiguousarray(ids).tobytes())
    if trace.concurrency is not None:
        state.update(repr(trace.concurrency).encode())
    if trace.recipe is not None:  # draws of the workload are its generator's
        state.update(json.dumps(trace.recipe, sort_keys=True, default=str).encode())
    return state.hexdigest()


def draws(
    trace: Trace, scenario: Scenario, count: int, run: Executor, progress: Progress | None = None
) -> dict[str, list[float | None]]:
    """All figures of `count` replays, each with costs and a workload drawn anew; equal seeds, equal draws."""
    study = Study(trace, scenario, scenario.seed, resample, compared)
    rows = run.map(study.run, [ReplicateJob(index) for index in range(count)], progress)
    return {name: [_finite_or_none(value) for value in values] for name, values in by_name(rows).items()}


def _finite_or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None


def make(trace: Trace, file: CheckFile, costs: str, figures: dict[str, list[float | None]]) -> Baseline:
    """A baseline of these draws."""
    return Baseline(
        made_with=__version__,
        trace=trace.name,
        trace_digest=digest(trace),
        costs=costs,
        reading=_plain(file.reading()),
        scenario=file.scenario.resolved(),
        figures=figures,
    )


def _plain(reading: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in reading.items()}


def write(baseline: Baseline, folder: Path) -> None:
    """Writes `baseline.json` into `folder`, whole or not at all. Errors: BadInput."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--write-baseline {folder}: can't be made ({error.strerror})") from None
    with replacing(folder / FILE) as place:
        place.write_text(baseline.model_dump_json(indent=1) + "\n", encoding="utf-8")


def load(folder: Path, trace: Trace, file: CheckFile) -> Baseline | Scenario:
    """The baseline in a folder; of a replay's folder the scenario, whose draws are yet to be made.

    Errors: BadInput for a folder that is neither, one of a fleet, one that is broken, or one made of another
    trace or seed.
    """
    if not folder.is_dir():
        raise BadInput(f"--baseline {folder}: no such folder; make one with --write-baseline")
    path, seed = folder / FILE, file.scenario.seed
    if path.is_file():
        baseline = _parse(path)
        if baseline.trace_digest != digest(trace):
            raise BadInput(f"{path}: {_otherwise_read(baseline, file)}; {_AGAIN}")
        if (baseline_seed := baseline.scenario.get("seed")) != seed:
            raise BadInput(f"{path}: was drawn with seed {baseline_seed}, not {seed}; {_AGAIN}")
        return baseline
    if (folder / "fleet.yaml").is_file():
        raise BadInput(
            f"--baseline {folder}: holds the replay of a fleet, and check replays one replica; {_AGAIN}"
        )
    if (folder / "scenario.yaml").is_file() and (folder / "trace.parquet").is_file():
        try:
            other = read(str(folder / "trace.parquet"))
        except BadInput as error:
            raise BadInput(f"--baseline {folder}: {error}") from None
        if digest(other) != digest(trace):
            raise BadInput(f"--baseline {folder}: {_other_requests(other, trace, file)}")
        return Scenario.load(folder / "scenario.yaml", seed=seed)
    raise BadInput(f"--baseline {folder}: has no {FILE}, and is no folder of replay --out; {_AGAIN}")


def _parse(path: Path) -> Baseline:
    try:
        baseline = Baseline.model_validate_json(read_text(path, _MOST_BYTES, _AGAIN))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"][:2])) or "the file"
        raise BadInput(f"{path}: is corrupt: {name}: {first['msg']}; {_AGAIN}") from None
    if baseline.version != 1:
        raise BadInput(f"{path}: has version {baseline.version}, this pagecast reads 1; {_AGAIN}")
    if len({len(values) for values in baseline.figures.values()}) != 1 or not baseline.draws:
        raise BadInput(f"{path}: is corrupt: figures have no draws, or not as many each; {_AGAIN}")
    return baseline


def _otherwise_read(baseline: Baseline, file: CheckFile) -> str:
    """The difference between a baseline's trace and today's: other reading options, or another trace."""
    now = _plain(file.reading())
    changes = [
        f"{name} {_option_text(baseline.reading[name])} (now {_option_text(now[name])})"
        for name in now
        if name in baseline.reading and baseline.reading[name] != now[name]
    ]
    if changes:
        return f"was made with check.{', '.join(changes)}"
    other_options = "" if baseline.reading else f" (or with another {', '.join(now)})"
    return f"was made of another trace than {file.check.trace or 'the load'} is now{other_options}"


def _option_text(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _other_requests(other: Trace, trace: Trace, file: CheckFile) -> str:
    """How a replay's trace differs from today's, as far as an option of the section `check` can mend it."""
    limit, speedup = file.check.limit, file.check.speedup
    if len(other) != len(trace):
        return (
            f"was replayed with {len(other):,} requests, not {len(trace):,} as check.limit "
            f"({_option_text(limit)}) leaves of {trace.name}; set it to what --limit was, or replay again"
        )
    factor = _times_as_fast(other, trace)
    if factor and file.check.rate is not None:
        return (
            f"was replayed at {factor * file.check.rate:.4g} requests per second, not at check.rate "
            f"({file.check.rate:g}); set that to what --rate was, or replay again"
        )
    if factor:
        return (
            f"was replayed at {factor * speedup:.4g} times the trace's own speed, not at check.speedup "
            f"({speedup:g}) times; set that to what --speedup was, or replay again"
        )
    return f"was made of another trace than {trace.name} is now; replay again, or {_AGAIN}"


def _times_as_fast(other: Trace, trace: Trace) -> float:
    """By what factor the same requests come faster in `other`; 0 where they are others."""
    if any(not np.array_equal(other.integers(name), trace.integers(name)) for name in TOKENS):
        return 0.0
    there, here = other.seconds("arrival_s"), trace.seconds("arrival_s")
    comparable = (there > 0) & (here > 0)
    if not comparable.any():
        return 0.0
    factor = float(np.median(here[comparable] / there[comparable]))
    same = np.allclose(here, there * factor, rtol=1e-6, atol=1e-9, equal_nan=True)
    return factor if same and abs(factor - 1) > 1e-6 else 0.0


def changed(before: Baseline | Scenario, after: Scenario, costs: str) -> Sequence[str]:
    """The scenario's fields that differ, as `field: old -> new`; `costs` is the name of today's step costs.

    Costs that `auto` chose are those that it chose, a field that is not given is as the engine has it, and a
    file is the same however its place is written.
    """
    if isinstance(before, Baseline):
        old = _comparable(before.scenario, before.costs)
    else:
        old = _comparable(before.resolved(), before.step_costs().name)
    new = _comparable(after.resolved(), costs)
    return [f"{name}: {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name]]


def _comparable(fields: dict[str, Any], costs: str) -> dict[str, Any]:
    same = dict(fields)
    if same.get("costs") == AUTO:
        same["costs"] = costs
    for name in ("model", "costs"):
        path = Path(str(same.get(name))).expanduser()
        same[name] = str(path.absolute()) if path.exists() else same.get(name)
    return same
