"""Watch over the layers of a hybrid model that keep every token, by the KV events of their groups.

A router's index holds prefixes, so it can follow only groups in which a block stays findable until it is
evicted. Dynamo's router drops the events of all other groups (windows, chunked local attention, recurrent
states), and so believes in prefixes whose windows are gone. Hashes name no group there: where several groups
keep every token, a block that one of them evicts counts as gone.

Source: ai-dynamo/dynamo, lib/kv-router/src/zmq_wire/filter.rs (`is_main_attention`), pull requests 8669 and
8751. TensorRT-LLM's publisher passes on the events of the largest window alone (pull request 2241).
"""

from __future__ import annotations

from collections.abc import Collection

from pagecast.sim.core.group_spec import GroupSpec
from pagecast.sim.core.kv_events import KvEventStream
from pagecast.sim.core.memory.lookup import segment_of
from pagecast.sim.core.memory.pool import Watcher
from pagecast.sim.core.request import Request


class GroupWatch(KvEventStream):
    """Tells a watcher what some KV groups store and evict; `groups` are their numbers.

    Their blocks have one key each. No events are kept.
    """

    def __init__(self, watcher: Watcher, groups: Collection[int]) -> None:
        super().__init__()
        self._watcher = watcher
        self._groups = frozenset(groups)
        self._findable: dict[int, tuple[bytes, int]] = {}  # by block: its segment's key, and its number

    def stored(
        self,
        request: Request,
        first: int,
        last: int,
        places: list[int],
        blocks: list[int],
        group: int,
        spec: GroupSpec,
    ) -> None:
        """As `KvEventStream.stored`."""
        if group not in self._groups:
            return
        keys = request.keys
        done = 0
        while done < len(places):
            begin = places[done]
            segment = segment_of(keys, begin)
            key = keys.digests[segment]
            end = min(keys.ends[segment], places[-1] + 1)
            for place in range(begin, end):
                self._findable[blocks[done]] = (key, place)
                done += 1
            self._watcher.stored(key, begin, end)

    def named(self, request: Request, key: int, block: int, group: int, spec: GroupSpec) -> None:
        """Nothing: no hit asks for a block by such a name."""

    def renamed(self, block: int) -> None:
        """As for `named`."""

    def removed(self, blocks: list[int]) -> None:
        """As `KvEventStream.removed`."""
        for block in blocks:
            content = self._findable.pop(block, None)
            if content is not None:
                key, place = content
                self._watcher.removed(key, place, place + 1)

    def cleared(self) -> None:
        """As `KvEventStream.cleared`."""
        self.removed(list(self._findable))

    def offloaded(self, content: bytes, group: int) -> None:
        """Leaves content of another tier out."""

    def left_host(self, contents: list[tuple[bytes, int]]) -> None:
        """Leaves content of another tier out."""
