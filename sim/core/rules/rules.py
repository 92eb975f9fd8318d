"""Rules and profiles: what an engine decides, as small objects.

A step is filled by four rules. `Order` says who is first in the queue, `Admission` whether the first may
come in, `Victim` who must go when blocks run out, and `Mix` who shares a step. A mix is made with an
admission and a victim rule, and calls them. Rules get `(step, memory, queue)` and nothing else, so an
engine's behaviour is a file in this folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.events import EventLog
from pagecast.sim.core.intake import Intake
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.eviction import Eviction
from pagecast.sim.core.memory.kv_memory import Hit, KvMemory, MakeGroups, one_full_group
from pagecast.sim.core.memory.ranked_extent_pool import ReuseRanks
from pagecast.sim.core.queue import Order, Queue
from pagecast.sim.core.request import Request
from pagecast.sim.core.step import Step


class Admission(Protocol):
    """Whether a waiting request may run.

    A refusal must stand while the running requests only decode: the rule may not be asked again before a
    request comes or goes (`Queue.blocked`). So it must not depend on `step.now`.
    """

    def admits(self, step: Step, memory: KvMemory, queue: Queue, request: Request, hit: Hit) -> bool:
        """Whether `request`, for which `hit` was found, may be admitted in this step."""
        ...


class Victim(Protocol):
    """Who loses its blocks when a running request finds none free.

    It is asked again until there are enough, and may choose the very request that needs them. It has to
    spare somebody: where requests preempt one another in turn, nobody is ever done.
    """

    def choose(self, step: Step, memory: KvMemory, queue: Queue) -> Request:
        """One of `step.running.requests`, of which there is at least one."""
        ...


class Mix(Protocol):
    """Who computes in a step."""

    def fill(self, step: Step, memory: KvMemory, queue: Queue) -> None:
        """Lets requests compute, admits and preempts, by calling the step's methods."""


MakeMemory = Callable[[Limits, EventLog], KvMemory]
"""Makes the memory of a replica, for engines that keep KV in another way than groups of blocks."""


def no_hybrid_mix(limits: Limits) -> Mix:
    """An engine that serves models of one kind of layers only. Errors: BadInput."""
    raise BadInput("this profile serves no models whose layers keep different tokens; use vllm")


def no_ranks(limits: Limits) -> None:
    """Blocks of layers that keep different tokens are evicted in vLLM's order."""
    return


@dataclass(frozen=True)
class Profile:
    """One engine's rules. Each function makes a rule for a replica with given limits.

    For models whose layers keep different tokens (`Limits.groups`) only `order`, `hybrid_mix` and
    `hybrid_ranks` are used: a `HybridMemory` makes its groups from `Limits.groups`, and evicts in vLLM's
    order or by ranks. `mix`, `eviction` and `groups` are for all other models.

    `intake` may reject a request when it is submitted.
    `memory` replaces the groups of blocks, `eviction` and `groups`: with a `RadixMemory` requests follow
    `RadixLifecycle`.

    `publish_at_commit`: full blocks can be found from the commit of the step that computes them, not
    already from its plan. `publish_whole_prompts`: those of a prompt from the commit of its last chunk.
    Two fields describe the engine to others: `whole_prompt` tells the invariant checks that the mix takes the
    blocks of a whole prompt at admission, and `pipelined` tells `Scenario` that the engine plans ahead unless
    told otherwise (`Limits.pipeline_depth` decides). `offloads`: its mixes serve a host tier.
    """

    name: str
    summary: str
    order: Callable[[Limits], Order]
    mix: Callable[[Limits], Mix]
    eviction: Callable[[Limits], Eviction]
    hybrid_mix: Callable[[Limits], Mix] = no_hybrid_mix
    hybrid_ranks: Callable[[Limits], ReuseRanks | None] = no_ranks
    intake: Callable[[Limits], Intake] | None = None
    groups: MakeGroups = one_full_group
    memory: MakeMemory | None = None
    publish_at_commit: bool = False
    publish_whole_prompts: bool = False
    whole_prompt: bool = False
    pipelined: bool = False
    offloads: bool = False
