"""Prefix search over groups of layers: a hit is a fixed point, as each kind of layers may shorten it.

Source: vllm/v1/core/kv_cache_coordinator.py (0.24).
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from pagecast.sim.core.group_spec import GroupSpec
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.memory.extent_pool import ExtentPool
from pagecast.sim.core.memory.hit import Hit, TableHit
from pagecast.sim.core.memory.layer_group import LayerGroup
from pagecast.sim.core.memory.lookup import Lookup

NO_HIT = Hit(0)
_NO_TABLE = TableHit(0)


class PrefixSearch:
    """Finds the longest cached prefix that all `groups` have.

    `block_size` is the number of tokens per block key, `aligned` that of which every hit is a multiple.
    """

    def __init__(self, pool: ExtentPool, groups: list[LayerGroup], block_size: int, aligned: int) -> None:
        self._pool = pool
        self._groups = len(groups)
        self.longest = 0  # the longest prefix that some layers had when it was last asked
        # Groups of equal layers are looked up together, those that keep every token first.
        equal: dict[GroupSpec, dict[int, bytes]] = {}
        for number, group in enumerate(groups):
            if group.spec.rules.cached:
                equal.setdefault(group.spec, {})[number] = group.mark
        lookups = [Lookup(pool, spec, marks, block_size, aligned) for spec, marks in equal.items()]
        self._lookups = sorted(lookups, key=lambda lookup: not lookup.keeps_all)
        # One kind beside full attention can't lengthen what full attention has: one pass is enough.
        self._simple = len(lookups) == 1 or (len(lookups) == 2 and self._lookups[0].keeps_all)
        self._plain = len(lookups) == 1 and self._lookups[0].keeps_all

    def may_find(self, keys: BlockKeys) -> bool:
        """Whether a hit is possible."""
        return self._lookups[0].may_find(keys)

    def find(self, keys: BlockKeys, most: int, seen: int, *, dropping: AbstractSet[GroupSpec]) -> Hit:
        """The longest cached prefix of at most `most` tokens, for which `seen` tokens may be looked at.

        Each kind of layers may shorten the prefix; then the others are asked again, until none does. Layers
        that keep all are looked up once; later rounds cut that hit. Those in `dropping` leave out the last
        block of a hit (EAGLE), each kind once: `dropped` are the kinds that have. (States have none to leave
        out, but count.)
        When a kind finds less, all may drop a block again.
        """
        if self._plain and not dropping:
            hits = self._lookups[0].find(keys, most)
            self.longest = hits[0].places * self._lookups[0].spec.block_size
            return self._hit(self.longest, {0: hits})
        tokens = most
        self.longest = 0
        hits_by_lookup: dict[int, list[TableHit]] = {}
        dropped: set[int] = set()
        while True:
            length = tokens
            for number, lookup in enumerate(self._lookups):
                size = lookup.spec.block_size
                if lookup.keeps_all and number in hits_by_lookup:
                    # What was found once can only be cut.
                    length = length // size * size
                    continue
                drop = lookup.spec in dropping and number not in dropped
                if drop and not lookup.spec.rules.scattered:
                    hits = lookup.find(keys, min(length + size, seen), drop=True)
                else:
                    hits = lookup.find(keys, length)
                hits_by_lookup[number] = hits
                shorter = hits[0].places * size < length
                length = hits[0].places * size
                self.longest = max(self.longest, length)
                if not length:
                    return NO_HIT
                if drop:
                    dropped.add(number)
                elif shorter:
                    dropped.clear()
            if length >= tokens:
                break
            tokens = length
            if self._simple:
                break
        return self._hit(tokens, hits_by_lookup)

    def _hit(self, tokens: int, hits_by_lookup: dict[int, list[TableHit]]) -> Hit:
        """What the lookups gave, cut to the length that all groups have."""
        if not tokens:
            return NO_HIT
        tables: list[TableHit] = [_NO_TABLE] * self._groups
        for number, lookup in enumerate(self._lookups):
            places = tokens // lookup.spec.block_size
            for group, table in zip(lookup.groups, hits_by_lookup[number], strict=True):
                if table.places > places:
                    table.cut(places)
                tables[group] = table
        return Hit(tokens, tuple(tables))

    def has_broken(self, hit: Hit) -> bool:
        """Whether some block of a hit is also that of a row that lacks another."""
        wide = [table for table in hit.tables if table.parts and table.parts[0][0].width > 1]
        for broken in self._pool.broken if wide else ():
            for table in wide:
                for extent, low, high in table.parts:
                    if extent.key != broken.key:
                        continue
                    first = extent.number + low * extent.units
                    last = extent.number + high * extent.units
                    if first < broken.end and broken.number < last:
                        return True
        return False
