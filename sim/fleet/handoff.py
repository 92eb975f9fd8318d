"""A request between prefill and decode: what stands for its blocks, and the links that carry them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pagecast.sim.core.request import NEVER, Request
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replica.arrivals import NS

T = TypeVar("T")  # a replica


class HandoffFeed(Feed):
    """Requests of one replica that prefills or decodes for others.

    Rows in `one_token` end with their first token; rows in `first_tokens` got theirs elsewhere, at that time.
    `requests` keeps the requests made, by row.
    """

    def __init__(self, feed: Feed) -> None:
        self.__dict__.update(feed.__dict__)
        self.one_token: set[int] = set()
        self.first_tokens: dict[int, int] = {}
        self.requests: dict[int, Request] = {}

    def request(self, row: int, arrival_ns: int) -> Request:
        """As `Feed.request`."""
        request = super().request(row, arrival_ns)
        if row in self.one_token:
            request.output_tokens = 1
        request.first_token_ns = self.first_tokens.get(row, NEVER)
        self.requests[row] = request
        return request


@dataclass
class Handoff(Generic[T]):
    """A request on its way from prefill to decode. Times in nanoseconds."""

    row: int
    prefill: T
    decode: T
    source_holder: Request | None = None  # stands for P's blocks while they are read
    target_holder: Request | None = None  # stands for D's blocks while they are written
    ready_ns: int = 0  # P has the prompt
    start_ns: int = 0  # the transfer begins
    end_ns: int = 0  # ... and ends
    landed_ns: int = 0  # D sees that it has ended
    moved_bytes: int = 0
    is_cancelled: bool = False
    is_decoding: bool = False
    gave_first_token: bool = False  # P's first token is the one that the client gets


@dataclass
class Tasks(Generic[T]):
    """Handoffs that a replica looks at between its steps."""

    waiting: deque[Handoff[T]] = field(default_factory=deque)  # at D: those without room yet, in order
    landing: deque[Handoff[T]] = field(default_factory=deque)  # at D: those whose transfer has ended
    read: deque[Handoff[T]] = field(default_factory=deque)  # at P: those whose blocks have been read


@dataclass
class Ports:
    """When each replica's link is free: one transfer at a time in each direction."""

    bytes_per_s: float
    latency_ns: int
    out_ns: dict[int, int] = field(default_factory=dict)
    in_ns: dict[int, int] = field(default_factory=dict)

    def carry(self, source: int, target: int, size: int, now: int) -> tuple[int, int]:
        """Begin and end of a transfer that is asked for at `now`."""
        begin = max(now, self.out_ns.get(source, 0), self.in_ns.get(target, 0))
        end = begin + self.latency_ns + round(size / self.bytes_per_s * NS)
        self.out_ns[source] = self.in_ns[target] = end
        return begin, end
