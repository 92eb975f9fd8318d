"""Construction of a calibration from recorded runs: fit, bootstrap, noise, cross-validation, provenance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pagecast import __version__
from pagecast.sim.core.errors import BadInput, Unfinished
from pagecast.sim.costs.calibration.file import Calibration, Host
from pagecast.sim.costs.calibration.shape import identity, model_of, shape_of
from pagecast.sim.costs.families.registry import family
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.costs.families.term import Place
from pagecast.sim.fitting.ahead import AheadSteps, ahead_of
from pagecast.sim.fitting.design import design
from pagecast.sim.fitting.features import StepTable, step_table
from pagecast.sim.fitting.fit import Fit, fit, solve
from pagecast.sim.fitting.left_out import left_out, names_of
from pagecast.sim.fitting.noise import noise_of, region_errors
from pagecast.sim.fitting.option_fit import has_options, option_costs_of
from pagecast.sim.fitting.overlap import fitted_host, measured_host
from pagecast.sim.fitting.sweep import is_sweep, load_sweep
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.traces.arrays import Ints
from pagecast.traces.seeds import checked_seed

REPLICATES = 32
# Greatest sd of a coefficient between resampled fits over its mean: terms above are dropped.
MOST_SPREAD = 0.30
_BLOCK = 64  # consecutive steps that a resampled block keeps together
_REPLICATE_ROUNDS = 3

Progress = Callable[[str], None]


@dataclass(frozen=True)
class CalibrationRun:
    """A recorded run to fit, or the first part of it: `upto` is a share of its steps, above 0 up to 1."""

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
        """The runs that `text` names: one (see `parse`), or those of a sweep's folder. Errors: BadInput."""
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

    Synchronous runs give the costs of a step. Asynchronous runs, if there are any, give the host time that is
    hidden when steps are planned ahead. If the kernel family records the end of each step on the device
    (`KernelFamily.records_ends`), they also give device times.

    Runs with n-grams or a host tier (`option_fit.has_options`) give no costs of plain steps, but what these
    options take beyond them.

    `replicates` is the number of bootstrap copies, drawn with `seed`. `progress` gets the name of each stage.
    Errors: BadInput where there is no synchronous run, where runs differ in set-up, for too few steps, and
    for a seed below 0; Unfinished after an interrupt, with the costs without what was not fitted by then:
    copies, errors on runs left out, options.
    """
    checked_seed(seed)
    tell = progress or (lambda _: None)
    optional = [source.run for source in sources if has_options(source.run)]
    sources = [source for source in sources if not has_options(source.run)]
    plain = [source for source in sources if not source.run.pipeline_depth]
    ahead = [source for source in sources if source.run.pipeline_depth]
    if not plain:
        raise BadInput(
            "no run with synchronous scheduling: without one, costs can't be told from overlap; record one "
            "with --no-async-scheduling" + (", without n-grams and a host tier" if optional else "")
        )
    shape = _one_shape(sources)
    _check_same_set_up(plain[0].run, optional)
    tables = [_timed(source, shape) for source in plain]
    tell("fitting")
    ahead_tables = [step_table(source.run, shape, source.upto) for source in ahead]
    ahead_steps = _ahead_steps(plain, ahead, ahead_tables, shape)
    fitted, cross, complete = None, [], True
    try:
        fitted = _fit_certain_terms(tables, ahead_steps, shape, replicates, seed)
        tell("cross-validating")
        cross = left_out(tables, shape, ahead_steps)
    except BadInput as error:
        raise BadInput(f"{', '.join(str(source.run.folder) for source in plain)}: {error}") from None
    except KeyboardInterrupt as stopped:
        fitted = stopped.answer if isinstance(stopped, Unfinished) else fitted
        if fitted is None:
            raise
        complete = False
    best_fit, copies, hosts = fitted
    host = best_fit.host or _host(ahead_tables, tables, best_fit, shape)
    calibration = Calibration(
        name=name,
        made_for=_made_for(plain[0].run),
        shape=shape,
        knots=best_fit.knots,
        curve_ns=tuple(round(value, 1) for value in best_fit.curve.tolist()),
        terms_ns={key: float(f"{value:.6g}") for key, value in best_fit.terms.items()},
        host=host,
        noise=noise_of(tables, best_fit, shape, cross, plain[0].run.meta.get("engine"), _gpus(plain)),
        provenance=_provenance(plain + ahead, tables + ahead_tables, best_fit),
        regions=region_errors(tables, best_fit, shape),
        cross_validation=[row for part in cross for row in part.rows()],
        fitted=_fitted_range(tables),
        replicates=copies,
        hosts=hosts or _hosts(ahead_tables, best_fit, copies, shape),
    )
    if not complete:
        raise Unfinished(calibration)
    if not optional:
        return calibration
    tell("fitting options")
    rows = [{"run": run.name, "steps": len(run.steps), "gpu_id": run.meta.get("gpu_id")} for run in optional]
    try:
        options = option_costs_of(calibration, optional)
    except KeyboardInterrupt:
        raise Unfinished(calibration) from None
    return replace(
        calibration,
        options=options,
        provenance={**calibration.provenance, "runs_with_options": rows},
    )


def _one_shape(sources: list[CalibrationRun]) -> TileShape:
    """The set-up all runs share. Errors: BadInput naming the run and what differs."""
    first = sources[0].run
    where = f"{first.folder}/meta.json"
    shape = shape_of(first.meta, where)
    _check_same_set_up(first, [source.run for source in sources[1:]])
    for source in sources[1:]:
        other = f"{source.run.folder}/meta.json"
        if shape_of(source.run.meta, other) != shape:
            raise BadInput(f"{other}: other CUDA graphs, attention or sharding than {first.folder}'s")
    return shape


def _check_same_set_up(first: RecordedRun, others: list[RecordedRun]) -> None:
    """Errors: BadInput naming the run of another engine, GPU or model, and what differs."""
    model = identity(model_of(first.meta, f"{first.folder}/meta.json"))
    for run in others:
        for key in ("engine", "gpu", "kernels"):
            if run.meta.get(key) != first.meta.get(key):
                raise BadInput(
                    f"{run.folder}/meta.json: {key} is {run.meta.get(key)!r}, {first.folder} has "
                    f"{first.meta.get(key)!r}: calibrate them apart"
                )
        other = f"{run.folder}/meta.json"
        if identity(model_of(run.meta, other)) != model:
            raise BadInput(f"{other}: another model than {first.folder}'s: calibrate them apart")


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
    """The number of different GPUs that the runs name in `gpu_id`; at least 1."""
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


def _provenance(sources: list[CalibrationRun], tables: list[StepTable], best_fit: Fit) -> dict[str, Any]:
    runs = []
    plain = [source for source in sources if not source.run.pipeline_depth]
    scales = [*best_fit.scales[: len(plain)], *[None] * (len(tables) - len(plain))]
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
                "kernels": meta.get("kernels"),
            }
        )
    return {
        "pagecast": __version__,
        "runs": runs,
        "step_sd": round(best_fit.sd, 5),
        "dropped_terms": list(best_fit.dropped),
        "absent_terms": list(best_fit.absent),
    }


def _fitted_range(tables: list[StepTable]) -> dict[str, int]:
    """The most tokens, requests and context that a fitted step had. Beyond them costs are extrapolated."""

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
    """Device times from asynchronous runs; none where the kernel family does not record them.

    Runs of one folder, such as those of a sweep, count as one recording.
    """
    if not family(shape.family).records_ends:
        return []
    folders = [source.run.folder for source in plain]
    groups = []
    for source, table in zip(ahead, ahead_tables, strict=True):
        if source.run.folder not in folders:
            folders.append(source.run.folder)
        groups.append(ahead_of(source.run, table, shape, folders.index(source.run.folder)))
    return groups


def _host(ahead_tables: list[StepTable], tables: list[StepTable], best_fit: Fit, shape: TileShape) -> Host:
    """The host time that planning ahead hides, where the fit itself does not give it."""
    if ahead_tables and not family(shape.family).records_ends:
        return fitted_host(ahead_tables, best_fit, shape)
    return measured_host(tables)


def _fit_certain_terms(
    tables: list[StepTable], ahead_steps: list[AheadSteps], shape: TileShape, replicates: int, seed: int
) -> tuple[Fit, tuple[tuple[float, ...], ...], tuple[Host, ...]]:
    """Fits, drops the term of the greatest spread between bootstrap copies, and fits again.

    Ends when no spread is above `MOST_SPREAD`; `required` terms stay. Returns the fit and its copies,
    as `_bootstrap` gives them. Errors: Unfinished with the last fit, without copies, after an interrupt.
    """
    best_fit = None
    dropped: tuple[str, ...] = ()
    required = {
        term.name for term in family(shape.family).terms if term.needed and term.place is not Place.ARRIVAL
    }
    while True:
        try:
            best_fit = fit(tables, shape, ahead_steps, without=dropped)
            copies, hosts = _bootstrap(tables, ahead_steps, best_fit, shape, replicates, seed)
        except KeyboardInterrupt:
            if best_fit is None:
                raise
            raise Unfinished((best_fit, (), ())) from None
        spreads = _spreads(best_fit, copies)
        uncertain = {name: sd for name, sd in spreads.items() if sd > MOST_SPREAD and name not in required}
        if not uncertain:
            return best_fit, copies, hosts
        dropped = (*dropped, max(uncertain, key=uncertain.__getitem__))


def _spreads(best_fit: Fit, copies: tuple[tuple[float, ...], ...]) -> dict[str, float]:
    """The standard deviation of each term's coefficient between copies, as a share of its mean."""
    if len(copies) < 2:
        return {}
    rows = np.array(copies)[:, len(best_fit.knots) :]
    share = rows.std(axis=0) / np.maximum(rows.mean(axis=0), 1e-12)
    return dict(zip(best_fit.terms, share.tolist(), strict=True))


def _bootstrap(
    tables: list[StepTable],
    ahead_steps: list[AheadSteps],
    best_fit: Fit,
    shape: TileShape,
    count: int,
    seed: int,
) -> tuple[tuple[tuple[float, ...], ...], tuple[Host, ...]]:
    """Bootstrap copies: coefficients fitted to runs that are resampled by blocks of consecutive steps.

    The second tuple has the host's share of each copy; it is empty where the fit does not give one.
    """
    if count < 1:
        return (), ()
    full, _ = design(tables, shape, ahead_steps)
    base = full.keeping(tuple(best_fit.terms))
    random = np.random.default_rng(seed)
    copies, hosts = [], []
    for _ in range(count):
        rows = np.concatenate([_blocks(rows, random) for rows in base.blocks()])
        values, _, _ = solve(base.take(rows), best_fit.solution, _REPLICATE_ROUNDS)
        curve, terms, host = base.parted(values)
        copies.append((*curve.tolist(), *terms.values()))
        hosts += [host] if host else []
    return tuple(copies), tuple(hosts)


def _hosts(
    ahead_tables: list[StepTable], best_fit: Fit, copies: tuple[tuple[float, ...], ...], shape: TileShape
) -> tuple[Host, ...]:
    """The host time that planning ahead hides, fitted with each bootstrap copy of the coefficients.

    Asynchronous runs are not resampled. A copy with longer steps has more host time to hide.
    """
    size = len(best_fit.knots)

    def copy_of(values: tuple[float, ...]) -> Fit:
        terms = dict(zip(best_fit.terms, values[size:], strict=True))
        return replace(best_fit, curve=np.array(values[:size]), terms=terms)

    fits = (
        [copy_of(values) for values in copies]
        if ahead_tables and not family(shape.family).records_ends
        else []
    )
    return tuple(fitted_host(ahead_tables, copy, shape) for copy in fits)


def _blocks(rows: Ints, random: np.random.Generator) -> Ints:
    """As many rows as before, drawn with replacement in blocks of neighbours that wrap around the end."""
    starts = random.integers(0, len(rows), size=-(-len(rows) // _BLOCK))
    offsets = (starts[:, None] + np.arange(_BLOCK)[None, :]) % len(rows)
    return np.asarray(rows[offsets.ravel()[: len(rows)]], np.int64)
