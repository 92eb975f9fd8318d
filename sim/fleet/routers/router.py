"""Router protocol: the choice of a replica for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from random import Random
from typing import NamedTuple, Protocol

from pagecast.sim.fleet.index.known import KnownPrefixes
from pagecast.sim.fleet.query import Query
from pagecast.sim.fleet.view import View, Views

_REQUESTS = attrgetter("requests")


class Choice(NamedTuple):
    """The replica chosen, and how many prompt tokens the router believes it has cached."""

    view: View
    cached_tokens: int = 0


class Router(Protocol):
    """Chooses replicas. `views` are those that take requests now: at least one, ordered by number.

    A router reads queries, views and what it has kept itself, and nothing else of the fleet.
    """

    def choose(self, query: Query, views: Views) -> Choice:
        """The replica that gets the request."""
        ...

    def on_dispatch(self, query: Query, view: View) -> None:
        """The request is on its way there; the view counts it already."""

    def on_end(self, row: int, view: View, now: int, output_tokens: int) -> None:
        """A request has ended there with so many tokens, whichever way; the view no longer counts it."""

    def on_leave(self, view: View) -> None:
        """A replica has gone, and all that it had cached."""


class StatelessRouter:
    """A router that keeps nothing: a base for those that do not need all calls."""

    def on_dispatch(self, query: Query, view: View) -> None:
        """As `Router.on_dispatch`."""

    def on_end(self, row: int, view: View, now: int, output_tokens: int) -> None:
        """As `Router.on_end`."""

    def on_leave(self, view: View) -> None:
        """As `Router.on_leave`."""


class PrefixRouter:
    """A router that keeps an index of prefixes, which has what was sent to a replica until that leaves.

    `choose` is left to the router. `rng` breaks ties.
    """

    def __init__(self, prefixes: KnownPrefixes, rng: Random) -> None:
        self._prefixes = prefixes
        self._rng = rng

    def on_dispatch(self, query: Query, view: View) -> None:
        """The replica will have the prompt."""
        self._prefixes.add(query, view.number)

    def on_end(self, row: int, view: View, now: int, output_tokens: int) -> None:
        """As `Router.on_end`."""

    def on_leave(self, view: View) -> None:
        """As `Router.on_leave`."""
        self._prefixes.forget(view.number)


def lowest(views: Sequence[View], key: Callable[[View], float], rng: Random) -> View:
    """The view with the least key; of equals one at random."""
    best: list[View] = []
    least = float("inf")
    for view in views:
        value = key(view)
        if value < least:
            least = value
            best = [view]
        elif value == least:
            best.append(view)
    return best[0] if len(best) == 1 else rng.choice(best)


def longest_prefix(views: Views, overlaps: dict[int, int]) -> tuple[int, list[View]]:
    """The longest overlap in blocks, and the views that have it: all of them where it is 0."""
    blocks = [overlaps.get(view.number, 0) for view in views]
    longest = max(blocks)
    return longest, [view for view, count in zip(views, blocks, strict=True) if count == longest]


def fewest_requests(views: Views, rng: Random) -> View:
    """The view with the fewest requests in flight; of equals one at random."""
    requests = list(map(_REQUESTS, views))
    least = min(requests)
    if requests.count(least) == 1:
        return views[requests.index(least)]
    return rng.choice([view for view, count in zip(views, requests, strict=True) if count == least])
