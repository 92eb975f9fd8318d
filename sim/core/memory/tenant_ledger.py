"""Ledger of cached and evicted blocks by tenant."""

from __future__ import annotations

from collections import Counter


class TenantLedger:
    """Blocks by the tenant that computed them; shared public content belongs to the tenant "".

    `cached`: free blocks with content. `evicted_for`: content that was lost, by the pair of who took the
    block and who lost it. `taker` is the tenant that takes blocks now.
    """

    def __init__(self) -> None:
        self.cached: Counter[str] = Counter()
        self.evicted_for: Counter[tuple[str, str]] = Counter()
        self.taker = ""
        self._scrubbed = 0

    def evict(self, tenant: str, blocks: int) -> None:
        """Takes note of content that is lost."""
        self.cached[tenant] -= blocks
        self.evicted_for[self.taker, tenant] += blocks

    @property
    def evicted(self) -> Counter[str]:
        """Content that was lost, by who lost it."""
        lost: Counter[str] = Counter()
        for (_, tenant), blocks in self.evicted_for.items():
            lost[tenant] += blocks
        return lost

    @property
    def private_blocks(self) -> int:
        """Blocks evicted that some tenant had to itself."""
        return sum(blocks for tenant, blocks in self.evicted.items() if tenant)

    def to_scrub(self) -> int:
        """Private blocks evicted since this was last asked: to be overwritten before others get them."""
        private = self.private_blocks
        blocks = private - self._scrubbed
        self._scrubbed = private
        return blocks
