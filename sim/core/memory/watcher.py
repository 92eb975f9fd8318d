"""Watchers: those who hear which content can be found, as a router's index does."""

from __future__ import annotations

from typing import Protocol


class Watcher(Protocol):
    """Hears which content can be found: blocks `begin` to `end` of the segment that has the key `key`."""

    def stored(self, key: bytes, begin: int, end: int) -> None:
        """These blocks can be found from now on."""

    def removed(self, key: bytes, begin: int, end: int) -> None:
        """These blocks can no longer be found, or one copy of them less."""
