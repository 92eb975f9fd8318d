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

    def evict(self, tenant: str, blocks: int) -> None:
        """Takes note of content that is lost."""
        self.cached[tenant] -= blocks
        self.evicted[tenant] += blocks
        self.evicted_for[self.taker, tenant] += blocks
