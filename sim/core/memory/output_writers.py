"""Output writers: the requests that generate, by the content that they write.

While only one request writes a content, its full blocks need not be published step by step: that is made up
for when somebody may look for them, or publishes the same content. Of several that write the same, the one
that fills a block first is found: these rivals publish step by step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.request import Request


class OutputWriters:
    """Generating requests by the key of their last segment, those with token ids left out.

    `rivals`: how many segments have several of them.
    """

    def __init__(self) -> None:
        self.rivals = 0
        self._by_digest: dict[bytes, list[Request]] = {}

    def add(self, request: Request) -> None:
        """Takes note that a request generates from now on."""
        if request.keys.explicit:
            return
        digest = request.keys.digests[-1]
        writers = self._by_digest.get(digest)
        if writers is None:
            self._by_digest[digest] = [request]
        elif request not in writers:
            writers.append(request)
            self.rivals += len(writers) == 2

    def remove(self, request: Request) -> None:
        """Takes note that a request generates no more, if it did."""
        if request.keys.explicit:
            return
        digest = request.keys.digests[-1]
        writers = self._by_digest.get(digest)
        if writers is None or request not in writers:
            return
        writers.remove(request)
        self.rivals -= len(writers) == 1
        if not writers:
            del self._by_digest[digest]

    def write(self, request: Request) -> bool:
        """Whether a request is among them."""
        return not request.keys.explicit and request in self._by_digest.get(request.keys.digests[-1], ())

    def __iter__(self) -> Iterator[Request]:
        for writers in self._by_digest.values():
            yield from writers

    def may_write(self, keys: BlockKeys) -> bool:
        """Whether one of them writes content of a sequence."""
        return bool(self._by_digest) and not self._by_digest.keys().isdisjoint(keys.digests)

    def others_write(self, request: Request) -> bool:
        """Whether others of them than a request itself write content of its sequence."""
        writers = self._by_digest
        keys = request.keys
        if not writers or writers.keys().isdisjoint(keys.digests):
            return False
        if keys.explicit:
            return True
        own = writers.get(keys.digests[-1])
        if own is None or len(own) > 1 or own[0] is not request:
            return True
        return not writers.keys().isdisjoint(keys.digests[:-1])

    def quoted(self, requests: Iterable[Request]) -> bool:
        """Whether one of them writes content of one of these requests."""
        writers = self._by_digest
        return any(not writers.keys().isdisjoint(request.keys.digests) for request in requests)

    def of(self, keys: BlockKeys) -> list[Request]:
        """Those that write content of a sequence."""
        return [request for digest in keys.digests for request in self._by_digest.get(digest, ())]
