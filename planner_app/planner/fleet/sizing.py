"""The fewest replicas of a fleet that keep an SLO, router by router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagecast.planner_app.planner.served import RequestCounts
from pagecast.planner_app.planner.slo import Slo, Verdict
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.routers.registry import with_router
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import FleetResult, replay_fleet
from pagecast.sim.replay.result import Kept
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace


@dataclass(frozen=True)
class FleetSize:
    """Replicas that one router needs. `replicas` None: `most` are too few, and the other fields are of these.

    `below` is the verdict of one replica less (None: there is none).
    """

    router: str
    replicas: int | None
    most: int
    result: FleetResult
    verdict: Verdict
    below: Verdict | None
    replays: int

    @property
    def counts(self) -> RequestCounts:
        """How the requests ended."""
        return RequestCounts.of(self.result.requests)

    def to_dict(self) -> dict[str, Any]:
        """The answer for JSON."""
        s = self.result.summary
        return {
            "router": self.router,
            "replicas": self.replicas,
            "gpus": s["fleet"]["gpus"] if self.replicas is not None else None,
            "gpu_hours": s["fleet"]["gpu_hours"],
            "cost": s["fleet"]["cost"],
            "holds": self.verdict.holds,
            "terms": {term.text: term.value for term in self.verdict.terms},
            "breaks_below": [term.text for term in self.below.broken] if self.below else [],
            "token_hit_rate": s["token_hit_rate"],
            "counts": self.counts.to_dict(),
            "replays": self.replays,
        }


def fewest(
    trace: Trace,
    scenario: Scenario,
    settings: FleetSettings,
    slo: Slo,
    *,
    most: int = 64,
    progress: Callable[[int], None] | None = None,
) -> FleetSize:
    """The fewest equal replicas behind the router of `settings` that keep the level.

    Doubles until the level holds, then bisects: one replica less does not keep it. Larger fleets are taken to
    keep it too. Errors: BadInput where the fleet has several groups.
    """
    if len(settings.groups) > 1:
        raise BadInput(
            "plan: give a fleet of one group; it says how many replicas that group needs. For several groups "
            "or roles, sweep tries numbers of replicas: --set prefill_replicas=1,2 --set replicas=2,4"
        )
    results: dict[int, tuple[FleetResult, Verdict]] = {}

    def holds(count: int) -> bool:
        if count not in results:
            result = replay_fleet(trace, scenario, sized(settings, count), kept=Kept(steps=False))
            results[count] = (result, slo.verdict(result))
            if progress is not None:
                progress(len(results))
        return results[count][1].holds

    low, high = 0, 1
    while not holds(high):
        low = high
        if high >= most:
            result, verdict = results[high]
            return FleetSize(settings.router.policy, None, most, result, verdict, None, len(results))
        high = min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    result, verdict = results[high]
    below = results[low][1] if low else None
    return FleetSize(settings.router.policy, high, most, result, verdict, below, len(results))


@dataclass(frozen=True)
class Sizing:
    """Data that the searches of several routers share. An executor calls `run` with one fleet at a time."""

    trace: Trace
    scenario: Scenario
    slo: Slo
    most: int

    def run(self, settings: FleetSettings) -> FleetSize:
        """As `fewest`."""
        return fewest(self.trace, self.scenario, settings, self.slo, most=self.most)


def against(settings: FleetSettings, routers: Sequence[str]) -> list[FleetSettings]:
    """The same fleet behind other routers as well (see `with_router`)."""
    others = [with_router(settings.router, name) for name in routers]
    return [settings, *(settings.model_copy(update={"router": router}) for router in others)]


def sized(settings: FleetSettings, replicas: int) -> FleetSettings:
    """The fleet with so many replicas."""
    group = settings.groups[0].model_copy(update={"replicas": replicas})
    return settings.model_copy(update={"groups": (group,)})
