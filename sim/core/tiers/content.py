"""Names of offloaded blocks: whole numbers, equal for equal content of one KV group.

Blocks of one segment of content are numbered in a row, so the names of a long prompt are a few ranges.
"""

from __future__ import annotations

from bisect import bisect_right
from struct import Struct

import xxhash
from pagecast.sim.core.identity.keys import BlockKeys

_APART = 40  # bits of a block's number within its segment
_SPAN = Struct("<qqq").pack


class ContentNames:
    """The names given so far. Names are never given back: equal content has one for as long as this lives."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._digests: list[tuple[bytes, int, bool]] = []  # by number: digest, group, whether of one block

    def extend(self, names: list[int], keys: BlockKeys, group: int, units: int, blocks: int) -> None:
        """Appends the names of a sequence's blocks until there are `blocks`; each has `units` key blocks."""
        done = len(names)
        while done < blocks:
            number = (done + 1) * units - 1
            segment = number if keys.explicit else bisect_right(keys.ends, number)
            end = min(keys.ends[segment] // units, blocks)
            base = self._base(keys.digests[segment], group, single=keys.explicit)
            names.extend(range(base + number, base + end * units, units))
            done = end

    def _base(self, digest: bytes, group: int, *, single: bool) -> int:
        key = digest + bytes([group])
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._digests)
            self._digests.append((digest, group, single))
        return number << _APART

    def block_key(self, name: int) -> tuple[bytes, int]:
        """The key of a block as `BlockKeys.block_key` gives it, and the block's group."""
        digest, group, single = self._digests[name >> _APART]
        if single:
            return digest, group
        number = name & ((1 << _APART) - 1)
        return xxhash.xxh3_128_digest(digest + _SPAN(number, 0, 0)), group
