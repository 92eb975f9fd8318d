"""Garbage collection for many small objects, few of which point at each other in circles."""

from __future__ import annotations

import gc

# Objects made, and collections of the young and of the middle generation, before the next older one is
# looked through. Python's own (700, 10, 10) take a tenth of a replay's time.
_SELDOM = (50_000, 20, 10)


def collect_seldom() -> None:
    """Lets the collector of this process run seldom: replays free what they make without it."""
    gc.set_threshold(*_SELDOM)
