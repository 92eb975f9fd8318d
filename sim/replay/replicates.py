"""Replicates of a replay, run in parallel, for intervals and sensitivities.

Each replicate has step costs drawn at random (`costs/calibration/draw.py`), a seed of its own for what a
replay draws itself (draft tokens that are accepted, transfers that fail, routers) and, if asked for, a
resampled workload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
from pagecast.sim.core.errors import Unfinished
from pagecast.sim.costs.calibration.draw import draw, scaled
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.note import Note
from pagecast.sim.replay.cores import cores
from pagecast.sim.replay.result import Kept, Result
from pagecast.sim.replay.simulation import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from pagecast.traces.seeds import checked_seed

LOW, HIGH = 5.0, 95.0  # percentiles: a 90% interval
LEAST = 20  # draws; with so many, the lowest lies at the 5th percentile in the mean
_NOT_FORECAST = ("wall_s", "num_gpu_blocks", "requests", "defaults")
_SEEDS = 1_000_003  # apart enough that no two studies share a draw's seed
# Factors on step times at which a forecast's sensitivity is measured, beside 1. They stay within 1%, since
# two recordings of one load differ by more. There are several, for near saturation figures are not monotone.
STEP_TIMES = (0.99, 0.9925, 0.995, 0.9975, 1.0025, 1.005, 1.0075, 1.01)

Progress = Callable[[int], None]
Workload = Callable[[Trace, int], Trace]
FiguresOf = Callable[[Result], dict[str, float]]
ChangeCosts = Callable[[StepCosts], StepCosts]
ReplayOf = Callable[[Trace, Scenario, ChangeCosts], Result]
Run = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[tuple[int, Any]]]  # of an executor
Observe = Callable[[Result, int | None, int], Result]


@dataclass(frozen=True)
class Spread:
    """Spread of each figure over replicates: `low` and `high` are its 90% interval, `middle` the median draw.

    With step times changed by up to 1%, `sensitivity` is the least-squares slope (percent per percent of step
    time), and `reach` the least and the greatest change in percent, including that of the forecast, 0.
    """

    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)
    sensitivity: dict[str, float] = field(default_factory=dict)
    reach: dict[str, tuple[float, float]] = field(default_factory=dict)
    middle: dict[str, float] = field(default_factory=dict)

    def around(self, figures: dict[str, float]) -> Spread:
        """The same with each interval widened to hold the forecast's own figure.

        All draws may lie to one side of it: with a resampled workload, or near saturation.
        """
        low = {name: min(value, figures.get(name, value)) for name, value in self.low.items()}
        high = {name: max(value, figures.get(name, value)) for name, value in self.high.items()}
        return replace(self, low=low, high=high)


def summary_figures(result: Result) -> dict[str, float]:
    """All figures of a replay's summary by name: `ttft_s.p90`, `makespan_s` and so on; NaN for none."""
    return _figures(result.summary)


def _figures(summary: dict[str, Any]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, value in summary.items():
        if name in _NOT_FORECAST:
            continue
        if isinstance(value, dict):
            figures |= {f"{name}.{key}": _number(item) for key, item in value.items()}
        elif isinstance(value, int | float):
            figures[name] = float(value)
    return figures


def absent(name: str) -> float:
    """The value of a figure that a draw lacks: 0 for rejections of one reason, NaN for all others."""
    return 0.0 if name.startswith("rejected_reasons.") else float("nan")


def by_name(draws: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Every figure that any draw has, with one value for each draw (`absent` where it lacks it)."""
    names = dict.fromkeys(name for draw in draws for name in draw)
    return {name: [draw.get(name, absent(name)) for draw in draws] for name in names}


def with_intervals(summary: dict[str, Any], spread: Spread) -> dict[str, Any]:
    """A replay's summary with `low` and `high` beside its figures, in each table of statistics as well."""
    body: dict[str, Any] = {}
    spread = spread.around(_figures(summary))
    for name, value in summary.items():
        body[name] = value
        if isinstance(value, dict):
            bounds = {
                side: {key: table[f"{name}.{key}"] for key in value if f"{name}.{key}" in table}
                for side, table in (("low", spread.low), ("high", spread.high))
            }
            body[name] = {**value, **bounds}
    for side, table in (("low", spread.low), ("high", spread.high)):
        body[side] = {name: value for name, value in table.items() if "." not in name}
    return body


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


@dataclass(frozen=True)
class ReplicateJob:
    """One replay: draw number `index` of the costs, or the costs with every time multiplied by `factor`."""

    index: int
    factor: float | None = None


def replay_alone(trace: Trace, scenario: Scenario, change: ChangeCosts) -> Result:
    """A replay on one replica with changed step costs."""
    return replay(trace, scenario, costs=change(scenario.step_costs()), kept=Kept(steps=False))


@dataclass(frozen=True)
class Study:
    """A trace and a scenario to be replayed many times.

    `workload` makes the trace of a replicate from the trace and a seed, such as `resample`; None: all
    replicates have the same trace. `figures` reads figures by name from a result. `replay` serves a trace in
    a scenario; its third argument changes the step costs. `observe` makes of a result what is measured of it,
    given the number of the draw (None: no draw) and the seed. All must be importable in another process.
    Errors: BadInput for a negative seed.
    """

    trace: Trace
    scenario: Scenario
    seed: int = 0
    workload: Workload | None = None
    figures: FiguresOf = summary_figures
    replay: ReplayOf = replay_alone
    observe: Observe | None = None

    def __post_init__(self) -> None:
        checked_seed(self.seed)

    def run(self, job: ReplicateJob) -> dict[str, float]:
        """The figures of one replay. A draw has a seed of its own for what the replay draws itself."""
        trace, scenario = self.trace, self.scenario
        if job.factor is not None:
            change: ChangeCosts = partial(scaled, factor=job.factor)
        else:
            change = partial(draw, index=job.index, seed=self.seed)
            seed = self.seed * _SEEDS + job.index
            scenario = scenario.changed(seed=seed)
            if self.workload is not None:
                trace = self.workload(trace, seed)
        result = self.replay(trace, scenario, change)
        if self.observe is not None:
            result = self.observe(result, job.index if job.factor is None else None, self.seed)
        return self.figures(result)

    def spread(
        self,
        count: int,
        *,
        point: dict[str, float] | None = None,
        workers: int | None = None,
        run: Run | None = None,
        progress: Progress | None = None,
    ) -> Spread:
        """Runs `count` replicates, and where `point` has the forecast's figures, replays for sensitivity too.

        `workers`: processes, by default one per core; `run` runs them elsewhere, and ends at an interrupt.
        Without replicates there are no intervals; with fewer than `LEAST` they are rough (`few_draws`).
        Errors: Unfinished with the spread of the draws that came before an interrupt.
        """
        factors = STEP_TIMES if point is not None else ()
        jobs = [*(ReplicateJob(0, factor) for factor in factors), *(ReplicateJob(i) for i in range(count))]
        done: dict[int, dict[str, float]] = {}
        with suppress(KeyboardInterrupt):
            for index, figures in enumerate(self._all(jobs, workers)) if run is None else run(self.run, jobs):
                done[index] = figures
                if progress is not None:
                    progress(len(done))
        near = [done[index] for index in range(len(factors)) if index in done]
        draws = [done[index] for index in range(len(factors), len(jobs)) if index in done]
        low, high, middle = {}, {}, {}
        for name, drawn in by_name(draws).items():
            values = np.array(drawn)
            values = values[np.isfinite(values)]
            if len(values) >= min(LEAST, count):
                bounds = np.percentile(values, (LOW, HIGH), method="weibull")
                low[name], high[name] = (float(bound) for bound in bounds)
                middle[name] = float(np.median(values))
        told = near if len(near) == len(factors) else []
        spread = Spread(low, high, *_sensitivity(point or {}, told), middle)
        if len(done) < len(jobs):
            raise Unfinished(spread)
        return spread

    def _all(self, jobs: list[ReplicateJob], workers: int | None) -> Iterable[dict[str, float]]:
        count = min(workers or cores(), len(jobs))
        if count <= 1:
            yield from map(self.run, jobs)
            return
        # Spawned, not forked: the parent may hold threads, whose locks a fork would copy.
        with ProcessPoolExecutor(count, get_context("spawn"), _begin, (self,)) as pool:
            yield from pool.map(_job, jobs, chunksize=max(1, len(jobs) // (4 * count)))


def few_draws(count: int) -> Note | None:
    """A note where `count` replicates are too few for a 90% interval."""
    return Note("few_draws", draws=count, enough=LEAST) if 0 < count < LEAST else None


_study: Study | None = None


def _begin(study: Study) -> None:
    global _study
    _study = study


def _job(job: ReplicateJob) -> dict[str, float]:
    assert _study is not None
    return _study.run(job)


def _sensitivity(
    point: dict[str, float], near: list[dict[str, float]]
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """`Spread.sensitivity` and `Spread.reach`, of the figures at `STEP_TIMES`, without NaN."""
    change = 100 * (np.array([*STEP_TIMES, 1.0]) - 1)
    slopes, reach = {}, {}
    for name, drawn in by_name([*near, point]).items() if near else ():
        values, middle = np.array(drawn), drawn[-1]
        if np.ptp(values) == 0:
            slopes[name], reach[name] = 0.0, (0.0, 0.0)
        elif middle and np.isfinite(values).all():
            percent = 100 * (values / middle - 1)
            centred = change - change.mean()
            slopes[name] = float(centred @ percent / (centred @ centred))
            reach[name] = float(percent.min()), float(percent.max())
    return slopes, reach
