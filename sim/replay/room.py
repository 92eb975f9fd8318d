"""Room that a replay left below its limits: other limits with which it goes the same way.

    room = replay(trace, scenario, kept=Kept(room=True)).room
    room.holds(other)      # whether a replay of another scenario decides and takes the same

A limit that was never met decides nothing. So a replay in which at most 53 requests ran at once is the replay
for every `max_num_seqs` above 53, and one whose steps had at most 5,000 tokens that for every larger token
budget. A pool was large enough where every request got its blocks when it asked for them and no content came
again after its eviction: then no larger pool finds more.

Only limits may differ between the scenarios, and nothing else may follow from them: step costs are the same,
and options that look at the size of the pool, such as watermarks or ceilings of tenants, are not given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.watcher import Watcher
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.machine.graphs import capture_sizes
from pagecast.sim.replay.recorder import REQUEST_COLUMNS, STATES, Recorder
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.scenario import Scenario
from pagecast.sim.scenario.scenario import MEMORY_LIMITS

LIMITS = ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks", *MEMORY_LIMITS)
# Options that may be given: nothing but memory, batch and budget follows from the limits with these.
_PLAIN = frozenset(
    {
        *LIMITS,
        "model",
        "assume_dense",
        "gpu",
        "engine",
        "costs",
        "block_size",
        "max_model_len",
        "kv_cache_dtype",
        "tensor_parallel_size",
        "enable_expert_parallel",
        "moe_data_parallel_size",
        "gpu_link_gb_per_s",
        "host_time_factor",
        "scheduling_policy",
        "async_scheduling",
        "enable_prefix_caching",
        "seed",
    }
)
_ENGINES = ("vllm", "pagecast")  # whose decisions follow from the limits as said above


@dataclass(frozen=True, slots=True)
class Room:
    """Most that a replay used of its limits.

    `running`: requests at once. `tokens`: of a step. `blocks`: used at once. `evicted`: blocks whose content
    was given up. `enough_blocks`: whether a larger pool would have changed nothing.
    """

    scenario: Scenario
    limits: Limits
    running: int
    tokens: int
    blocks: int
    evicted: int
    enough_blocks: bool

    def holds(self, other: Scenario) -> bool:
        """Whether a replay of another scenario goes the same way. False where that is not sure."""
        own = self.scenario
        if other == own:
            return True
        if not is_plain(other) or _without_limits(other) != _without_limits(own):
            return False
        try:
            theirs = other.limits()
        except BadInput:
            return False
        limits = self.limits
        bounds = {name: getattr(limits, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
        if replace(theirs, num_blocks=limits.num_blocks, **bounds) != limits:
            return False
        return (
            _unmet(self.running, limits.max_num_seqs, theirs.max_num_seqs)
            and _unmet(self.tokens, limits.max_num_batched_tokens, theirs.max_num_batched_tokens)
            and (
                theirs.num_blocks == limits.num_blocks
                or (theirs.num_blocks > limits.num_blocks and self.enough_blocks)
            )
            and _same_costs(own, other)
        )

    def evicted_in(self, blocks: int) -> int:
        """Blocks whose content a larger pool gives up: each further block keeps one."""
        return max(self.evicted - (blocks - self.limits.num_blocks), 0)


class LostContent(Watcher):
    """Watcher that knows whether content came `again` after its eviction."""

    def __init__(self) -> None:
        self.again = False
        self._lost: set[bytes] = set()

    def stored(self, key: bytes, begin: int, end: int) -> None:
        """Blocks of a segment were computed."""
        if key in self._lost:
            self.again = True

    def removed(self, key: bytes, begin: int, end: int) -> None:
        """Blocks of a segment were evicted."""
        self._lost.add(key)


def is_plain(scenario: Scenario) -> bool:
    """Whether nothing but batch, budget and pool follows from a scenario's limits."""
    return (
        scenario.profile.name in _ENGINES
        and scenario.layout().plain
        and all(name in _PLAIN for name in scenario.given)
    )


def watch_content(spec: ReplicaSpec, scheduler: Scheduler) -> LostContent | None:
    """A watcher of a scheduler that has not begun; None where no other scenario goes the same way."""
    if not is_plain(spec.scenario) or spec.limits != spec.scenario.limits():
        return None  # the trace asks for more: tenants, or budgets of an encoder
    watcher = LostContent()
    scheduler.memory.watch(watcher)
    return watcher


def room_of(
    spec: ReplicaSpec, scheduler: Scheduler, recorder: Recorder, watcher: LostContent | None
) -> Room | None:
    """The room of a replay that has ended, or was stopped."""
    if watcher is None:
        return None
    size = spec.limits.block_size
    states = recorder.request_rows()[:, REQUEST_COLUMNS.index("state")]
    enough = (
        not watcher.again
        and not scheduler.failed_allocations
        and not scheduler.preemptions
        and bool(np.all(states == STATES.index(State.FINISHED)))
        and all(_has_missed(request, size) for request in scheduler.requests.values())
    )
    return Room(
        spec.scenario,
        spec.limits,
        recorder.most_running,
        recorder.most_tokens,
        recorder.peak_used_blocks,
        scheduler.memory.evicted_blocks,
        enough,
    )


def _has_missed(request: Request, block_size: int) -> bool:
    """Whether a request has computed what its prefix lacked first, so that this was stored."""
    done = request.computed_tokens >= min(request.cached_tokens + block_size, request.prompt_tokens)
    return done or request.state is State.WAITING


def _unmet(most: int, *limits: int) -> bool:
    """Whether limits are equal, or none of them was met."""
    return len(set(limits)) == 1 or most < min(limits)


def _without_limits(scenario: Scenario) -> dict[str, object]:
    return {name: value for name, value in scenario.resolved().items() if name not in LIMITS}


def _same_costs(one: Scenario, other: Scenario) -> bool:
    """Whether steps take the same time, whose graphs may follow from `max_num_seqs`."""
    ours, theirs = one.step_costs(), other.step_costs()
    if isinstance(ours, CalibratedCosts) and isinstance(theirs, CalibratedCosts):
        return ours.calibration is theirs.calibration and ours.pipeline_depth == theirs.pipeline_depth
    return type(ours) is type(theirs) and _targeted(one) == _targeted(other)


def _targeted(scenario: Scenario) -> object:
    target = scenario.target()
    sizes = capture_sizes(target.max_num_seqs, target.model.model_type)
    return replace(target, max_num_seqs=1), tuple(sizes)
