"""Names of offloaded blocks: whole numbers, equal for equal content of one KV group.

Blocks of one segment of content are numbered in a row, so the names of a long prompt are a few ranges.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from struct import Struct

import xxhash
from pagecast.sim.core.identity.keys import BlockKeys

_APART = 40  # bits of a block's number within its segment
_SCATTER = 0x9E3779B97F4A7C15
_SCATTERED = (1 << _APART - 1) - 1
_SPAN = Struct("<qqq").pack
_LEAST_SWEPT = 4096  # segments that may always be named


class ContentNames:
    """The names of content. Equal content has one name for as long as somebody keeps it (see `sweep`)."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        # By number: digest, group, whether of one block.
        self._digests: dict[int, tuple[bytes, int, bool]] = {}
        self._count = 0
        self._size_after_sweep = 0  # segments that were named after the last sweep

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
            number = self._numbers[key] = self._count
            self._digests[number] = digest, group, single
            self._count += 1
        return _first_name(number)

    @property
    def many(self) -> bool:
        """Whether there are twice as many segments as after the last sweep: it is time for another."""
        return len(self._numbers) > 2 * self._size_after_sweep + _LEAST_SWEPT

    def sweep(self, names: Iterable[int]) -> None:
        """Forgets all segments but those of `names`: every name that a tier or a request still keeps.

        A segment that comes again gets new names, so no old name ever means other content.
        """
        numbers = {name >> _APART for name in names}
        self._digests = {number: self._digests[number] for number in numbers}
        self._numbers = {key: number for key, number in self._numbers.items() if number in numbers}
        self._size_after_sweep = len(numbers)

    def block_key(self, name: int) -> tuple[bytes, int]:
        """The key of a block as `BlockKeys.block_key` gives it, and the block's group."""
        digest, group, single = self._digests[name >> _APART]
        if single:
            return digest, group
        number = name - _first_name(name >> _APART)
        return xxhash.xxh3_128_digest(digest + _SPAN(number, 0, 0)), group


def _first_name(segment: int) -> int:
    """The name of the first block of a segment, by the segment's number.

    Names of different segments differ in their low bits as well: by these a dictionary of whole numbers finds
    its entries, and long runs of equal ones would make it slow.
    """
    return (segment << _APART) + (segment * _SCATTER & _SCATTERED)
