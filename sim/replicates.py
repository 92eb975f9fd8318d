"""The same replay many times over, with costs drawn from what a calibration does not know, in parallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import numpy as np
from pagecast.sim.calibration.draw import Drawn, scaled
from pagecast.sim.calibration.file import Calibration
from pagecast.sim.outcome import simulated
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

LOW, HIGH = 5.0, 95.0  # percentiles: a 90% interval
STEP_TIME = 0.01  # by which steps are made longer and shorter to measure a forecast's sensitivity

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Spread:
    """What replicates say of each figure: a 90% interval, and percent of change per percent of step time."""

    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)
    sensitivity: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One replay: draw number `index` of the costs, or with all steps `factor` times as long."""

    index: int
    factor: float | None = None


@dataclass(frozen=True)
class Study:
    """A trace, a scenario and the calibration that its costs come from."""

    trace: Trace
    scenario: Scenario
    calibration: Calibration
    seed: int = 0

    def run(self, job: Job) -> dict[str, float]:
        """The figures of one replay."""
        depth = int(self.scenario.pipelined)
        if job.factor is not None:
            costs = scaled(self.calibration, job.factor, pipeline_depth=depth)
        else:
            costs = Drawn(self.calibration, job.index, seed=self.seed, pipeline_depth=depth)
        result = replay(self.trace, self.scenario, costs=costs, keep_steps=False)
        return simulated(result).figures()

    def spread(self, count: int, *, workers: int | None = None, progress: Progress | None = None) -> Spread:
        """Runs `count` replicates, and two more for the sensitivity."""
        jobs = [Job(0, 1 - STEP_TIME), Job(0, 1 + STEP_TIME), *(Job(i) for i in range(count))]
        found = list(_watched(self._all(jobs, workers), progress))
        below, above, draws = found[0], found[1], found[2:]
        low, high = {}, {}
        for name in below if draws else ():
            values = np.array([draw[name] for draw in draws])
            values = values[np.isfinite(values)]
            if len(values):
                low[name], high[name] = (float(v) for v in np.percentile(values, (LOW, HIGH)))
        return Spread(low, high, {name: _slope(below[name], above[name]) for name in below})

    def _all(self, jobs: list[Job], workers: int | None) -> Iterable[dict[str, float]]:
        count = min(workers or os.cpu_count() or 1, len(jobs))
        if count <= 1:
            yield from map(self.run, jobs)
            return
        # Spawned, not forked: the parent may hold threads, whose locks a fork would copy.
        with ProcessPoolExecutor(count, get_context("spawn"), _begin, (self,)) as pool:
            yield from pool.map(_job, jobs, chunksize=max(1, len(jobs) // (4 * count)))


_study: Study | None = None


def _begin(study: Study) -> None:
    global _study
    _study = study


def _job(job: Job) -> dict[str, float]:
    assert _study is not None
    return _study.run(job)


def _watched(found: Iterable[dict[str, float]], progress: Progress | None) -> Iterable[dict[str, float]]:
    for done, figures in enumerate(found, 1):
        if progress is not None:
            progress(done)
        yield figures


def _slope(below: float, above: float) -> float:
    """Percent of change per percent of step time."""
    middle = (below + above) / 2
    return (above - below) / middle / (2 * STEP_TIME) if middle else 0.0
