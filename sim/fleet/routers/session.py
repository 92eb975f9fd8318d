"""Session affinity: a hash ring of replicas, so that a session stays where it began."""

from __future__ import annotations

from bisect import bisect_right
from random import Random

import xxhash
from pagecast.sim.fleet.query import Query
from pagecast.sim.fleet.routers.router import Choice, StatelessRouter, fewest_requests
from pagecast.sim.fleet.view import View, Views


def _place(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


class HashRing:
    """Names on a ring: a key belongs to the next name. A name that comes or goes moves few keys.

    `points`: places of each name on the ring.
    """

    def __init__(self, points: int = 160) -> None:
        self.points = points
        self._names: tuple[str, ...] = ()
        self._places: list[int] = []
        self._owners: list[int] = []

    def owner(self, key: str, names: tuple[str, ...]) -> int:
        """The position in `names` of the one that a key belongs to."""
        if names != self._names:
            self._build(names)
        at = bisect_right(self._places, _place(key))
        return self._owners[at % len(self._owners)]

    def _build(self, names: tuple[str, ...]) -> None:
        places = sorted(
            (_place(f"{name}#{point}"), position)
            for position, name in enumerate(names)
            for point in range(self.points)
        )
        self._names = names
        self._places = [place for place, _ in places]
        self._owners = [position for _, position in places]


class SessionAffinity(StatelessRouter):
    """Requests of one session go to one replica; those without a session to the least loaded one."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._ring = HashRing()
        self._views: list[View] = []
        self._names: tuple[str, ...] = ()

    def choose(self, query: Query, views: Views) -> Choice:
        """The session's replica on the ring."""
        if query.session is None:
            return Choice(fewest_requests(views, self._rng))
        if self._views != views:
            self._views = list(views)
            self._names = tuple(view.name for view in views)
        return Choice(views[self._ring.owner(query.session, self._names)])
