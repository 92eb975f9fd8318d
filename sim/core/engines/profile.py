"""Profile: an engine's rules, what it refuses, and how a replica of it is put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pagecast.sim.core.drafter import RESERVED, Drafter, DraftingRules
from pagecast.sim.core.engines.deployment import Deployment
from pagecast.sim.core.engines.version_order import known_version, nearest_version
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.events import EventLog
from pagecast.sim.core.group_spec import KvKind
from pagecast.sim.core.intake import Intake
from pagecast.sim.core.lifecycle import Lifecycle
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.eviction import Eviction, LeastRecentlyUsed
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.memory.window_rules import DENSE, WindowRules
from pagecast.sim.core.parts import Parts
from pagecast.sim.core.queue import Order, Queue
from pagecast.sim.core.rules.fair_order import WeightedFair
from pagecast.sim.core.rules.order import ByPriority, FirstComeFirstServed
from pagecast.sim.core.rules.rules import MakeAdmission, MakeVictim, Mix
from pagecast.sim.core.running import Running
from pagecast.sim.core.step import Step
from pagecast.sim.core.stretch.hybrid import HybridStride
from pagecast.sim.core.stretch.stride import Stride
from pagecast.sim.core.tiers.offloading import Offloading


def queue_order(limits: Limits) -> Order:
    """The order of the policy fcfs or priority, or by the weights of tenants. Errors: BadInput for lpm."""
    if limits.policy == "lpm":
        raise BadInput("the policy lpm is SGLang's; choose fcfs or priority, or the profile sglang")
    if limits.tenants is not None and limits.tenants.fair:
        return WeightedFair(limits.tenants)
    return ByPriority() if limits.policy == "priority" else FirstComeFirstServed()


def least_recently_used(limits: Limits) -> Eviction:
    """LRU; blocks without content go first where content can be found at all."""
    return LeastRecentlyUsed(blanks_first=limits.caching or limits.host is not None)


@dataclass(frozen=True)
class Profile:
    """One engine's rules. Each field that is a function makes a rule for a replica with given limits.

    A subclass makes the `mix`, says in `check` what else the engine refuses, and in `defaults` what it takes
    where an option is not given. `title` is the engine's name as it is written, and `version` the version
    whose source the rules follow, one of `versions` (empty: that one alone); `option_names` are the engine's
    own names of options, with the fields of a scenario that they stand for.

    `priced_as`: the engine whose step costs apply, where that is another one.

    `hybrid`: the engine serves models whose layers keep different tokens (`Limits.groups`). `intake` may
    reject a request when it is submitted. `offloads`: the engine has a host tier.
    `holds_longest`: it starts only where its KV cache holds a sequence of the longest length.
    `static_fraction`: its fraction of memory is for weights and KV alone. `packs_latents`: it gives the KV of
    sparse latent attention a packed dtype by itself.

    `publish_at_commit`: full blocks can be found from the commit of the step that computes them, not already
    from its plan; nothing can speculate then. `publish_output_at_end`: those of generated tokens from the end
    of the request, or its preemption. `keeps_planned`: what a plan in flight computes of a cancelled request
    stays findable, as it is computed all the same; else it is withdrawn. Three fields describe the engine to
    others: `whole_prompt` tells the invariant checks that the mix takes the blocks of a whole prompt at
    admission, `pipelined` that the engine plans ahead unless told otherwise (`Limits.pipeline_depth` decides)
    and `numbered` that its blocks have numbers, and can be drawn. `clips_max_tokens`: a `max_tokens` beyond
    the model's length is lowered; else the request is refused. `drafting`: what is done otherwise where
    requests speculate.
    """

    name: str
    summary: str
    version: str
    title: str = ""
    priced_as: str = ""
    versions: tuple[str, ...] = ()
    option_names: Mapping[str, str] = field(default_factory=dict, hash=False)
    order: Callable[[Limits], Order] = queue_order
    eviction: Callable[[Limits], Eviction] = least_recently_used
    intake: Callable[[Limits], Intake | None] | None = None
    publish_at_commit: bool = False
    publish_output_at_end: bool = False
    keeps_planned: bool = False
    whole_prompt: bool = False
    pipelined: bool = False
    offloads: bool = False
    hybrid: bool = False
    holds_longest: bool = False
    static_fraction: bool = False
    packs_latents: bool = False
    numbered: bool = True
    clips_max_tokens: bool = False
    drafting: DraftingRules = RESERVED

    def mix(self, limits: Limits) -> Mix:
        """The rule that fills a step."""
        raise NotImplementedError

    def hybrid_mix(self, limits: Limits, memory: KvMemory) -> Mix:
        """As `mix`, for layers that keep different tokens, where the engine serves them (`hybrid`)."""
        raise NotImplementedError

    def defaults(self, deployment: Deployment) -> dict[str, Any]:
        """The values of open options that the engine takes where they are not given, by flat name."""
        raise NotImplementedError

    def held_batches(self, pipeline_depth: int) -> int:
        """Steps whose tokens layers hold in addition to their window, with so many steps planned ahead."""
        return 1

    @property
    def finds_states(self) -> bool:
        """Whether prefix caching of recurrent states is simulated."""
        return False

    def cached_states(self, *, exported: bool, whole: bool) -> tuple[int, int]:
        """States that a sequence holds in a layer beside its own where prefixes are cached, and their tokens.

        `exported`: kernels hand out states within a prompt; `whole`: at any token. The tokens are those of
        which a block has a multiple.
        """
        return 0, 1

    @property
    def known(self) -> tuple[str, ...]:
        """The versions whose rules are known, oldest first."""
        return self.versions or (self.version,)

    @property
    def text(self) -> str:
        """Engine and version, as users choose them: `vllm@0.33`."""
        return f"{self.name}@{self.version}"

    @property
    def label(self) -> str:
        """Engine and version, as a sentence has them."""
        return f"{self.title} {self.version}"

    def at(self, version: str) -> Self:
        """The engine's rules in a version. Errors: BadInput for one that is not known."""
        known = known_version(version, self.known)
        if known is None:
            near = nearest_version(version, self.known)
            raise BadInput(
                f"{self.title} {version} is not known; known are {', '.join(self.known)}; "
                f"nearest: {self.name}@{near}"
            )
        return self._at(known)

    def _at(self, version: str) -> Self:
        return self

    def with_rules(self, admission: MakeAdmission, victim: MakeVictim) -> Self:
        """The profile with another admission and preemption. Errors: BadInput where it has only its own."""
        raise BadInput(
            f"the profile {self.name} has its own admission and preemption; leave admission, "
            "watermarks and victim out, or choose vllm"
        )

    def check(self, limits: Limits, drafter: Drafter | None = None) -> None:
        """Errors: BadInput where the engine has no replica with these limits and this drafter."""
        limits.check()
        if limits.host is not None and not self.offloads:
            raise BadInput(f"the profile {self.name} has no KV offloading; choose vllm")
        if limits.groups and not self.hybrid:
            raise BadInput("this profile serves no models whose layers keep different tokens; use vllm")
        if drafter is not None:
            self._check_drafter(limits, drafter)

    def _check_drafter(self, limits: Limits, drafter: Drafter) -> None:
        if self.publish_at_commit:
            raise BadInput(f"the profile {self.name} has no speculative decoding; choose vllm")
        chunked = any(group.kind is KvKind.CHUNK for group in limits.groups)
        if chunked and drafter.recomputes_block:
            raise BadInput("EAGLE and MTP do not work with chunked local attention (as in vLLM)")
        if self.drafting.slots_per_request:
            needed = drafter.lookahead if self.drafting.room_for_lookahead else drafter.reserved
            if limits.max_num_batched_tokens <= needed:
                raise BadInput(
                    f"max_num_batched_tokens ({limits.max_num_batched_tokens}) leaves no token beside the "
                    f"{needed} that the drafter needs; raise it"
                )
            return
        reserved = drafter.reserved * limits.max_num_seqs
        if limits.max_num_batched_tokens <= reserved:
            raise BadInput(
                f"max_num_batched_tokens ({limits.max_num_batched_tokens}) leaves no token beside the "
                f"{reserved} that the drafter needs for max_num_seqs ({limits.max_num_seqs}); raise one or "
                "lower the other"
            )

    # ---- putting a replica together

    def parts(
        self, limits: Limits, log: EventLog, drafter: Drafter | None = None, *, numbered: bool = True
    ) -> Parts:
        """The parts of one replica's scheduler. Errors: BadInput as for `check`."""
        self.check(limits, drafter)
        running = self.running(limits)
        rules = self.window_rules()
        eviction = self.eviction(limits)
        memory = KvMemory(limits, log, running.findable, eviction, rules, numbered=numbered)
        memory.commits_late = self.publish_at_commit and not self.publish_output_at_end
        lifecycle = self._lifecycle(limits, memory, running, log, drafter)
        step = Step(lifecycle, self.drafting)
        if memory.plain:
            return Parts(lifecycle, step, self.mix(limits), Stride(lifecycle, memory, step))
        return Parts(lifecycle, step, self.hybrid_mix(limits, memory), HybridStride(lifecycle, memory, step))

    def running(self, limits: Limits) -> Running:
        """The running requests: none yet."""
        return Running(
            limits.block_size,
            pipeline_depth=limits.pipeline_depth,
            at_commit=self.publish_at_commit,
            output_at_end=self.publish_output_at_end,
            keeps_planned=self.keeps_planned,
        )

    def offloading(
        self, limits: Limits, memory: KvMemory, running: Running, log: EventLog
    ) -> Offloading | None:
        """The host tier; None where there is none."""
        return None

    def holding_order(self, limits: Limits, order: Order) -> Order | None:
        """The order of waiting requests that hold blocks, where they come before those of `order`."""
        return None

    def window_rules(self) -> WindowRules:
        """The engine's rules for layers that keep different tokens."""
        return DENSE

    def _lifecycle(
        self,
        limits: Limits,
        memory: KvMemory,
        running: Running,
        log: EventLog,
        drafter: Drafter | None,
    ) -> Lifecycle:
        recomputes = drafter is not None and drafter.recomputes_block
        memory.key_lookahead = self.key_lookahead(limits, recomputes_block=recomputes)
        if recomputes and not memory.key_lookahead:
            memory.leave_out_last_blocks()
        order = self.order(limits)
        lifecycle = Lifecycle(
            limits,
            memory,
            Queue(order, memory, self.holding_order(limits, order)),
            running,
            log,
            drafter,
            self.offloading(limits, memory, running, log),
            drafting=self.drafting,
        )
        lifecycle.intake = None if self.intake is None else self.intake(limits)
        lifecycle.clips_max_tokens = self.clips_max_tokens
        return lifecycle

    def key_lookahead(self, limits: Limits, *, recomputes_block: bool) -> int:
        """How many tokens after a block its key covers; `recomputes_block`: as the drafter's.

        With a host tier keys cover blocks alone.
        """
        covers = recomputes_block and self.drafting.lookahead_keys
        return int(covers and limits.caching and limits.host is None)
