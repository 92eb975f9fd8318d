"""Radix tree of cached prefixes: SGLang's way to keep KV that nobody computes with now.

A node holds consecutive pages of a sequence; its children hold what follows them. A path is locked while a
request computes with it. Leaves that nobody locks are evicted whole, in an
`EvictionOrder`.

    root --[ 0 1 2 3 ]--+--[ 4 5 6 ]      one prompt of seven pages
                        +--[ 4 5 ]        another that shares its first four

Pages are named by the keys of their segments (`identity.keys`), so a match costs O(segments), not O(tokens).
Nodes are split where sequences part, and where somebody stops to look.

Source: SGLang 0.5.23, srt/mem_cache/unified_cache/unified_tree_core.py and evict_policy.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.memory.eviction_orders import LEAF_ORDERS, NO_SETTINGS, ORDERS, EvictionOrder

_PATH = 1 << 20  # times of one match: the deepest node is the newest, each parent a moment older
_STALE = 1000  # outdated entries of the eviction order that are put up with


class Node:
    """Pages `start` to `end` of the sequences that pass through it: the `Content` that eviction orders rank.

    `pieces` are its segments as (digest, page after the last). `locks` counts the requests that hold it.
    `used` and `made` are times of the tree's own clock, `uses` how many requests have inserted it beside the
    first.
    """

    __slots__ = (
        "children",
        "end",
        "locks",
        "made",
        "parent",
        "pieces",
        "priority",
        "start",
        "used",
        "uses",
    )

    def __init__(self, parent: Node | None, start: int, end: int, pieces: list[tuple[bytes, int]]) -> None:
        self.parent = parent
        self.start = start
        self.end = end
        self.pieces = pieces
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.used = 0
        self.made = 0
        self.uses = -1
        self.priority = 0

    @property
    def pages(self) -> int:
        """How many pages it holds."""
        return self.end - self.start


class Match(NamedTuple):
    """A cached prefix of `pages` pages, which ends with `node`."""

    node: Node
    pages: int


class Inserted(NamedTuple):
    """Result of an insertion: it ends at `node`; `freed` of its pages were in the tree already."""

    node: Node
    freed: int


def leaf_order(name: str) -> EvictionOrder:
    """The order of that name. Errors: BadInput, with the names there are."""
    if name not in LEAF_ORDERS:
        raise BadInput(f"radix eviction policy {name!r} is not known; choose one of {', '.join(LEAF_ORDERS)}")
    return ORDERS[name](NO_SETTINGS)


class RadixTree:
    """Cached prefixes in pages. `evictable` pages are locked by nobody, `locked` ones by somebody."""

    def __init__(self, order: EvictionOrder) -> None:
        self.root = Node(None, 0, 0, [])
        self.evictable = 0
        self.locked = 0
        self._order = order
        self._clock = 0
        # Level, last use, number of the entry. An entry whose level or last use is not the node's is stale.
        self._heap: list[tuple[float, int, int, Node]] = []
        self._entries = 0
        self._nodes = 0

    def __iter__(self) -> Iterator[Node]:
        """All nodes but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    # ---- looking up

    def match(self, keys: BlockKeys, pages: int) -> Match:
        """The longest cached prefix of at most so many pages. Everything on its path counts as just used."""
        node = self.root
        if not pages:
            return Match(node, 0)  # nothing to look for: nothing is touched
        position = segment = 0
        digests, ends = keys.digests, keys.ends
        while position < pages:
            while ends[segment] <= position:
                segment += 1
            child = node.children.get(digests[segment])
            if child is None:
                break
            end = _common(child, keys, segment, pages)
            node = child if end == child.end else self._split(child, end)
            position = end
            if node is not child:
                break
        self._touch_path(node)
        return Match(node, position)

    def _touch_path(self, node: Node) -> None:
        self._clock += 1
        time = self._clock * _PATH
        current: Node | None = node
        while current is not None:
            current.used = time
            time -= 1
            self._rank(current)
            current = current.parent

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock * _PATH
        self._rank(node)

    def _split(self, child: Node, end: int) -> Node:
        """Cuts a node in two before page `end`; returns the first part. The second counts as just used."""
        parent = child.parent
        assert parent is not None
        first, rest = _cut(child.pieces, end)
        node = Node(parent, child.start, end, first)
        parent.children[first[0][0]] = node
        node.children[rest[0][0]] = child
        node.locks, node.uses = child.locks, child.uses
        node.made, node.priority = child.made, child.priority
        child.parent, child.start, child.pieces = node, end, rest
        self._nodes += 1
        self._clock += 2
        node.used = (self._clock - 1) * _PATH
        self._touch(child)
        return node

    # ---- inserting

    def insert(self, keys: BlockKeys, pages: int, own: int, counted: int, priority: int = 0) -> Inserted:
        """Takes over the first `pages` pages of a sequence.

        From page `own` on they are the caller's; those that are in the tree already are duplicates, which the
        caller gives back. The caller has inserted `counted` pages before: nodes within them have had its hit.
        """
        node = self.root
        self._touch(node)
        node.priority = max(node.priority, priority)
        position = segment = freed = 0
        digests, ends = keys.digests, keys.ends
        while position < pages:
            while ends[segment] <= position:
                segment += 1
            child = node.children.get(digests[segment])
            if child is None:
                break
            self._touch(child)
            end = _common(child, keys, segment, pages)
            node = child if end == child.end else self._split(child, end)
            node.priority = max(node.priority, priority)
            freed += max(end - max(own, position), 0)
            position = end
            if position > counted:
                node.uses += 1
                self._rank(node)
        if position < pages:
            node = self._add(node, keys, position, pages, priority)
            if pages > counted:
                node.uses += 1
                self._rank(node)
        return Inserted(node, freed)

    def _add(self, parent: Node, keys: BlockKeys, start: int, end: int, priority: int) -> Node:
        pieces = []
        for digest, last in zip(keys.digests, keys.ends, strict=True):
            if last > start:
                pieces.append((digest, min(last, end)))
            if last >= end:
                break
        node = Node(parent, start, end, pieces)
        self._clock += 1
        node.made = self._clock
        node.priority = priority
        parent.children[pieces[0][0]] = node
        self._nodes += 1
        self.evictable += end - start
        self._touch(node)
        return node

    # ---- locking

    def lock(self, node: Node) -> None:
        """Keeps a node and all before it from being evicted."""
        current = node
        while current.parent is not None:
            if not current.locks:
                pages = current.end - current.start
                self.evictable -= pages
                self.locked += pages
            current.locks += 1
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Takes one lock back."""
        current = node
        while current.parent is not None:
            current.locks -= 1
            if not current.locks:
                pages = current.end - current.start
                self.evictable += pages
                self.locked -= pages
                self._rank(current)
            current = current.parent

    def unlocked_pages(self, node: Node) -> int:
        """How many pages would be evictable no longer if a node were locked."""
        pages = 0
        current = node
        while current.parent is not None:
            if not current.locks:
                pages += current.end - current.start
            current = current.parent
        return pages

    # ---- evicting

    def evict(self) -> Node | None:
        """Takes the next leaf out of the tree; None where every leaf is locked."""
        heap = self._heap
        while heap:
            level, used, _, node = heapq.heappop(heap)
            parent = node.parent
            if parent is None or node.children or node.locks or used != node.used:
                continue
            if level != self._order.level(node):
                continue
            del parent.children[node.pieces[0][0]]
            node.parent = None
            self._nodes -= 1
            self.evictable -= node.end - node.start
            self._rank(parent)
            return node
        return None

    def _rank(self, node: Node) -> None:
        """Puts a leaf that may be evicted in its place in the order; what it had before is forgotten."""
        if node.children or node.locks or node.parent is None:
            return
        self._entries += 1
        heapq.heappush(self._heap, (self._order.level(node), node.used, self._entries, node))
        if len(self._heap) > _STALE + 8 * self._nodes:
            self._rebuild()

    def _rebuild(self) -> None:
        leaves = [node for node in self if not node.children and not node.locks]
        level = self._order.level
        self._heap = [(level(node), node.used, number, node) for number, node in enumerate(leaves)]
        heapq.heapify(self._heap)


def _common(node: Node, keys: BlockKeys, segment: int, pages: int) -> int:
    """The page up to which a node and a sequence agree, from the node's first page, which they share."""
    digests, ends = keys.digests, keys.ends
    pieces = node.pieces
    position = node.start
    last = min(node.end, pages)
    piece = 0
    while position < last:
        digest, end = pieces[piece]
        if digest != digests[segment]:
            break
        position = min(end, ends[segment], last)
        if position == end:
            piece += 1
        if position == ends[segment]:
            segment += 1
    return position


def _cut(pieces: list[tuple[bytes, int]], at: int) -> tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]]:
    """The pieces before a page, and those after it."""
    first, rest = [], []
    start = 0
    for digest, end in pieces:
        if start < at:
            first.append((digest, min(end, at)))
        if end > at:
            rest.append((digest, end))
        start = end
    return first, rest
