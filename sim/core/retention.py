"""Retention: how long a request wants which of its blocks to be kept after it, in TensorRT-LLM's terms.

Priorities go from 0 to 100; blocks without one have 35. A block has the priority of the token range that
its first token lies in. With a duration, the priority falls back to 35 so long after the block became free.

    0-512:80:30 512-:20 decode:10     tokens 0 to 511 at 80 for 30 seconds, the rest of the prompt at 20,
                                      generated tokens at 10

Source: `KvCacheRetentionConfig` of TensorRT-LLM.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from pagecast.sim.core.errors import BadInput

DEFAULT_PRIORITY = 35
MOST_PRIORITY = 100
FOREVER = 1 << 62
_NS = 1_000_000_000
_PART = re.compile(r"(?:(\d+)-(\d*)|decode):(\d+)(?::(\d+(?:\.\d+)?))?")


class Keep(NamedTuple):
    """A priority, and for how many nanoseconds after its release a block has it (None: for ever)."""

    priority: int
    duration_ns: int | None = None


class BlockRange(NamedTuple):
    """Blocks `first` to `end` of a sequence and what was asked for them; None: nothing."""

    first: int
    end: int
    keep: Keep | None


@dataclass(frozen=True)
class Retention:
    """Retention of one request: `ranges` of prompt tokens `(start, end, keep)`, and generated tokens."""

    ranges: tuple[tuple[int, int, Keep], ...] = ()
    decode: Keep | None = None

    @classmethod
    def parse(cls, text: str) -> Retention:
        """Reads `START-END:PRIORITY[:SECONDS]` and `decode:PRIORITY[:SECONDS]`, with spaces between.

        Errors: BadInput for another form, a priority above 100, ranges that overlap, and two for decode.
        """
        ranges = []
        decode = None
        end = 0
        for part in text.split():
            match = _PART.fullmatch(part)
            if match is None:
                raise BadInput(
                    f"retention {part!r}: write START-END:PRIORITY[:SECONDS] or decode:PRIORITY[:SECONDS]"
                )
            start, stop, priority, seconds = match.groups()
            if int(priority) > MOST_PRIORITY:
                raise BadInput(f"retention {part!r}: priorities go from 0 to {MOST_PRIORITY}")
            keep = Keep(int(priority), None if seconds is None else round(float(seconds) * _NS))
            if start is None:
                if decode is not None:
                    raise BadInput(f"retention {part!r}: field 'decode' is given twice; keep one")
                decode = keep
                continue
            if int(start) < end or (stop and int(stop) <= int(start)):
                raise BadInput(f"retention {part!r}: ranges must be in order, and none empty")
            end = int(stop) if stop else FOREVER
            ranges.append((int(start), end, keep))
        return cls(tuple(ranges), decode)

    def __str__(self) -> str:
        texts = [
            f"{start}-{'' if end == FOREVER else end}:{_keep_text(keep)}" for start, end, keep in self.ranges
        ]
        return " ".join(texts if self.decode is None else [*texts, f"decode:{_keep_text(self.decode)}"])

    def of_blocks(self, block_size: int, prompt_tokens: int) -> tuple[BlockRange, ...]:
        """The same by block numbers, without gaps from 0 on."""
        by_block: list[BlockRange] = []
        prompt_end = -(-prompt_tokens // block_size)
        at = 0
        for start, end, keep in self.ranges:
            first = min(-(-start // block_size), prompt_end)
            stop = min(-(-end // block_size), prompt_end)
            if first > at:
                by_block.append(BlockRange(at, first, None))
            if stop > first:
                by_block.append(BlockRange(first, stop, keep))
            at = max(at, stop)
        if at < prompt_end:
            by_block.append(BlockRange(at, prompt_end, None))
        by_block.append(BlockRange(prompt_end, FOREVER, self.decode))
        return tuple(by_block)


def _keep_text(keep: Keep) -> str:
    if keep.duration_ns is None:
        return str(keep.priority)
    seconds, rest = divmod(keep.duration_ns, _NS)
    return f"{keep.priority}:{seconds}.{rest:09}"
