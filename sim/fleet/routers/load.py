"""Routers by load alone: round robin, random, least loaded, and the better of two."""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter
from random import Random

from pagecast.sim.fleet.query import Query
from pagecast.sim.fleet.routers.router import Choice, StatelessRouter, fewest_requests
from pagecast.sim.fleet.view import Views

_NUMBER = attrgetter("number")


class RoundRobin(StatelessRouter):
    """One replica after the other."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, query: Query, views: Views) -> Choice:
        """The ready replica with the next number."""
        chosen = views[bisect_right(views, self._last, key=_NUMBER) % len(views)]
        self._last = chosen.number
        return Choice(chosen)


class Randomly(StatelessRouter):
    """Any replica, with equal chances."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, query: Query, views: Views) -> Choice:
        """A replica at random."""
        return Choice(self._rng.choice(views))


class LeastLoaded(StatelessRouter):
    """The replica with the fewest requests in flight, as the router counts them."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, query: Query, views: Views) -> Choice:
        """The least loaded replica; of equals one at random."""
        return Choice(fewest_requests(views, self._rng))


class PowerOfTwo(StatelessRouter):
    """The less loaded of two replicas drawn at random."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, query: Query, views: Views) -> Choice:
        """Of two different replicas, the one with fewer requests in flight."""
        if len(views) == 1:
            return Choice(views[0])
        first, second = self._rng.sample(views, 2)
        return Choice(second if second.requests < first.requests else first)
