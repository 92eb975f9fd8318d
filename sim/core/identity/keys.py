"""Block keys: digests of scope, preceding tokens and own content.

Keys are kept per segment, not per block. Within one span of content the blocks are numbered, so a prompt
of ten thousand tokens that a trace describes by twenty content ids has twenty digests, not six hundred:

    tokens    |---- span A ----|------ span B ------|- output ...
    blocks    [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ][ 6 ][ 7 ][ 8 ...
    segment   A: 0..3          B: 3..7              output: 7..

A block belongs to the span in which its last token lies. A segment's digest extends the digest before it
by the position where the span begins, the content id and the offset. Together with the block's number
it identifies the scope and every token up to the block's end, and nothing else. Prompts given as token ids
have one segment per block, whose digest extends the one before it by the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

import numpy as np
import numpy.typing as npt
import xxhash
from pagecast.sim.core.identity.content import merge
from pagecast.sim.core.identity.scope import DEFAULT_SCOPE, Scope

_SPAN = Struct("<qqq").pack
_digest = xxhash.xxh3_128_digest
OPEN = 1 << 62  # a segment that grows with the output ends here


class BlockKeys:
    """The keys of one request's blocks: of its prompt, and of its output as far as that is known.

    `digests[i]` is the key of segment i, which covers blocks `ends[i - 1]` to `ends[i]`. Where the output
    is a span, the last segment is open: it covers every block the request may ever fill.
    """

    __slots__ = ("_chain", "_tail", "block_size", "digests", "ends", "explicit")

    def __init__(self, block_size: int, chain: bytes) -> None:
        self.block_size = block_size
        self.digests: list[bytes] = []
        self.ends: list[int] = []
        self.explicit = False  # token ids: one segment per block, appended as tokens become known
        self._chain = chain
        self._tail = b""

    @classmethod
    def of_spans(
        cls,
        block_size: int,
        spans: Sequence[tuple[int, int, int]],
        output: tuple[int, int],
        scope: Scope = DEFAULT_SCOPE,
        *,
        merged: bool = False,
    ) -> BlockKeys:
        """Keys of a prompt given as spans `(content, offset, length)`, and its output `(content, offset)`."""
        keys = cls(block_size, scope.digest)
        chain = keys._chain
        digests, ends = keys.digests, keys.ends
        position = done = 0
        follows = -1
        content = 0
        for content, offset, length in spans if merged else merge(spans):
            chain = _digest(chain + _SPAN(position, content, offset))
            position += length
            end = position // block_size
            if end > done:
                digests.append(chain)
                ends.append(end)
                done = end
            follows = offset + length
        if follows == output[1] and content == output[0] and position:
            # The output goes on where the prompt's last span stops: one text, one segment.
            if digests and digests[-1] is chain:
                ends[-1] = OPEN
                return keys
        else:
            chain = _digest(chain + _SPAN(position, output[0], output[1]))
        digests.append(chain)
        ends.append(OPEN)
        return keys

    @classmethod
    def of_ids(
        cls,
        block_size: int,
        ids: npt.NDArray[np.int64] | Sequence[int],
        scope: Scope = DEFAULT_SCOPE,
    ) -> BlockKeys:
        """Keys of a prompt given as token ids; `extend` adds generated ones as they come."""
        keys = cls(block_size, scope.digest)
        keys.explicit = True
        keys.extend(ids)
        return keys

    def extend(self, ids: npt.NDArray[np.int64] | Sequence[int]) -> None:
        """Appends token ids; each block they complete gets its key. O(ids)."""
        data = self._tail + np.asarray(ids, dtype="<i8").tobytes()
        size = 8 * self.block_size
        full = len(data) - len(data) % size
        chain = self._chain
        for start in range(0, full, size):
            chain = _digest(chain + data[start : start + size])
            self.digests.append(chain)
            self.ends.append(len(self.digests))
        self._chain = chain
        self._tail = data[full:]

    def block_key(self, block: int) -> bytes:
        """The 16-byte key of one block, by its number in the sequence.

        Errors: IndexError where the block's content is not known yet.
        """
        if self.explicit:
            return self.digests[block]
        segment = next(i for i, end in enumerate(self.ends) if block < end)
        return _digest(self.digests[segment] + _SPAN(block, 0, 0))
