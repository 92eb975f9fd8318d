"""One request, from submission to its end."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from pagecast.sim.core.runs import Run

if TYPE_CHECKING:
    from pagecast.sim.core.keys import BlockKeys

NEVER = -1  # a time or step that has not come


class State(Enum):
    """Where a request stands."""

    NEW = "new"  # made, not yet submitted
    WAITING = "waiting"  # in the queue, holding no blocks (or, in `nano-vllm`, part of its prefill done)
    PREFILL = "prefill"  # running, prompt chunks still to come
    DECODE = "decode"  # running, a token a step
    DRAINING = "draining"  # running, its last token planned, not yet committed
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class Request:
    """A request as the scheduler sees it. Times are integer nanoseconds, lengths tokens.

    While it decodes, nothing here changes from step to step: plan number s computes the token at
    position `s - lag`, and the last one comes with plan `last_step`.
    """

    __slots__ = (
        "admitted_ns",
        "arrival_ns",
        "cached_tokens",
        "computed",
        "finished_ns",
        "first_token_ns",
        "id",
        "index",
        "keys",
        "known",
        "lag",
        "last_step",
        "lost_tokens",
        "order",
        "output_tokens",
        "parent",
        "preemptions",
        "priority",
        "prompt_tokens",
        "queue_depth",
        "reason",
        "recomputed_tokens",
        "reused_tokens",
        "segment",
        "state",
        "table",
        "table_blocks",
        "tail",
    )

    def __init__(
        self,
        id: str,
        keys: BlockKeys,
        prompt_tokens: int,
        output_tokens: int,
        *,
        arrival_ns: int = 0,
        priority: int = 0,
        index: int = 0,
        parent: Request | None = None,
    ) -> None:
        self.id = id
        self.index = index
        self.keys = keys
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.arrival_ns = arrival_ns
        self.priority = priority
        self.parent = parent  # whose prompt it shares: it is let into the queue when that is computed
        self.state = State.NEW
        self.known = prompt_tokens  # tokens whose content is decided: prompt, and output so far
        self.computed = 0  # tokens whose KV is planned or there; not kept up while decoding
        self.lag = 0
        self.last_step = NEVER
        self.order = 0
        # Pairs (run, length held); length -1: all of it, as its writer. `tail` is the run being filled.
        self.table: list[tuple[Run, int]] = []
        self.table_blocks = 0  # blocks in `table`; not kept up while decoding
        self.segment = 0  # of `keys`, in which the next block to be allocated lies
        self.tail: Run | None = None
        self.cached_tokens = NEVER  # prefix hit at first admission
        self.reused_tokens = 0  # over all admissions
        self.lost_tokens = 0  # computed when it was last preempted
        self.recomputed_tokens = 0  # of these, what its next admission did not find in the cache
        self.preemptions = 0
        self.queue_depth = 0
        self.admitted_ns = NEVER
        self.first_token_ns = NEVER
        self.finished_ns = NEVER
        self.reason = ""

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.state.value}, {self.prompt_tokens}+{self.output_tokens})"

    @property
    def alive(self) -> bool:
        """Whether the scheduler still has work for it."""
        return self.state in _ALIVE

    @property
    def last_block(self) -> int:
        """The newest block of a decoding request's table: where the token being computed goes. O(1)."""
        assert self.tail is not None
        return self.tail.blocks[-1]

    def blocks(self) -> list[int]:
        """The block table: block numbers in sequence order."""
        numbers: list[int] = []
        for run, length in self.table:
            part: Run | None = run
            if length < 0:
                while part is not None and part.writer is self:
                    numbers += part.blocks
                    part = part.rest
                continue
            end = run.start + length
            while part is not None and part.start < end:
                stop = end if part.rest is None else min(end, part.rest.start)
                numbers += part.blocks[: stop - part.start]
                part = part.rest
        return numbers


_ALIVE = frozenset((State.WAITING, State.PREFILL, State.DECODE, State.DRAINING))
