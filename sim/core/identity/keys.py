"""Block keys: digests of scope, preceding tokens and own content.

Keys are kept per segment, not per block. A segment's blocks go by their number in the sequence, so a prompt
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

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from pagecast.sim.core.identity.content import Span, merge, split_spans
from pagecast.sim.core.identity.scope import DEFAULT_SCOPE, Scope

_SPAN = Struct("<qqq").pack
_digest = xxhash.xxh3_128_digest
OPEN = 1 << 62  # a segment that grows with the output ends here


class Public(NamedTuple):
    """The first tokens of a prompt that lie in a scope shared by all."""

    tokens: int
    scope: Scope


class BlockKeys:
    """The keys of one request's blocks: of its prompt, and of its output as far as that is known.

    `digests[i]` is the key of segment i, which covers blocks `ends[i - 1]` to `ends[i]`. Where the output
    is a span, the last segment is open: it covers every block the request may ever fill.

    `_ids` and `_tail` are there for token ids only: all of them, and those of the last part of a block, eight
    bytes each.
    """

    __slots__ = (
        "_chain",
        "_ids",
        "_tail",
        "block_size",
        "digests",
        "ends",
        "explicit",
        "lookahead",
        "output",
        "public_blocks",
        "scope",
        "spans",
    )

    _ids: bytearray
    _tail: bytes

    def __init__(self, block_size: int, chain: bytes, lookahead: int = 0) -> None:
        self.block_size = block_size
        self.lookahead = lookahead  # tokens after a block that its key covers
        self.digests: list[bytes] = []
        self.ends: list[int] = []
        self.explicit = False  # token ids: one segment per block, appended as tokens become known
        self.scope = chain
        self.spans: Sequence[tuple[int, int, int]] = ()  # of the prompt, merged
        self.output = (0, 0)  # the text generated, and where in it
        self.public_blocks = 0  # its first blocks that lie in a namespace shared by all
        self._chain = chain

    @classmethod
    def of_spans(
        cls,
        block_size: int,
        spans: Sequence[tuple[int, int, int]],
        output: tuple[int, int],
        scope: Scope = DEFAULT_SCOPE,
        *,
        merged: bool = False,
        public: Public | None = None,
        lookahead: int = 0,
    ) -> BlockKeys:
        """Keys of a prompt given as spans `(content, offset, length)`, and its output `(content, offset)`.

        `public`: the scope of its first tokens, where it is another. `lookahead`: a block's key covers so
        many tokens after it.
        """
        if public is not None:
            return cls._of_public_spans(block_size, spans, output, scope, public, lookahead)
        keys = cls(block_size, scope.digest, lookahead)
        chain = keys._chain
        digests, ends = keys.digests, keys.ends
        position = done = 0
        follows = -1
        content = 0
        keys.spans = spans = spans if merged else merge(spans)
        keys.output = output
        for content, offset, length in spans:
            chain = _digest(chain + _SPAN(position, content, offset))
            position += length
            end = (position - lookahead) // block_size
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
    def _of_public_spans(
        cls,
        block_size: int,
        spans: Sequence[tuple[int, int, int]],
        output: tuple[int, int],
        scope: Scope,
        public: Public,
        lookahead: int,
    ) -> BlockKeys:
        """Keys whose chain leaves the public scope for the request's own after so many tokens."""
        whole = merge(spans)
        head, tail = split_spans(whole, public.tokens)
        keys = cls.of_spans(block_size, head, (0, 0), public.scope, merged=True, lookahead=lookahead)
        keys.scope = scope.digest
        keys.spans, keys.output = whole, output
        # The last segment is the open one, of an output that does not follow here.
        del keys.digests[-1], keys.ends[-1]
        keys.public_blocks = keys.ends[-1] if keys.ends else 0
        chain = _digest((keys.digests[-1] if keys.digests else public.scope.digest) + scope.digest)
        position = 0
        for number, (content, offset, length) in enumerate([*head, *tail]):
            # Public spans are in the chain again: the last of them may end within a block.
            chain = _digest(chain + _SPAN(position, content, offset))
            position += length
            end = (position - lookahead) // block_size
            if number >= len(head) and end > (keys.ends[-1] if keys.ends else 0):
                keys.digests.append(chain)
                keys.ends.append(end)
        keys.digests.append(_digest(chain + _SPAN(position, output[0], output[1])))
        keys.ends.append(OPEN)
        return keys

    @classmethod
    def of_ids(
        cls,
        block_size: int,
        ids: npt.NDArray[np.int64] | Sequence[int],
        scope: Scope = DEFAULT_SCOPE,
        *,
        public: Public | None = None,
        lookahead: int = 0,
    ) -> BlockKeys:
        """Keys of a prompt given as token ids; `extend` adds generated ones as they come.

        `public`, `lookahead`: as for `of_spans`.
        """
        keys = cls(block_size, scope.digest if public is None else public.scope.digest, lookahead)
        keys.explicit = True
        keys._tail = b""
        keys._ids = bytearray()
        if public is not None:
            keys.public_blocks = public.tokens // block_size
            head = keys.public_blocks * block_size
            keys.extend(ids[:head])
            keys._chain = _digest(keys._chain + scope.digest)
            keys.scope = scope.digest
            ids = ids[head:]
        keys.extend(ids)
        return keys

    def extend(self, ids: npt.NDArray[np.int64] | Sequence[int]) -> None:
        """Appends token ids; each block they complete, with what its key covers, gets it. O(ids)."""
        added = np.asarray(ids, dtype="<i8").tobytes()
        self._ids += added
        data = self._tail + added
        size = 8 * self.block_size
        beyond = 8 * self.lookahead
        known = max(len(data) - beyond, 0)
        full = known - known % size
        chain = self._chain
        for start in range(0, full, size):
            chain = _digest(chain + data[start : start + size + beyond])
            self.digests.append(chain)
            self.ends.append(len(self.digests))
        self._chain = chain
        self._tail = data[full:]

    def head(self, tokens: int) -> tuple[object, ...] | None:
        """Equal where the first tokens are, blocks or not; None for token ids, and where a part is public.

        The sequence has at least so many tokens.
        """
        if self.explicit or self._chain != self.scope:
            return None
        head_spans = []
        for content, offset, length in merge([*self.spans, (*self.output, OPEN)]):
            head_spans.append(Span(content, offset, min(length, tokens)))
            tokens -= length
            if tokens <= 0:
                break
        return self._chain, *head_spans

    def block_key(self, block: int) -> bytes:
        """The 16-byte key of one block, by its number in the sequence.

        Errors: IndexError where the block's content is not known yet.
        """
        if self.explicit:
            return self.digests[block]
        segment = next(i for i, end in enumerate(self.ends) if block < end)
        return _digest(self.digests[segment] + _SPAN(block, 0, 0))


def segment_of(keys: BlockKeys, number: int) -> int:
    """The segment in which a key block lies."""
    return number if keys.explicit else bisect_right(keys.ends, number)


def common_tokens(one: BlockKeys, other: BlockKeys, start: int, most: int) -> int:
    """How many tokens two sequences share from token `start` on, `most` at most.

    Both are given as spans, or both as token ids, of which those count that are known.
    """
    if one.explicit or other.explicit:
        return _common_ids(one, other, start, most) if one.explicit and other.explicit else 0
    total = 0
    first, second = _texts(one, start), _texts(other, start)
    a, b = next(first), next(second)
    while a[:2] == b[:2] and total < most:
        length = min(a[2], b[2])
        total += length
        if total >= most:
            break
        a = (a[0], a[1] + length, a[2] - length) if a[2] > length else next(first)
        b = (b[0], b[1] + length, b[2] - length) if b[2] > length else next(second)
    return min(total, most)


def _common_ids(one: BlockKeys, other: BlockKeys, start: int, most: int) -> int:
    first = np.frombuffer(bytes(one._ids[8 * start : 8 * (start + most)]), "<i8")
    second = np.frombuffer(bytes(other._ids[8 * start : 8 * (start + most)]), "<i8")
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length


def _texts(keys: BlockKeys, start: int) -> Iterator[tuple[int, int, int]]:
    """The spans of prompt and output from token `start` on."""
    for content, offset, length in keys.spans:
        if start < length:
            yield content, offset + start, length - start
        start = max(start - length, 0)
    yield keys.output[0], keys.output[1] + start, OPEN
