"""From recorded runs to a calibration: fit, noise, cross-validation, bootstrap and provenance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.file import Calibration, Host
from pagecast.sim.costs.calibration.shape import identity, model_of, shape_of
from pagecast.sim.costs.families.registry import family
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.fitting.ahead import AheadSteps, ahead_of
from pagecast.sim.fitting.design import design
from pagecast.sim.fitting.features import StepTable, step_table
from pagecast.sim.fitting.fit import Fit, fit, solve
from pagecast.sim.fitting.left_out import left_out, names_of
from pagecast.sim.fitting.noise import noise_of, region_errors
from pagecast.sim.fitting.overlap import fitted_host, measured_host
from pagecast.sim.fitting.sweep import is_sweep, load_sweep
from pagecast.sim.runs.recorded import RecordedRun

REPLICATES = 32
MOST_SPREAD = 0.30  # of a coefficient between resampled fits, as a share of its mean: less certain terms go
_BLOCK = 64  # consecutive steps that a resampled block keeps together
_REPLICATE_ROUNDS = 3

Progress = Callable[[str], None]


@dataclass(frozen=True)
class CalibrationRun:
    """A recorded run to learn from, or its first part `upto` (a share of its steps)."""

    run: RecordedRun
    upto: float = 1.0

    @classmethod
    def parse(cls, text: str) -> CalibrationRun:
        """`FOLDER`, or `FOLDER:0.5` for its first half. Errors: BadInput."""
        folder, colon, share = text.rpartition(":")
        if not colon or Path(text).is_dir():
            return cls(RecordedRun.load(text))
        try:
            upto = float(share)
        except ValueError:
            upto = 0.0
        if not 0 < upto <= 1:
            raise BadInput(f"{text}: the part after the colon is a share of the run's steps, above 0 up to 1")
        return cls(RecordedRun.load(folder), upto)

    @classmethod
    def all(cls, text: str) -> list[CalibrationRun]:
        """What `text` names: a run (see `parse`), or the folder of a sweep, whose runs these are."""
        folder = Path(text)
        return [cls(run) for run in load_sweep(folder)] if is_sweep(folder) else [cls.parse(text)]


def calibrate(
    sources: list[CalibrationRun],
    name: str,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
    progress: Progress | None = None,
) -> Calibration:
    """Fits step costs to recorded runs of one engine, model and GPU.

    Synchronous runs give the costs; asynchronous ones, where there are any, what of them is hidden when
    steps are planned ahead, and of our own engine what the device takes. Errors: BadInput where there is no
    synchronous run, where runs differ in set-up, or for too few steps.
    """
    tell = progress or (lambda _: None)
    plain = [source for source in sources if not source.run.pipeline_depth]
    ahead = [source for source in sources if source.run.pipeline_depth]
    if not plain:
        raise BadInput(
            "no run with synchronous scheduling: without one, costs can't be told from overlap; record one "
            "with --no-async-scheduling"
        )
    shape = _one_shape(sources)
    tables = [_timed(source, shape) for source in plain]
    tell("fitting")
    ahead_tables = [step_table(source.run, shape, source.upto) for source in ahead]
    ahead_steps = _ahead_steps(plain, ahead, ahead_tables, shape)
    try:
        found, copies, hosts = _certain(tables, ahead_steps, shape, replicates, seed)
    except BadInput as error:
        raise BadInput(f"{', '.join(str(source.run.folder) for source in plain)}: {error}") from None
    host = found.host or _host(ahead_tables, tables, found, shape)
    tell("cross-validating")
    cross = left_out(tables, shape, ahead_steps)
    return Calibration(
        name=name,
        made_for=_made_for(plain[0].run),
        shape=shape,
        knots=found.knots,
        curve_ns=tuple(round(value, 1) for value in found.curve.tolist()),
        terms_ns={key: float(f"{value:.6g}") for key, value in found.terms.items()},
        host=host,
        noise=noise_of(tables, found, shape, cross, plain[0].run.meta.get("engine"), _gpus(plain)),
        provenance=_provenance(plain + ahead, tables + ahead_tables, found),
        regions=region_errors(tables, found, shape),
        cross_validation=[row for part in cross for row in part.rows()],
        fitted=_most_seen(tables),
        replicates=copies,
        hosts=hosts or _hosts(ahead_tables, found, copies, shape),
    )


def _one_shape(sources: list[CalibrationRun]) -> TileShape:
    """The set-up all runs share. Errors: BadInput naming the run and what differs."""
    first = sources[0].run
    where = f"{first.folder}/meta.json"
    shape = shape_of(first.meta, where)
    for source in sources[1:]:
        run = source.run
        for key in ("engine", "gpu"):
            if run.meta.get(key) != first.meta.get(key):
                raise BadInput(
                    f"{run.folder}/meta.json: {key} is {run.meta.get(key)!r}, {first.folder} has "
                    f"{first.meta.get(key)!r}: calibrate them apart"
                )
        other = f"{run.folder}/meta.json"
        if identity(model_of(run.meta, other)) != identity(model_of(first.meta, where)):
            raise BadInput(f"{other}: another model than {first.folder}'s: calibrate them apart")
        if shape_of(run.meta, other) != shape:
            raise BadInput(f"{other}: other CUDA graphs, attention or sharding than {first.folder}'s")
    return shape


def _timed(source: CalibrationRun, shape: TileShape) -> StepTable:
    """The steps of a synchronous run. Errors: BadInput naming the line of a step that takes no time."""
    table = step_table(source.run, shape, source.upto)
    still = np.flatnonzero(table.ns <= 0)
    if len(still):
        line = int(table.index[still[0]]) + 1
        raise BadInput(
            f"{source.run.folder}/steps.jsonl.gz line {line}: no time passes until the next step starts"
        )
    return table


def _gpus(sources: list[CalibrationRun]) -> int:
    """How many GPUs the runs are of; those that do not tell are of one."""
    return max(1, len({source.run.meta.get("gpu_id") for source in sources} - {None}))


def _made_for(run: RecordedRun) -> dict[str, Any]:
    config = run.meta.get("config", {})
    facts = model_of(run.meta, f"{run.folder}/meta.json")
    return {
        "engine": run.meta.get("engine"),
        "engine_version": run.meta.get("engine_version"),
        "gpu": run.meta.get("gpu"),
        "model": facts.name,
        "model_shape": identity(facts),
        "tensor_parallel_size": config.get("tensor_parallel_size", 1),
        "kv_cache_dtype": config.get("kv_cache_dtype"),
        "attention": config.get("attention"),
        "block_size": config.get("block_size"),
    }


def _provenance(sources: list[CalibrationRun], tables: list[StepTable], found: Fit) -> dict[str, Any]:
    runs = []
    plain = [source for source in sources if not source.run.pipeline_depth]
    scales = [*found.scales[: len(plain)], *[None] * (len(tables) - len(plain))]
    for source, name, table, scale in zip(sources, names_of(tables), tables, scales, strict=True):
        meta = source.run.meta
        runs.append(
            {
                "run": name,
                "steps": len(table),
                "seconds": round(float(table.ns.sum()) / 1e9, 3),
                "part": source.upto,
                "asynchronous": bool(source.run.pipeline_depth),
                "scale": None if scale is None else round(scale, 5),
                "engine_version": meta.get("engine_version"),
                "driver": meta.get("driver"),
                "gpu_id": meta.get("gpu_id"),
                "torch": meta.get("torch"),
                "triton": meta.get("triton"),
            }
        )
    return {
        "pagecast": version("pagecast"),
        "runs": runs,
        "step_sd": round(found.sd, 5),
        "dropped_terms": list(found.dropped),
        "absent_terms": list(found.absent),
    }


def _most_seen(tables: list[StepTable]) -> dict[str, int]:
    """How far the fitted steps reach; beyond it the terms are continued straight on."""

    def most(column: str) -> int:
        return max(int(getattr(table, column).max(initial=0)) for table in tables)

    return {
        "tokens": most("tokens"),
        "decode_requests": most("n"),
        "decode_context": most("longest"),
        "prompt_context": most("longest_prompt"),
    }


def _ahead_steps(
    plain: list[CalibrationRun], ahead: list[CalibrationRun], ahead_tables: list[StepTable], shape: TileShape
) -> list[AheadSteps]:
    """What asynchronous runs of engines tell whose prompts run in graphs of their own: the device's times.

    Runs of one folder, as those of a sweep, are one recording.
    """
    if not family(shape.family).records_ends:
        return []
    folders = [source.run.folder for source in plain]
    found = []
    for source, table in zip(ahead, ahead_tables, strict=True):
        if source.run.folder not in folders:
            folders.append(source.run.folder)
        found.append(ahead_of(source.run, table, shape, folders.index(source.run.folder)))
    return found


def _host(ahead_tables: list[StepTable], tables: list[StepTable], found: Fit, shape: TileShape) -> Host:
    """What planning ahead hides, where the fit itself doesn't tell."""
    if ahead_tables and not family(shape.family).records_ends:
        return fitted_host(ahead_tables, found, shape)
    return measured_host(tables)


def _certain(
    tables: list[StepTable], ahead_steps: list[AheadSteps], shape: TileShape, replicates: int, seed: int
) -> tuple[Fit, tuple[tuple[float, ...], ...], tuple[Host, ...]]:
    """A fit whose coefficients hardly change from copy to copy, with its copies: see `_bootstrap`.

    The least certain term is dropped until all spreads are below `MOST_SPREAD`.
    """
    dropped: tuple[str, ...] = ()
    needed = {term.name for term in family(shape.family).terms if term.needed}
    while True:
        found = fit(tables, shape, ahead_steps, without=dropped)
        copies, hosts = _bootstrap(tables, ahead_steps, found, shape, replicates, seed)
        spreads = _spreads(found, copies)
        uncertain = {name: sd for name, sd in spreads.items() if sd > MOST_SPREAD and name not in needed}
        if not uncertain:
            return found, copies, hosts
        dropped = (*dropped, max(uncertain, key=uncertain.__getitem__))


def _spreads(found: Fit, copies: tuple[tuple[float, ...], ...]) -> dict[str, float]:
    """The standard deviation of each term's coefficient between copies, as a share of its mean."""
    if len(copies) < 2:
        return {}
    rows = np.array(copies)[:, len(found.knots) :]
    share = rows.std(axis=0) / np.maximum(rows.mean(axis=0), 1e-12)
    return dict(zip(found.terms, share.tolist(), strict=True))


def _bootstrap(
    tables: list[StepTable],
    ahead_steps: list[AheadSteps],
    found: Fit,
    shape: TileShape,
    count: int,
    seed: int,
) -> tuple[tuple[tuple[float, ...], ...], tuple[Host, ...]]:
    """Coefficients fitted to runs resampled by blocks of consecutive steps, and the host's share with each
    where the fit tells it."""
    if count < 1:
        return (), ()
    full, _ = design(tables, shape, ahead_steps)
    base = full.keeping(tuple(found.terms))
    random = np.random.default_rng(seed)
    copies, hosts = [], []
    for _ in range(count):
        rows = np.concatenate([_blocks(rows, random) for rows in base.blocks()])
        values, _, _ = solve(base.take(rows), found.solution, _REPLICATE_ROUNDS)
        curve, terms, host = base.parted(values)
        copies.append((*curve.tolist(), *terms.values()))
        hosts += [host] if host else []
    return tuple(copies), tuple(hosts)


def _hosts(
    ahead_tables: list[StepTable], found: Fit, copies: tuple[tuple[float, ...], ...], shape: TileShape
) -> tuple[Host, ...]:
    """What planning ahead hides, fitted to asynchronous runs with each copy of the coefficients.

    Asynchronous runs are not resampled: a copy whose steps take longer has more to hide.
    """
    size = len(found.knots)

    def copy_of(values: tuple[float, ...]) -> Fit:
        terms = dict(zip(found.terms, values[size:], strict=True))
        return replace(found, curve=np.array(values[:size]), terms=terms)

    fits = (
        [copy_of(values) for values in copies]
        if ahead_tables and not family(shape.family).records_ends
        else []
    )
    return tuple(fitted_host(ahead_tables, copy, shape) for copy in fits)


def _blocks(rows: npt.NDArray[np.int64], random: np.random.Generator) -> npt.NDArray[np.int64]:
    """As many rows again, drawn in blocks of neighbours that wrap around the end."""
    starts = random.integers(0, len(rows), size=-(-len(rows) // _BLOCK))
    offsets = (starts[:, None] + np.arange(_BLOCK)[None, :]) % len(rows)
    return np.asarray(rows[offsets.ravel()[: len(rows)]], np.int64)
