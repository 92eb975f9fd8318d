"""One trial of a study: a replay of the trace by one scenario of the space, and its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagecast.planner_app.planner.fleet.knobs import KNOBS, fleet_at
from pagecast.planner_app.planner.load_fields import load_fields
from pagecast.planner_app.planner.served import RequestCounts
from pagecast.planner_app.planner.slo import Slo, TermVerdict
from pagecast.planner_app.planner.sweep.loads import Loads
from pagecast.planner_app.planner.sweep.space import Point
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.replay import Kept, Result, replay
from pagecast.sim.replay.metrics import STATISTICS
from pagecast.sim.replay.room import Room
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

Figure = float | int | None
GPUS_HELD = "GPUs held on average: "  # a fleet's figures by GPU type
LATENCIES = ("ttft", "tpot", "e2e", "queue")  # those with figures; an SLO may bound more (`slo.py`)
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
_UNSERVED = ("rejected_at_any_load", "unserved")  # of `RequestCounts`
FIGURES = (*(f"{name}_{statistic}_s" for name in LATENCIES for statistic in STATISTICS), *_OTHERS, *_UNSERVED)
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
        *_UNSERVED,
    }
)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of a trial: `figures` by name (`FIGURES`), or the `reason` why the scenario can't run.

    `costs` is the name of the step costs that it was served with, `rejections` the number of rejected
    requests by reason. `room`: what a replay left of its limits, where trials share replays.
    """

    figures: Mapping[str, Figure]
    terms: tuple[TermVerdict, ...] = ()
    reason: str = ""
    costs: str = ""
    rejections: Mapping[str, int] = field(default_factory=dict)
    room: Room | None = field(default=None, compare=False)

    @property
    def meets(self) -> bool:
        """Whether it rejects no request and keeps the SLO, by which clients that gave up are judged."""
        all_served = not self.reason and not self.figures.get("rejected")
        return all_served and all(term.holds for term in self.terms)

    @property
    def margin(self) -> float | None:
        """How far the SLO's tightest term is from its bound, as a part of it; below 0: beyond."""
        return min((_margin(term) for term in self.terms), default=None)


@dataclass(frozen=True)
class Trials:
    """Data that all trials of a study share. An executor calls `run` with one point at a time.

    `shares`: whether a trial may answer others, and says which (`TrialResult.room`).
    """

    trace: Trace
    scenario: Scenario
    level: Slo
    fleet: FleetSettings | None = None
    loads: Loads | None = None
    shares: bool = False

    def run(self, point: Point) -> TrialResult:
        """Serves the trace at `point`. A scenario that can't run (no room for a block) says why."""
        try:
            result = self._replay(point)
        except BadInput as error:
            return TrialResult({}, reason=str(error))
        return TrialResult(
            figures_of(result),
            self.level.verdict(result).terms,
            costs=str(result.summary["costs"]),
            rejections=result.summary["rejected_reasons"],
            room=result.room,
        )

    def _replay(self, point: Point) -> Result:
        scenario = at(self.scenario, point)
        trace = self.trace if self.loads is None else self.loads.at(point)
        if self.fleet is None:
            check_memory(scenario)
            return replay(trace, scenario, kept=Kept(steps=False, room=self.shares))
        fleet = fleet_at(self.fleet, point)
        for number in range(len(fleet.groups)):
            check_memory(fleet.group_scenario(number, scenario))
        return replay_fleet(trace, scenario, fleet, kept=Kept(steps=False))


def _margin(term: TermVerdict) -> float:
    if term.value is None or not term.bound:
        return 0.0 if term.holds else -1.0
    away = abs(term.value / term.bound - 1)
    return away if term.holds else -away


def at(scenario: Scenario, point: Mapping[str, Any]) -> Scenario:
    """The scenario at a point of the space. Errors: BadInput where its fields contradict each other."""
    fields = {name: value for name, value in point.items() if name not in (*KNOBS, *load_fields())}
    return Scenario.make({**scenario.flat(), **fields}, "sweep")


def check_memory(scenario: Scenario) -> None:
    """Errors: BadInput where the engine would run out of memory at its start."""
    budget = scenario.budget()
    if budget is not None and budget.out_of_memory is not None:
        raise BadInput(sentence(budget.out_of_memory))


def figures_of(result: Result) -> dict[str, Figure]:
    """A replay's figures under flat names with their unit: `ttft_p99_s`, `output_tokens_per_s`.

    A fleet's have `gpus` too, those that it held at most at once, `gpu_hours`, and of each GPU type how many
    it held on average.
    """
    summary = result.summary
    figures: dict[str, Figure] = {
        f"{name}_{statistic}_s": summary[f"{name}_s"][statistic]
        for name in LATENCIES
        for statistic in STATISTICS
    }
    figures |= {name: summary[name] for name in _OTHERS}
    counts = RequestCounts.of(result.requests)
    figures |= {name: getattr(counts, name) for name in _UNSERVED}
    fleet = summary.get("fleet")
    if fleet is not None:
        figures |= {"gpus": fleet["peak_gpus"], "gpu_hours": fleet["gpu_hours"]}
        figures |= {f"{GPUS_HELD}{gpu}": count for gpu, count in fleet["mean_gpus"].items()}
    return figures


def deployment(scenario: Scenario, point: Mapping[str, Any]) -> tuple[str, int]:
    """GPU type and number of GPUs at a point."""
    gpu = find_gpu(str(point.get("gpu", scenario.gpu))).name
    return gpu, int(point.get("tensor_parallel_size", scenario.tensor_parallel_size))
