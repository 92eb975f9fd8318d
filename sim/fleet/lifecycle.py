"""Replicas over time: starts, losses, draining, rollouts and autoscaling, as the settings say.

A started replica takes requests once its weights are loaded and the engine is ready. A drained one gets no
more requests, and goes when its last has ended. A lost one goes at once; its requests are sent elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from math import ceil

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.step_costs import Batch
from pagecast.sim.fleet.fleet import Fleet, call_at
from pagecast.sim.fleet.member import Member
from pagecast.sim.fleet.settings import (
    FleetSettings,
    Incident,
    Rollout,
    Scaling,
    Startup,
    changed_scenario,
)
from pagecast.sim.fleet.view import View
from pagecast.sim.machine.loaded_weights import loaded_weight_bytes
from pagecast.sim.machine.models import model as find_model
from pagecast.sim.replay.clients import NS
from pagecast.sim.scenario import Scenario

MakeMember = Callable[[int, str, Scenario], tuple[Member, View]]
_TTFT_CHUNK = 2048  # prompt tokens whose time stands for the pace of prefill


def startup_ns(startup: Startup, scenario: Scenario) -> int:
    """From the start of a replica until it takes requests: weights to each GPU at once, then the engine."""
    weights = loaded_weight_bytes(find_model(scenario.model), scenario.tensor_parallel_size)
    rate = startup.peer_bytes_per_s if startup.source == "peer" else startup.disk_bytes_per_s
    shards = 1 if startup.source == "peer" else scenario.tensor_parallel_size  # one disk feeds all shards
    return round((weights * shards / rate + startup.engine_s) * NS)


class FleetLifecycle:
    """Applies incidents, a rollout and autoscaling to a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        settings: FleetSettings,
        base: Scenario,
        make: MakeMember,
    ) -> None:
        self.fleet = fleet
        self.settings = settings
        self._make = make
        self._names: dict[str, int] = {}
        self._targets: deque[tuple[int, int]] = deque()  # replicas that the autoscaler wanted, by time
        self._predecessors: deque[Member] = deque()  # replicas that a rollout still has to replace
        for name, scenario in settings.scenarios(base):
            group = name.rsplit("-", 1)[0]
            self._names[group] = self._names.get(group, 0) + 1
            member, view = make(len(fleet.members), name, scenario)
            fleet.add(member, view)
        fleet.on_empty = self._stop
        self._base = base

    def start(self) -> None:
        """Sets up what will happen. Errors: BadInput for an incident at a replica that is not there."""
        env = self.fleet.env
        names = {member.name: member for member in self.fleet.members}
        for incident in self.settings.incidents:
            if incident.replica not in names:
                known = ", ".join(list(names)[:8])
                raise BadInput(f"fleet: no replica {incident.replica!r} at the start; there are {known}")
            call_at(env, round(incident.at_s * NS), partial(self._apply, names[incident.replica], incident))
        if self.settings.rollout is not None:
            call_at(
                env, round(self.settings.rollout.at_s * NS), partial(self._roll_out, self.settings.rollout)
            )
        if self.settings.scaling is not None:
            self._next_look(self.settings.scaling)

    # ---- incidents

    def _apply(self, member: Member, incident: Incident) -> None:
        if member.gone_ns is not None:
            return
        if incident.kind == "drain":
            self.drain(member)
        else:
            self.fleet.lose(member)
        if incident.back_after_s is not None:
            due = int(self.fleet.env.now) + round(incident.back_after_s * NS)
            call_at(self.fleet.env, due, partial(self.launch, member))

    def launch(self, like: Member) -> None:
        """Starts a replica like another, unless the work is over; it takes requests when it is ready."""
        if not self.fleet.over:
            self._launch(like.name.rsplit("-", 1)[0], like.scenario, None)

    def _launch(self, group: str, scenario: Scenario, then: Callable[[], None] | None) -> None:
        fleet = self.fleet
        number = len(fleet.members)
        index = self._names.get(group, 0)
        self._names[group] = index + 1
        member, view = self._make(number, f"{group}-{index}", scenario)
        ready_ns = int(fleet.env.now) + startup_ns(self.settings.startup, scenario)
        fleet.add(member, view, ready_ns=ready_ns)
        if then is not None:
            call_at(fleet.env, ready_ns, then)

    def drain(self, member: Member) -> None:
        """A replica gets no more requests, and goes when its last has ended."""
        if member.gone_ns is None and not member.draining:
            self.fleet.drain(member)

    def _stop(self, member: Member) -> None:
        member.stop(int(self.fleet.env.now))

    # ---- rollout

    def _roll_out(self, rollout: Rollout) -> None:
        self._predecessors = deque(member for member in self.fleet.members if member.gone_ns is None)
        for _ in range(rollout.surge):
            self._replace_next(rollout)

    def _replace_next(self, rollout: Rollout) -> None:
        while self._predecessors and not self.fleet.over:
            old = self._predecessors.popleft()
            if old.gone_ns is not None or old.draining:
                continue
            scenario = changed_scenario(old.scenario, rollout.scenario, "fleet: rollout")
            group = f"{old.name.rsplit('-', 1)[0]}-next"
            self._launch(group, scenario, partial(self._drain_predecessor, old, rollout))
            return

    def _drain_predecessor(self, old: Member, rollout: Rollout) -> None:
        self.drain(old)
        self._replace_next(rollout)

    # ---- autoscaling

    def _next_look(self, scaling: Scaling) -> None:
        env = self.fleet.env
        call_at(env, int(env.now) + round(scaling.every_s * NS), partial(self._look, scaling))

    def _look(self, scaling: Scaling) -> None:
        """As Kubernetes' horizontal autoscaler: the ratio of what is measured to the target says how many."""
        fleet = self.fleet
        if fleet.over:
            return
        now = int(fleet.env.now)
        active = [member for member in fleet.members if member.gone_ns is None and not member.draining]
        ready = [member for member in active if member.ready_ns <= now]
        wanted = len(active)
        if ready:
            ratio = sum(metric_value(member, scaling.metric, now) for member in ready) / len(ready)
            ratio /= scaling.target
            if abs(ratio - 1) > scaling.tolerance:
                wanted = ceil(len(ready) * ratio)
        elif fleet.waiting:
            wanted = max(wanted, 1)
        wanted = min(max(wanted, scaling.least), scaling.most)
        self._targets.append((now, wanted))
        while self._targets[0][0] < now - round(scaling.down_after_s * NS):
            self._targets.popleft()
        if wanted > len(active):
            for _ in range(wanted - len(active)):
                self.launch(fleet.members[0])
        else:
            calm = max(count for _, count in self._targets)
            surplus = len(active) - max(calm, wanted)
            idle = sorted(active, key=lambda member: (fleet.views[member.number].requests, -member.number))
            for member in idle[: max(surplus, 0)]:
                self.drain(member)
        self._next_look(scaling)


def metric_value(member: Member, metric: str, now: int) -> float:
    """The metric of a replica that an autoscaler goes by.

    `queue`: waiting requests. `kv`: share of KV blocks in use. `ttft`: a forecast of the next request's TTFT
    in seconds, from the prompt tokens that wait and the pace of prefill.
    """
    gauges = member.gauges(now)
    if metric == "queue":
        return gauges.waiting + len(member.inbox)
    if metric == "kv":
        return gauges.kv_usage
    tokens = sum(request.prompt_tokens for request in member.scheduler.queue)
    costs = member.costs
    chunk = costs.device_ns(Batch(0, 0, 0, ((_TTFT_CHUNK, 0),))) + costs.host_ns(1)
    return (tokens / _TTFT_CHUNK + 1) * chunk / NS
