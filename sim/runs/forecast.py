"""Forecast against measurement: a recorded run replayed with a cost model, its figures beside the run's.

Intervals hold what the calibration does not know and what differs from run to run. The workload's own
uncertainty is left out: the trace is the one that was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from pagecast.sim.core.errors import BadInput, Unfinished
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.choose import AUTO, choose
from pagecast.sim.costs.calibration.shape import CPU, model_of
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.machine.models import model as find_model
from pagecast.sim.note import Note
from pagecast.sim.replay.replicates import Progress, ReplayOf, Run, Spread, Study, few_draws, replay_alone
from pagecast.sim.replay.result import Result
from pagecast.sim.replay.simulation import replay
from pagecast.sim.runs.bench_results import BenchResults
from pagecast.sim.runs.block_count import BlockCount, block_count
from pagecast.sim.runs.engine_rules import rules_of_run
from pagecast.sim.runs.in_sample import in_sample
from pagecast.sim.runs.other_kernels import other_kernels
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.run_figures import (
    LATENCIES,
    SCALARS,
    STATISTICS,
    RunFigures,
    latency_figures,
    measured,
    simulated,
)
from pagecast.sim.runs.validate import limits_of
from pagecast.sim.scenario import HostTier, Scenario
from pagecast.traces.schema import Trace

REPLICATES = 80


@dataclass(frozen=True)
class ForecastRow:
    """One figure: forecast, measurement, signed error in percent, and its 90% interval where there is one.

    `sensitivity` is the percent that 1% of step time changes the forecast by in the mean, `range_percent` the
    least and the most that step times within 1% change it by.
    """

    name: str
    predicted: float
    measured: float
    low: float | None = None
    high: float | None = None
    sensitivity: float | None = None
    range_percent: tuple[float, float] | None = None

    @property
    def error_percent(self) -> float:
        """Signed; 0 where both are 0, infinite where only the measurement is."""
        if self.measured:
            return 100 * (self.predicted / self.measured - 1)
        return 0.0 if not self.predicted else math.inf

    @property
    def covered(self) -> bool | None:
        """Whether the interval holds the measurement; None without an interval.

        None as well for a figure that no draw changes and that is as measured: it tells nothing of intervals.
        """
        if self.low is None or self.high is None:
            return None
        if self.low == self.high == self.measured:
            return None
        return self.low <= self.measured <= self.high

    def as_dict(self) -> dict[str, Any]:
        """As printed in JSON."""
        return {
            "predicted": self.predicted,
            "measured": self.measured,
            "error_percent": self.error_percent,
            "low": self.low,
            "high": self.high,
            "covered": self.covered,
            "percent_per_percent_of_step_time": self.sensitivity,
            "within_one_percent_of_step_time": self.range_percent and list(self.range_percent),
        }


@dataclass(frozen=True)
class Forecast:
    """A recorded run beside its forecast: one row per figure, and the latencies behind both.

    `notes` have the error to expect of the costs, and whether they were fitted to this run (`in_sample`), to
    another engine, to other kernels, or to a narrower range than the run's. `blocks`: the KV blocks that
    were to be expected, None where unknown.
    """

    run: str
    costs: str
    notes: tuple[str, ...]
    in_sample: bool
    rows: tuple[ForecastRow, ...]
    predicted: RunFigures
    measured: RunFigures
    blocks: BlockCount | None = None

    @property
    def worst_percent(self) -> float:
        """The largest error, of either sign."""
        return max(abs(row.error_percent) for row in self.rows if not math.isnan(row.error_percent))

    def as_dict(self) -> dict[str, Any]:
        """As printed in JSON: latencies by statistic, then totals, and how often intervals held."""
        by_name = {row.name: row for row in self.rows}
        body: dict[str, Any] = {
            "run": self.run,
            "costs": self.costs,
            "expected_error": " ".join(self.notes),
            "in_sample": self.in_sample,
        }
        for name in LATENCIES:
            body[name] = {key: by_name[f"{name}.{key}"].as_dict() for key in STATISTICS}
        for name in SCALARS:
            body[name] = by_name[name].as_dict()
        body["num_gpu_blocks"] = None if self.blocks is None else self.blocks.as_dict()
        body["coverage"] = self.coverage()
        return body

    def rows_as_dict(self) -> dict[str, Any]:
        """Each figure by name, as printed in JSON."""
        return {"run": self.run, "costs": self.costs} | {row.name: row.as_dict() for row in self.rows}

    def coverage(self) -> dict[str, float | int | None]:
        """Figures with an interval, how many and what share hold the measurement, median half-width (%)."""
        with_interval = [row for row in self.rows if row.covered is not None]
        widths = [
            50 * ((row.high or 0.0) - (row.low or 0.0)) / row.measured
            for row in with_interval
            if row.measured
        ]
        middle = median(widths) if widths else None
        inside = sum(bool(row.covered) for row in with_interval)
        share = inside / len(with_interval) if with_interval else None
        return {
            "figures": len(with_interval),
            "inside": inside,
            "covered": share,
            "median_half_width_percent": middle,
        }


def scenario_of(run: RecordedRun, costs: str = AUTO) -> Scenario:
    """The scenario a run was recorded in, from its `meta.json`.

    Errors: BadInput for what it lacks, and for a run on a CPU: no scenario is of one.
    """
    limits = limits_of(run)
    config = run.meta.get("config", {})
    if not isinstance(run.meta.get("gpu"), str):
        raise BadInput(f"{run.folder}/meta.json: 'gpu' is {run.meta.get('gpu')!r}, must name the GPU")
    if run.meta["gpu"] == CPU:
        raise BadInput(
            f"{run.folder}/meta.json: the run was recorded on a CPU, and times are forecast for GPUs alone; "
            "leave out --costs to compare its decisions, or give a run that was recorded on a GPU"
        )
    fields = {
        "model": _model_of(run),
        "gpu": run.meta["gpu"],
        "engine": rules_of_run(run.meta).text,
        "costs": costs,
        "num_gpu_blocks": limits.num_blocks,
        **limits.options(),
        "block_size": config["block_size"],
        "tensor_parallel_size": int(config.get("tensor_parallel_size", 1)),
        "kv_cache_dtype": str(config.get("kv_cache_dtype", "auto")),
        "speculative_config": config.get("speculative_config"),
    }
    scenario = Scenario.make(fields, f"{run.folder}/meta.json")
    if limits.host is None:
        return scenario
    block_bytes = scenario.layout().block_bytes * scenario.tensor_parallel_size
    return scenario.changed(host=HostTier.of(limits.host, scenario.block_size, block_bytes))


def _model_of(run: RecordedRun) -> str:
    """The run's model: its name where that is known here, else the `meta.json` that describes it."""
    place = f"{run.folder}/meta.json"
    name = str(run.meta.get("model_name") or model_of(run.meta, place).name)
    try:
        find_model(name)
    except BadInput:
        return place
    return name


def figures_of(result: Result) -> dict[str, float]:
    """The figures of one replay that are compared with the measured ones."""
    return simulated(result).figures()


def forecast(
    run: RecordedRun,
    costs: str,
    *,
    replicates: int = REPLICATES,
    host_time_factor: float | None = None,
    seed: int = 0,
    workers: int | None = None,
    run_draws: Run | None = None,
    progress: Progress | None = None,
) -> Forecast:
    """Replays a run's requests, as their clients sent them, and sets every figure beside the measured one.

    `host_time_factor`: see `Scenario`; a recording does not say it of its host. `run_draws`: see
    `Study.spread`. Errors: BadInput; Unfinished with the forecast, without what an interrupt left out.
    """
    real = measured(run)
    recorded = scenario_of(run, costs)
    if host_time_factor is not None:
        recorded = recorded.changed(host_time_factor=host_time_factor)
    scenario, model = _costs_of(run, recorded)
    trace = run.trace("arrival")
    result = replay(trace, scenario, costs=model)
    simulation = simulated(result)
    study = Study(trace, scenario, seed, figures=figures_of)
    figures, actual = simulation.figures(), real.figures()
    spread, complete = _spread(study, replicates, figures, workers, run_draws, progress)
    rows = _rows(figures, actual, spread.around(figures))
    own, other = _made_alike(run, model)
    remarks = (own, other, *_notes(result, trace), few_draws(replicates))
    notes = tuple(note for note in remarks if note)
    blocks = block_count(run)
    return _told(
        Forecast(run.name, model.name, notes, own is not None, rows, simulation, real, blocks), complete
    )


def forecast_results(
    results: BenchResults,
    scenario: Scenario,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
    workers: int | None = None,
    run_draws: Run | None = None,
    progress: Progress | None = None,
    replay_of: ReplayOf = replay_alone,
) -> Forecast:
    """Forecasts the latencies of a benchmark's requests in `scenario`; nothing else is known of them.

    `replay_of`: see `Study`. `run_draws` and errors: as for `forecast`.
    """
    costs = scenario.step_costs()
    result = replay(results.trace, scenario, costs=costs)
    client = results.client
    if client is not None:
        result = client.seen(result)
    real = latency_figures(results.ttft_s, results.tpot_s, results.e2e_s)
    simulation = simulated(result)
    observe = None if client is None else client.observed
    study = Study(results.trace, scenario, seed, figures=figures_of, replay=replay_of, observe=observe)
    figures = {name: value for name, value in simulation.figures().items() if name in real.figures()}
    point = simulation.figures()
    spread, complete = _spread(study, replicates, point, workers, run_draws, progress)
    rows = _rows(figures, real.figures(), spread.around(simulation.figures()))
    candidates = (*_notes(result, results.trace), _by_client(results), few_draws(replicates))
    notes = tuple(note for note in candidates if note)
    return _told(Forecast(results.name, costs.name, notes, False, rows, simulation, real), complete)


def _spread(
    study: Study,
    replicates: int,
    point: dict[str, float],
    workers: int | None,
    run: Run | None,
    progress: Progress | None,
) -> tuple[Spread, bool]:
    """The spread of a study's draws, and whether all of them came."""
    try:
        return study.spread(replicates, point=point, workers=workers, run=run, progress=progress), True
    except Unfinished as stopped:
        return stopped.answer, False


def _told(found: Forecast, complete: bool) -> Forecast:
    if not complete:
        raise Unfinished(found)
    return found


def _by_client(results: BenchResults) -> Note | None:
    client = results.client
    if client is None or client.fixed_s == client.token_s == 0:
        return None
    return Note("client_share", fixed_ms=1e3 * client.fixed_s, per_thousand_ms=1e6 * client.token_s)


def _rows(figures: dict[str, float], actual: dict[str, float], spread: Spread) -> tuple[ForecastRow, ...]:
    return tuple(
        ForecastRow(
            name,
            value,
            actual[name],
            spread.low.get(name),
            spread.high.get(name),
            spread.sensitivity.get(name),
            spread.reach.get(name),
        )
        for name, value in figures.items()
    )


def _costs_of(run: RecordedRun, scenario: Scenario) -> tuple[Scenario, StepCosts]:
    """The scenario and its costs; "auto" is what fits the run's engine, whichever profile it follows."""
    own = scenario.profile.name
    engine = run.meta.get("engine", own)
    if scenario.costs != AUTO or engine == own:
        return scenario, scenario.step_costs()
    costs = choose(AUTO, replace(scenario.target(), engine=engine))
    return scenario.changed(costs=costs.name), costs


def _made_alike(run: RecordedRun, costs: StepCosts) -> tuple[Note | None, Note | None]:
    """Notes: whether the run was fitted, and whether another engine or other kernels were."""
    if not isinstance(costs, CalibratedCosts):
        return None, None
    fitted, recorded = costs.calibration.made_for.get("engine"), run.meta.get("engine", "unknown")
    own = in_sample(costs.calibration, run)
    if fitted != recorded:
        return own, Note("other_engine", fitted=fitted, recorded=recorded)
    return own, other_kernels(costs.calibration, run.meta)


def _notes(result: Result, trace: Trace) -> tuple[str, ...]:
    """Notes of the replay on costs and scenario; the trace is the run's own and needs no note."""
    return tuple(note for note in result.notes if note not in trace.notes)
