"""One trial of a study: the trace served by one scenario of the space, and what came of it in figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagecast.planner_app.planner.slo import Slo, TermVerdict
from pagecast.planner_app.planner.sweep.space import Point
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.replay import Result, replay
from pagecast.sim.replay.metrics import STATISTICS
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

Figure = float | int | None
LATENCIES = ("ttft", "tpot", "e2e", "queue")  # those with figures; a service level may bound more (`slo.py`)
_OTHERS = (
    "output_tokens_per_s",
    "output_tokens",
    "makespan_s",
    "token_hit_rate",
    "reused_prefix_tokens",
    "num_gpu_blocks",
    "peak_kv_usage",
    "evicted_blocks",
    "preemptions",
    "completed",
    "rejected",
)
FIGURES = (*(f"{name}_{statistic}_s" for name in LATENCIES for statistic in STATISTICS), *_OTHERS)
COUNTS = frozenset(
    {
        "number",
        "gpus",
        "output_tokens",
        "reused_prefix_tokens",
        "num_gpu_blocks",
        "evicted_blocks",
        "preemptions",
        "completed",
        "rejected",
    }
)
# Of these more is better; of all others less.
MORE_IS_BETTER = frozenset(
    {
        "output_tokens_per_s",
        "token_hit_rate",
        "reused_prefix_tokens",
        "completed",
        "admissible_concurrency",
        "static_concurrency",
    }
)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a trial left: `figures` by name (FIGURES), or the `reason` why the scenario can't run.

    `costs` is the name of the step costs that it was served with.
    """

    figures: Mapping[str, Figure]
    terms: tuple[TermVerdict, ...] = ()
    reason: str = ""
    costs: str = ""

    @property
    def meets(self) -> bool:
        """Whether it serves every request and keeps the service level."""
        served = not self.reason and not self.figures.get("rejected")
        return served and all(term.holds for term in self.terms)

    @property
    def margin(self) -> float | None:
        """How far the service level's tightest term is from its bound, as a part of it; below 0: beyond."""
        return min((_margin(term) for term in self.terms), default=None)


@dataclass(frozen=True)
class Trials:
    """What all trials of a study share. `run` is what workers are given points for."""

    trace: Trace
    scenario: Scenario
    level: Slo

    def run(self, point: Point) -> TrialResult:
        """Serves the trace at `point`. A scenario that can't run (no room for a block) says why."""
        try:
            scenario = at(self.scenario, point)
            result = replay(self.trace, scenario, keep_steps=False)
        except BadInput as error:
            return TrialResult({}, reason=str(error))
        return TrialResult(
            figures_of(result), self.level.verdict(result).terms, costs=str(result.summary["costs"])
        )


def _margin(term: TermVerdict) -> float:
    if term.value is None or not term.bound:
        return 0.0 if term.holds else -1.0
    away = abs(term.value / term.bound - 1)
    return away if term.holds else -away


def at(scenario: Scenario, point: Mapping[str, Any]) -> Scenario:
    """The scenario at a point of the space. Errors: BadInput where its fields contradict each other."""
    return Scenario.make({**scenario.model_dump(), **point}, "sweep")


def figures_of(result: Result) -> dict[str, Figure]:
    """A replay's figures under flat names with their unit: `ttft_p99_s`, `output_tokens_per_s`."""
    summary = result.summary
    figures: dict[str, Figure] = {
        f"{name}_{statistic}_s": summary[f"{name}_s"][statistic]
        for name in LATENCIES
        for statistic in STATISTICS
    }
    return figures | {name: summary[name] for name in _OTHERS}


def deployment(scenario: Scenario, point: Mapping[str, Any]) -> tuple[str, int]:
    """GPU type and number of GPUs at a point."""
    gpu = find_gpu(str(point.get("gpu", scenario.gpu))).name
    return gpu, int(point.get("tensor_parallel_size", scenario.tensor_parallel_size))
