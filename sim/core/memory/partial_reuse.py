"""Partial reuse: a cached block that shares its first tokens with the next block of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from pagecast.sim.core.identity.keys import BlockKeys, common_tokens
from pagecast.sim.core.memory.extent import Extent
from pagecast.sim.core.memory.head_start import NO_START, HeadStart, StartKind
from pagecast.sim.core.memory.hit import TableHit
from pagecast.sim.core.request import Request

_MOST_CANDIDATES = 256


class PartialReuse:
    """Looks for the cached block that follows a prefix hit and shares most tokens with the request.

    `copies`: where the block is in use, or others follow it, it is copied; else only blocks that nobody uses
    are taken over. Candidates are the blocks that follow the hit in the tree, at most 256, the newest first.
    Prompts that share no full block share nothing. `take_over` gives a request the last block of a cached
    extent that nobody holds. Source: partial reuse of TensorRT-LLM.
    """

    def __init__(
        self, block_size: int, take_over: Callable[[Request, Extent], None], *, copies: bool
    ) -> None:
        self._block_size = block_size
        self._copies = copies
        self.take_over = take_over
        self.tokens = 0
        self.copied_blocks = 0
        self.taken_blocks = 0

    def find(self, keys: BlockKeys, hit: TableHit, known_tokens: int) -> HeadStart:
        """The best block to go on in; at least one known token is left to compute."""
        if not hit.parts:
            return NO_START
        start = hit.places * self._block_size
        most = min(known_tokens - 1 - start, self._block_size - 1)
        best = NO_START
        last, _, high = hit.parts[-1]
        if most <= 0:
            return best
        for extent in _followers(last, high, hit.places):
            origin = extent.origin
            if origin is None or origin.keys.scope != keys.scope:
                continue
            tokens = common_tokens(keys, origin.keys, start, most)
            if tokens <= best.tokens:
                continue
            kind = StartKind.TAKE if _is_idle_leaf(extent, hit.places) else StartKind.COPY
            if kind is StartKind.TAKE or self._copies:
                best = HeadStart(tokens, kind, extent, extent.blocks[hit.places - extent.number])
        return best

    def figures(self) -> dict[str, int]:
        """Tokens reused this way, and the blocks that they came from."""
        return {
            "tokens": self.tokens,
            "copied_blocks": self.copied_blocks,
            "taken_blocks": self.taken_blocks,
        }


def _followers(last: Extent, high: int, block: int) -> list[Extent]:
    """Extents that have block number `block` of the sequences that go on after row `high` of `last`."""
    if high < last.rows:
        first = [last]
    else:
        first = [child for child in last.children or () if child.is_rest and child.number == block]
    children = (
        child for child in reversed(last.children or ()) if child.number == block and not child.is_rest
    )
    return [*first, *islice(children, _MOST_CANDIDATES)]


def _is_idle_leaf(extent: Extent, block: int) -> bool:
    """Whether nobody holds the block, and none follows it."""
    return block == extent.end - 1 and not extent.holders and not extent.children
