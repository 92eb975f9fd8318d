"""Limits of one replica: blocks, block size, batch size, token budget, pipeline depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import GroupSpec, check_groups
from pagecast.sim.core.tenants import Tenants
from pagecast.sim.core.tier_spec import HostTierSpec

MOST_BLOCKS = 20_000_000
POLICIES = ("fcfs", "priority", "lpm")


class EngineSettings(Protocol):
    """Settings that only one engine has: its folder says which."""

    @property
    def decodes_apart(self) -> bool:
        """Whether decodes take nothing of `max_num_batched_tokens`."""
        ...

    def check(self) -> None:
        """Errors: BadInput naming the first setting that cannot work."""


Settings = TypeVar("Settings", bound=EngineSettings)


@dataclass(frozen=True)
class Limits:
    """Bounds of one replica, in vLLM's names. `max_model_len` None: bounded by the pool alone.

    `pipeline_depth`: how many plans may be in flight when another is made, 0 or 1 (asynchronous scheduling).
    `policy`: the order of the queue, and who is preempted (see the engine's `profile.py`).
    `caching`: prefix reuse.
    `groups`: what the layers keep; empty where all keep the KV of every token. With groups, `block_size` is
    the number of tokens per block key: their block sizes are multiples of it. `max_loras`: how many LoRA
    adapters a step computes with at most; None: any number. `host`: the host tier; None: there is none.
    `engine`: settings that only one engine has.
    `swap_blocks`: blocks of host memory for the KV of preempted requests; 0: it is computed again.
    `partial_reuse`: whether blocks that match partly are copied, only taken over, or not used ("").
    `tenants`: their shares; None: nobody tells them apart. `held_batches`: layers with a window hold the
    tokens of so many steps in addition to it. `drafter_groups`: numbers of the `groups` that have the
    drafter's layers; empty where nobody says which.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    policy: str = "fcfs"
    pipeline_depth: int = 0
    caching: bool = True
    groups: tuple[GroupSpec, ...] = ()
    max_loras: int | None = None
    host: HostTierSpec | None = None
    tenants: Tenants | None = None
    engine: EngineSettings | None = None
    swap_blocks: int = 0
    partial_reuse: str = ""
    held_batches: int = 1
    drafter_groups: tuple[int, ...] = ()

    def check(self) -> None:
        """Errors: BadInput naming the first limit that cannot work."""
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise BadInput(f"max_model_len is {self.max_model_len}; it must be at least 1")
        if self.num_blocks > MOST_BLOCKS:
            raise BadInput(
                f"num_blocks is {self.num_blocks:,}; at most {MOST_BLOCKS:,} can be simulated: "
                "give fewer as num_gpu_blocks"
            )
        engine = self.engine
        if engine is not None:
            engine.check()
        shared = engine is None or not engine.decodes_apart
        if shared and self.max_num_batched_tokens < self.max_num_seqs:
            raise BadInput(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than max_num_seqs "
                f"({self.max_num_seqs}), so decodes would not fit one step; raise one or lower the other"
            )
        if self.policy not in POLICIES:
            raise BadInput(
                f"scheduling policy {self.policy!r} is not known; choose one of {', '.join(POLICIES)}"
            )
        if self.pipeline_depth not in (0, 1):
            raise BadInput(f"pipeline_depth is {self.pipeline_depth}; it must be 0 or 1")
        if self.max_loras is not None and self.max_loras < 1:
            raise BadInput(f"max_loras is {self.max_loras}; it must be at least 1")
        if self.host is not None:
            self.host.check()
        if self.tenants is not None and self.tenants.fair and self.policy == "priority":
            raise BadInput("tenants take turns by weight or requests by priority; leave one out")
        if self.partial_reuse not in ("", "copy", "take"):
            raise BadInput(f"partial reuse {self.partial_reuse!r} is not known; choose copy or take")
        if (self.swap_blocks or self.partial_reuse) and self.groups:
            raise BadInput("swapping and partial reuse are for models whose layers all keep every token")
        if self.partial_reuse and self.host is not None:
            raise BadInput("partial reuse copies blocks that a load may overwrite; leave out the host tier")
        if self.groups:
            check_groups(self.groups, self.block_size, caching=self.caching)
        if any(number >= len(self.groups) for number in self.drafter_groups):
            raise BadInput(f"drafter_groups {self.drafter_groups}: there are {len(self.groups)} KV groups")
        if self.drafter_groups and self.host is not None:
            raise BadInput("a drafter in some KV groups is not modelled with a host tier; leave one out")

    def options(self) -> dict[str, Any]:
        """The limits of the scheduler under the names that vLLM gives its options."""
        return {
            "block_size": self.block_size,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "scheduling_policy": self.policy,
            "async_scheduling": bool(self.pipeline_depth),
            "enable_prefix_caching": self.caching,
        }

    @property
    def held_tokens(self) -> int:
        """Tokens that layers with a window hold in addition to it, at most."""
        return self.held_batches * self.max_num_batched_tokens

    def settings(self, default: Settings) -> Settings:
        """The engine's settings, or these where none are given. Errors: BadInput for another engine's."""
        engine = self.engine
        if engine is None:
            return default
        if not isinstance(engine, type(default)):
            raise BadInput(f"the profile takes {type(default).__name__}, not {type(engine).__name__}")
        return engine

    @property
    def gated(self) -> bool:
        """Whether requests may be passed over: for their adapter, or their tenant's ceiling."""
        return self.max_loras is not None or (self.tenants is not None and self.tenants.limited)

    def surely_fits(self, groups: int = 1, lookahead: int = 0) -> int:
        """A request of at most so many tokens, prompt and output together, is never refused.

        `groups` and `lookahead` as for `refusal`.
        """
        if self.groups or self.tenants is not None:
            return 0
        tokens = self.num_blocks // groups * self.block_size + 1 - lookahead
        return tokens if self.max_model_len is None else min(tokens, self.max_model_len)

    def refusal(
        self,
        prompt_tokens: int,
        output_tokens: int,
        groups: int = 1,
        lookahead: int = 0,
        *,
        tenant: str = "",
    ) -> str:
        """Why a request of these lengths can never be served; empty where it can.

        `groups`: how many equal KV groups need blocks for its tokens, where `self.groups` names none.
        `tenant`: whose ceiling it must fit below.
        `lookahead`: for how many more tokens it gets blocks than it computes (see `Drafter`).
        """
        total = prompt_tokens + output_tokens
        if self.max_model_len is not None and total > self.max_model_len:
            return (
                f"{prompt_tokens} prompt + {output_tokens} output tokens exceed "
                f"max_model_len {self.max_model_len}"
            )
        tokens = total - 1 + lookahead  # the last token is never computed
        if self.max_model_len is not None:
            tokens = min(tokens, self.max_model_len)
        if self.groups and self.tenants is None and self._surely_fits_whole(tokens):
            return ""
        if self.groups:
            # Admission asks for as many as the prompt may ever hold.
            blocks_needed = max(self.most_held(tokens), self.most_held(prompt_tokens, self.held_tokens))
        else:
            blocks_needed = -(-tokens // self.block_size) * groups
        if blocks_needed > self.num_blocks:
            return f"needs {blocks_needed} blocks of {self.block_size} tokens; the pool has {self.num_blocks}"
        return "" if self.tenants is None else self.above_ceiling(total, tenant)

    def above_ceiling(self, total_tokens: int, tenant: str) -> str:
        """Why a request of so many tokens never fits below its tenant's ceiling; empty where it does."""
        ceiling = None if self.tenants is None else self.tenants.share(tenant).blocks
        blocks = self.blocks_at_end(total_tokens)
        if ceiling is None or blocks <= ceiling:
            return ""
        return f"needs {blocks} blocks of {self.block_size} tokens; its tenant may hold {ceiling}"

    def _surely_fits_whole(self, tokens: int) -> bool:
        """Whether a request of so many tokens surely fits, even if nothing ever leaves a window.

        It may fit even if not: groups with larger blocks are counted as if theirs had `block_size` tokens.
        """
        return -(-tokens // self.block_size) * len(self.groups) <= self.num_blocks

    def blocks_at_end(self, total_tokens: int) -> int:
        """Blocks that a request of so many tokens is counted with against its tenant's ceiling.

        The last token is never computed. Where layers keep different tokens it is the most it ever holds.
        """
        if self.groups:
            return self.most_held(total_tokens - 1)
        return -(-(total_tokens - 1) // self.block_size)

    def most_held(self, tokens: int, held_tokens: int | None = None) -> int:
        """Blocks that a request of so many tokens holds at most at a time, in all of `groups`.

        `held_tokens`: those that layers hold in addition to their window; None: those of one step.
        """
        if held_tokens is None:
            held_tokens = self.max_num_batched_tokens
        held = [
            min(group.blocks_of(tokens), group.most_blocks(held_tokens, self.max_model_len))
            for group in self.groups
        ]
        return sum(held)
