"""SGLang's settings, in the names of its server arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.option import chunked_prefill_option, option


@dataclass(frozen=True)
class SglangSettings:
    """Settings of SGLang's rules besides `Limits`.

    `max_num_batched_tokens` of the limits is the chunk size, and `chunked_prefill` says whether prompts are
    cut into chunks at all. `max_prefill_tokens` bounds the prompts of a batch; the first may exceed it where
    none is cut. `schedule_conservativeness` scales the part of its longest output that is reserved for a
    running request.
    `mixed_chunk`: decodes join a batch of prompts. `ignore_eos`: outputs end by length alone.
    `eviction`: the order in which leaves of the radix tree are evicted.
    `recv_interval`: the scheduler looks for new requests once in so many steps (`Inbox`).
    """

    max_prefill_tokens: int = option("sglang: most prompt tokens in a batch", 16384, ge=1)
    chunked_prefill: bool = chunked_prefill_option(True)
    mixed_chunk: bool = option("sglang: decodes join a batch of prompts", False, flat="enable_mixed_chunk")
    schedule_conservativeness: float = option("sglang: scales the memory reserved for outputs", 1.0, gt=0)
    eviction: Literal["lru", "lfu", "slru", "fifo", "mru", "filo"] = option(
        "sglang: which cached prefix is evicted first", "lru", flat="radix_eviction_policy"
    )
    ignore_eos: bool = option("sglang: outputs end by length alone, and it knows", False)
    recv_interval: int = option(
        "sglang: decode steps between two looks for new requests", 1, flat="scheduler_recv_interval", ge=1
    )

    @property
    def decodes_apart(self) -> bool:
        """Decodes take nothing of the chunk size."""
        return True

    def check(self) -> None:
        """Errors: BadInput naming the first setting that cannot work."""
        if self.max_prefill_tokens < 1:
            raise BadInput(f"max_prefill_tokens is {self.max_prefill_tokens}; it must be at least 1")
        if not self.schedule_conservativeness > 0:
            raise BadInput(
                f"schedule_conservativeness is {self.schedule_conservativeness}; it must be above 0"
            )
        if self.recv_interval < 1:
            raise BadInput(f"scheduler_recv_interval is {self.recv_interval}; it must be at least 1")
        if self.mixed_chunk and not self.chunked_prefill:
            raise BadInput("mixed_chunk needs chunked prefill")
