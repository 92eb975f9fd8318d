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
        self._first_names: dict[bytes, int] = {}  # of each segment in each group
        # By number: digest, group, whether of one block.
        self._digests: dict[int, tuple[bytes, int, bool]] = {}
        self._count = 0
        self._size_after_sweep = 0  # segments that were named after the last sweep

    def extend(self, names: list[int], keys: BlockKeys, group: int, units: int, blocks: int) -> bool:
        """Appends the names of a sequence's blocks until there are `blocks`; each has `units` key blocks.

        Returns whether all of the sequence's names are new: nobody has asked for one of them before.
        """
        done = len(names)
        new = not done
        single = keys.explicit
        ends = keys.ends
        first_names = self._first_names
        mark = bytes((group,))
        while done < blocks:
            number = (done + 1) * units - 1
            segment = number if single else bisect_right(ends, number)
            end = ends[segment] // units
            if end > blocks:
                end = blocks
            digest = keys.digests[segment]
            first = first_names.get(digest + mark)
            if first is None:
                first = first_names[digest + mark] = _first_name(self._count)
                self._digests[self._count] = digest, group, single
                self._count += 1
            else:
                new = False
            names += range(first + number, first + end * units, units)
            done = end
        return new

    @property
    def many(self) -> bool:
        """Whether there are twice as many segments as after the last sweep: it is time for another."""
        return len(self._first_names) > 2 * self._size_after_sweep + _LEAST_SWEPT

    def sweep(self, kept: Iterable[Iterable[int]]) -> None:
        """Forgets all segments but those of `kept`: every name that a tier or a request still keeps.

        A segment that comes again gets new names, so no old name ever means other content.
        """
        numbers: set[int] = set()
        for names in kept:
            numbers.update([name >> _APART for name in names])
        self._digests = {number: self._digests[number] for number in numbers}
        self._first_names = {
            key: name for key, name in self._first_names.items() if name >> _APART in numbers
        }
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
