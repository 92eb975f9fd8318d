"""Ledger of cached and evicted blocks by tenant."""

from __future__ import annotations

from collections import Counter


class TenantLedger:
    """Blocks by the tenant that computed them; shared public content belongs to the tenant "".

    `cached`: free blocks with content. `evicted`: content that was lost. `evicted_for`: the same by the pair
    of who took the block and who lost it. `taker` is the tenant that takes blocks now.
    """

    def __init__(self) -> None:
        self.cached: Counter[str] = Counter()
        self.evicted: Counter[str] = Counter()
        self.evicted_for: Counter[tuple[str, str]] = Counter()
        self.taker = ""
        self.private_blocks = 0  # of those evicted, what some tenant had to itself
        self._scrubbed = 0

    def evict(self, tenant: str, blocks: int) -> None:
        """Takes note of content that is lost."""
        self.cached[tenant] -= blocks
        self.evicted[tenant] += blocks
        self.evicted_for[self.taker, tenant] += blocks
        if tenant:
            self.private_blocks += blocks

    def to_scrub(self) -> int:
        """Private blocks evicted since this was last asked: to be overwritten before others get them."""
        blocks = self.private_blocks - self._scrubbed
        self._scrubbed = self.private_blocks
        return blocks
