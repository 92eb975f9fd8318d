"""Replicas over time: starts, losses, draining, rollouts and autoscaling, as the settings say.

A started replica takes requests once its weights are loaded and the engine is ready. A drained one gets no
more requests, and goes when its last has ended. A lost one goes at once; its requests are sent elsewhere.
Once a rollout has begun, every replica that starts is of the new revision, whatever it starts for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from math import ceil

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
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
from pagecast.sim.replica.arrivals import NS
from pagecast.sim.scenario import Scenario

MakeMember = Callable[[int, str, Scenario], tuple[Member, View]]
_NEXT = "-next"  # what the names of a group's replicas have more after a rollout
_TTFT_CHUNK = 2048  # prompt tokens whose time stands for the pace of prefill


def startup_ns(startup: Startup, scenario: Scenario) -> int:
    """From the start of a replica until it takes requests: weights to each GPU at once, then the engine."""
    weights = loaded_weight_bytes(scenario.facts(), scenario.tensor_parallel_size)
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
        self._scenarios: dict[str, Scenario] = {}  # of a replica that is started now, by group
        self._suffix = ""  # of a group's name in the names of replicas that are started now
        self._groups: dict[int, str] = {}  # by replica number
        self._names: dict[str, int] = {}
        self._scaled = settings.group_name(0)  # the group that is autoscaled
        self._targets: deque[tuple[int, int]] = deque()  # replicas that the autoscaler wanted, by time
        self._predecessors: deque[Member] = deque()  # replicas that a rollout still has to replace
        self._successors: dict[int, Member] = {}  # those that start, by the number of whom they replace
        for number in range(len(settings.groups)):
            self._scenarios[settings.group_name(number)] = settings.group_scenario(number, base)
        for name, _ in settings.scenarios(base):
            fleet.add(*self._make_member(name.rsplit("-", 1)[0]))
        fleet.on_empty = self._stop

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
            # At the start as many are wanted as there are, but never more than `most`.
            self._targets.append((0, min(self.settings.groups[0].replicas, self.settings.scaling.most)))
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
            call_at(self.fleet.env, due, partial(self._launch_like, member))

    def _launch_like(self, member: Member) -> None:
        """Starts a replica of another one's group, unless the work is over."""
        if not self.fleet.over:
            self._launch(self._groups[member.number])

    def _launch(self, group: str) -> Member:
        """Starts a replica of a group; it takes requests when it is ready."""
        member, view = self._make_member(group)
        ready_ns = int(self.fleet.env.now) + startup_ns(self.settings.startup, member.scenario)
        self.fleet.add(member, view, ready_ns=ready_ns)
        return member

    def _make_member(self, group: str) -> tuple[Member, View]:
        number = len(self.fleet.members)
        self._groups[number] = group
        label = group + self._suffix
        index = self._names.get(label, 0)
        self._names[label] = index + 1
        return self._make(number, f"{label}-{index}", self._scenarios[group])

    def drain(self, member: Member) -> None:
        """A replica gets no more requests, and goes when its last has ended."""
        if _is_active(member):
            self.fleet.drain(member)

    def _stop(self, member: Member) -> None:
        member.stop(int(self.fleet.env.now))

    # ---- rollout

    def _roll_out(self, rollout: Rollout) -> None:
        """Every replica there is will be replaced; those that start from now on are of the new revision."""
        self._suffix = _NEXT
        for group, scenario in self._scenarios.items():
            self._scenarios[group] = changed_scenario(scenario, rollout.scenario, "fleet: rollout")
        self._predecessors = deque(member for member in self.fleet.members if member.gone_ns is None)
        for _ in range(rollout.surge):
            self._replace_next()

    def _replace_next(self) -> None:
        while self._predecessors and not self.fleet.over:
            old = self._predecessors.popleft()
            if not _is_active(old):
                continue
            new = self._successors[old.number] = self._launch(self._groups[old.number])
            call_at(self.fleet.env, new.ready_ns, partial(self._end_swap, old))
            return

    def _end_swap(self, old: Member) -> None:
        """The successor is ready, so the replica that it replaces is drained."""
        del self._successors[old.number]
        self.drain(old)
        self._replace_next()

    # ---- autoscaling

    def _next_look(self, scaling: Scaling) -> None:
        env = self.fleet.env
        call_at(env, int(env.now) + round(scaling.every_s * NS), partial(self._look, scaling))

    def _look(self, scaling: Scaling) -> None:
        """As Kubernetes' horizontal autoscaler: up at once, down when fewer were enough for a while."""
        if self.fleet.over:
            return
        active = self._counted()
        wanted = self._wanted(active, scaling)
        self._scale(active, min(max(len(active), wanted), self._most_lately(wanted, scaling)))
        self._next_look(scaling)

    def _counted(self) -> list[Member]:
        """The group's replicas that take requests or will, but for successors that start beside them."""
        members = self.fleet.members
        surge = {new.number for old, new in self._successors.items() if _is_active(members[old])}
        own = [member for member in members if self._groups[member.number] == self._scaled]
        return [member for member in own if _is_active(member) and member.number not in surge]

    def _wanted(self, active: list[Member], scaling: Scaling) -> int:
        """How many replicas would bring the metric to its target, within the bounds of the settings."""
        now = int(self.fleet.env.now)
        wanted = len(active)
        if ready := [member for member in active if member.ready_ns <= now]:
            mean = sum(metric_value(member, scaling.metric, now) for member in ready) / len(ready)
            ratio = mean / scaling.target
            if abs(ratio - 1) > scaling.tolerance:
                wanted = ceil(len(ready) * ratio)
        elif self.fleet.waiting:
            wanted = max(wanted, 1)
        return min(max(wanted, scaling.least), scaling.most)

    def _most_lately(self, wanted: int, scaling: Scaling) -> int:
        """The most that any look of the last `down_after_s` wanted, with the one that wants `wanted` now.

        Until that much time has passed, at least the replicas of the start.
        """
        now = int(self.fleet.env.now)
        self._targets.append((now, wanted))
        while self._targets[0][0] < now - round(scaling.down_after_s * NS):
            self._targets.popleft()
        return max(count for _, count in self._targets)

    def _scale(self, active: list[Member], count: int) -> None:
        """Starts replicas, or drains the least busy ones, so that there are `count` instead of `active`."""
        for _ in range(count - len(active)):
            self._launch(self._scaled)
        # A replica that is being replaced is drained by its rollout; to drain it now would leave a gap.
        free = [member for member in active if member.number not in self._successors]
        views = self.fleet.views
        idle = sorted(free, key=lambda member: (views[member.number].requests, -member.number))
        for member in idle[: max(len(active) - count, 0)]:
            self.drain(member)


def _is_active(member: Member) -> bool:
    return member.gone_ns is None and not member.draining


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
