"""One request, from submission to its end."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.retention import Retention

NEVER = -1  # a time or step that has not come


class State(Enum):
    """Life cycle of a request."""

    NEW = "new"  # made, not yet submitted
    WAITING = "waiting"  # in the queue, holding no blocks
    LOADING = "loading"  # in the queue, holding blocks that are loaded from a lower tier, or were
    PREFILL = "prefill"  # admitted, prompt chunks still to come (in `nano-vllm` it stays in the queue)
    DECODE = "decode"  # running, generating
    DRAINING = "draining"  # running, its last token planned, not yet committed
    FINISHED = "finished"
    CANCELLED = "cancelled"  # or failed: then `reason` says why
    REJECTED = "rejected"


class Request:
    """A request as the scheduler sees it. Times are integer nanoseconds, lengths are tokens.

    What was asked: `keys`, `prompt_tokens`, `items`, `output_tokens`, `arrival_ns`, `priority`, `adapter`,
    `parent`, `retention`, `tenant`, `max_tokens`: most tokens that it may generate, for which engines
    reserve memory; the scheduler knows no other length of its output where that is a reservation. How far it
    is: `state`, `known_tokens`, `computed_tokens`. The blocks it holds are in its tables
    (`memory/table.py`).

    While a request decodes one token per step, nothing here changes from step to step: `decoders.py` keeps
    `lag` and `last_tick`, from which `Running.planned` computes its position. A request that speculates goes
    on in chunks instead. Plans in flight may yield it up to `in_flight_tokens` more tokens, and its
    `computed_tokens` are `known_tokens + in_flight_tokens - 1`: until its commit, every draft token in flight
    counts as right.
    """

    __slots__ = (
        "adapter",
        "admitted_ns",
        "arrival_ns",
        "cached_tokens",
        "computed_tokens",
        "disk_tokens",
        "drafts",
        "external_tokens",
        "finished_ns",
        "first_token_ns",
        "hit_tokens",
        "id",
        "in_flight_tokens",
        "index",
        "items",
        "keys",
        "known_tokens",
        "lag",
        "last_disk",
        "last_external",
        "last_tick",
        "lost_tokens",
        "max_tokens",
        "order",
        "output_tokens",
        "parent",
        "partial_tokens",
        "preemptions",
        "priority",
        "prompt_tokens",
        "queue_depth",
        "reason",
        "recomputed_tokens",
        "retention",
        "reused_tokens",
        "state",
        "swapped_tokens",
        "tenant",
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
        self.max_tokens = output_tokens
        self.tenant = ""  # who asks
        self.items: Sequence[tuple[str, int, int]] = ()  # images and the like: name, offset and tokens
        self.adapter = ""  # the LoRA adapter that it is computed with
        self.retention: Retention | None = None  # how long its blocks are to be kept after it
        self.parent = parent  # whose prompt it shares: it is queued when that prompt is computed
        self.state = State.NEW
        # Tokens whose content is decided: prompt, and output so far. Not updated while decoding.
        self.known_tokens = prompt_tokens
        self.computed_tokens = 0  # tokens whose KV is planned or there; not updated while decoding
        self.drafts = 0  # draft tokens that its next step verifies, beside its next token
        # Tokens that plans in flight may yield; counted only where requests speculate.
        self.in_flight_tokens = 0
        self.lag = 0
        self.last_tick = NEVER
        self.order = 0  # number of its latest admission
        self.cached_tokens = NEVER  # prefix hit at first admission
        self.partial_tokens = 0  # of `cached_tokens`, those of a block that matched partly
        self.swapped_tokens = 0  # computed tokens in host memory since its latest preemption
        self.reused_tokens = 0  # prefix hits of all admissions
        self.hit_tokens = 0  # prefix hit at its latest admission before its first token
        self.external_tokens = 0  # of `cached_tokens`, those loaded from a lower tier
        self.disk_tokens = 0  # of `external_tokens`, those that a disk behind it had to bring first
        self.last_disk = 0  # of `last_external`, the same
        self.last_external = 0  # tokens that its latest load brought or is to bring
        self.lost_tokens = 0  # computed tokens that its latest preemption threw away
        self.recomputed_tokens = 0  # lost tokens that the next admission did not find, of all preemptions
        self.preemptions = 0
        self.queue_depth = 0  # requests ahead of it when it was submitted
        self.admitted_ns = NEVER
        self.first_token_ns = NEVER
        self.finished_ns = NEVER
        self.reason = ""  # why it was rejected, cancelled or failed

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.state.value}, {self.prompt_tokens}+{self.output_tokens})"

    @property
    def alive(self) -> bool:
        """Whether the scheduler still has work for it."""
        return self.state in _ALIVE

    @property
    def total_tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt_tokens + self.output_tokens

    @property
    def most_tokens(self) -> int:
        """Prompt and all that it may generate together."""
        return self.prompt_tokens + self.max_tokens


# A tuple is searched by identity; the hash of an enumeration's member is slow.
_ALIVE = (State.WAITING, State.LOADING, State.PREFILL, State.DECODE, State.DRAINING)
