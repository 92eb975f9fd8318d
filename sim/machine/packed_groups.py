"""Groups of layers whose caches have pages of different sizes, packed side by side in a block.

vLLM plans so where sparse attention's caches lie beside others (`_get_packed_kv_cache_groups`, 0.33). Layers
that can share a block table form a bucket: full layers with one block size, windows of one length, states.
A bucket with as many layers of each page size is a repeated pattern; such buckets are split into groups of
about as many repeats. States are split so that a group fits the block that others need anyway.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from pagecast.sim.core.group_spec import GroupSpec, KvKind

_RETAINED = (KvKind.FULL, KvKind.LATENT)


@dataclass(frozen=True, slots=True)
class Pages:
    """`layers` layers that each put a page of `page_bytes` in a block of their group, of form `spec`."""

    spec: GroupSpec
    layers: int
    page_bytes: int

    @property
    def shares(self) -> tuple[object, ...]:
        """What layers must have in common to share a block table."""
        if self.spec.kind is KvKind.STATE:
            return KvKind.STATE, self.page_bytes
        kind = KvKind.FULL if self.spec.kind in _RETAINED else self.spec.kind
        return kind, self.spec.block_size, self.spec.window


@dataclass(slots=True)
class _Bucket:
    spec: GroupSpec
    by_page: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def repeats(self) -> int:
        return max(self.by_page.values())

    @property
    def balanced(self) -> bool:
        return len(set(self.by_page.values())) == 1

    @property
    def layers(self) -> int:
        return sum(self.by_page.values())

    def widest(self, groups: int) -> int:
        """Bytes of the largest of so many groups."""
        return sum(-(-layers // groups) * page for page, layers in self.by_page.items())


def packed_groups(pages: tuple[Pages, ...]) -> tuple[tuple[GroupSpec, ...], int]:
    """The groups' specifications, and the bytes of a block."""
    buckets: dict[tuple[object, ...], _Bucket] = {}
    for each in pages:
        buckets.setdefault(each.shares, _Bucket(each.spec)).by_page[each.page_bytes] += each.layers
    balanced = [bucket.repeats for bucket in buckets.values() if bucket.balanced]
    least = max((b.repeats for b in buckets.values() if b.balanced and len(b.by_page) > 1), default=0)
    repeats = _common_repeats(balanced, least) if least else 0

    def split(bucket: _Bucket) -> int:
        return -(-bucket.repeats // repeats) if bucket.balanced and repeats else 1

    def is_state(bucket: _Bucket) -> bool:
        return not bucket.spec.rules.grows or (not repeats and bucket.spec.kind is KvKind.WINDOW)

    anchor = max(b.widest(b.layers if is_state(b) else split(b)) for b in buckets.values())
    specs: list[GroupSpec] = []
    block_bytes = 0
    for bucket in buckets.values():
        groups = split(bucket)
        if is_state(bucket):
            in_a_block = max(anchor // next(iter(bucket.by_page)), 1)
            groups = max(groups, -(-bucket.layers // in_a_block))
        specs += [bucket.spec] * groups
        block_bytes = max(block_bytes, bucket.widest(groups))
    return tuple(specs), block_bytes


def _common_repeats(counts: list[int], least: int) -> int:
    """The number of repeats in a group for which the counts need the fewest repeats of padding."""
    sizes = range(least, max(counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))
