"""Invariant checks: every block, count and index entry accounted for."""

from __future__ import annotations

from collections import Counter
from functools import singledispatch
from itertools import pairwise

from pagecast.sim.core.check_tiers import check_tiers
from pagecast.sim.core.engines.sglang.memory import RadixMemory
from pagecast.sim.core.group_spec import GroupSpec
from pagecast.sim.core.invariant import hold as _hold
from pagecast.sim.core.memory.extent import Extent
from pagecast.sim.core.memory.extent_pool import ExtentPool
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.memory.table import Table
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.scheduler import Scheduler


class Checker:
    """Checks a scheduler as it runs: cheap invariants every step, all of them every `every` steps."""

    def __init__(self, scheduler: Scheduler, every: int = 1000) -> None:
        self.scheduler = scheduler
        self.every = every
        self.checks = 0
        self._steps = 0

    def after_step(self) -> None:
        """To be called after each commit."""
        self._steps += 1
        check_counts(self.scheduler)
        if self._steps % self.every == 0:
            check(self.scheduler)
            self.checks += 1


def check_counts(s: Scheduler) -> None:
    """O(1): the counts agree with each other. Errors: `InvariantError`."""
    free = s.memory.free_blocks
    running, queue = s.running, s.queue
    _hold(0 <= free <= s.limits.num_blocks, f"{free} free blocks of {s.limits.num_blocks}")
    live = len(running.requests) + len(queue) + s.lifecycle.coming
    _hold(live == len(s.requests), f"{live} requests running or waiting, {len(s.requests)} live")
    flying = len(running.in_flight)
    _hold(flying <= s.limits.pipeline_depth + 1, f"{flying} plans in flight")
    held = bool(s.requests) or (s.offloading is not None and s.offloading.keeps_blocks)
    _hold(held or free == s.limits.num_blocks, "blocks are held while no request lives")


def check(s: Scheduler) -> None:
    """Everything, in time linear in blocks and requests. Changes nothing. Errors: `InvariantError`.

    Each block is in one extent, held or free; holders are counted right; each extent with content is in the
    index under its key and nothing else is; parents and children agree;
    running requests have the blocks that their position needs; host slots and pins are those of contents and
    of jobs under way.
    """
    check_counts(s)
    memory = s.memory
    check_memory(memory, s)
    if s.offloading is not None:
        check_tiers(s.offloading)
    # A request that has loaded may hold what the first in the queue needs (as in vLLM).
    holds = s.offloading is not None and (s.offloading.holders or s.offloading.keeps_blocks)
    stuck = s.queue.size and not s.running.requests and s.queue.blocked and not holds
    _hold(not stuck, "the queue is blocked and nothing runs")


@singledispatch
def check_memory(memory: Memory, s: Scheduler) -> None:
    """Checks what is behind the door. Each kind of memory has its own check; others have none."""


@check_memory.register
def _check_radix(memory: RadixMemory, s: Scheduler) -> None:
    tree = memory.tree
    evictable = locked = 0
    for node in tree:
        _hold(node.parent is not None and node.start == node.parent.end, "a node does not follow its parent")
        _hold(bool(node.pieces) and node.pieces[-1][1] == node.end, "a node's segments do not cover it")
        _hold(node.pages > 0, "a node is empty")
        if node.locks:
            locked += node.pages
        else:
            evictable += node.pages
            free = all(not child.locks for child in node.children.values())
            _hold(free, "a locked node follows one that may be evicted")
    _hold((evictable, locked) == (tree.evictable, tree.locked), "evictable or locked pages are counted wrong")
    owned = shared = 0
    for request, held in memory.held.items():
        _hold(request.alive, f"{request!r} has ended and holds pages")
        _hold(held.shared <= held.node.end, f"{request!r} has locked less than it shares")
        tokens = s.running.planned(request)
        owned += max(held.pages, -(-tokens // memory.block_size)) - held.shared
        shared += held.shared
    _hold(memory.free >= 0, f"{memory.free} pages are free")
    pages = memory.free + evictable + locked + owned
    _hold(pages == memory.num_blocks, f"{pages} pages are free, cached or owned, of {memory.num_blocks}")
    _hold((shared - locked) * memory.block_size == memory.shared_tokens(), "shared pages are counted wrong")


@check_memory.register
def _check_blocks(memory: KvMemory, s: Scheduler) -> None:
    pool = memory.pool
    holders: Counter[Extent] = Counter()
    tails: list[int] = []
    entries = 0
    for request in memory.tables:
        _check_holder(s, request)
        for group, table in zip(memory.groups, memory.tables_of(request), strict=True):
            extents = table.extents()
            holders.update(extents)
            tails += table.tail
            for column in range(group.width):
                blocks = table.blocks(column)
                entries += len(blocks)
                if not group.scattered:
                    whole_table = table.nulls + len(blocks) == table.places
                    _hold(whole_table, f"{request!r} has places without a block")
                _hold(len(set(blocks)) == len(blocks), f"{request!r} holds a block twice")
            if request in s.running.requests:
                _check_table(s, request, table, group.spec)
    for table in memory.detached_tables:
        holders.update(table.extents())
        tails += table.tail
        entries += sum(length * extent.width for extent, length in table.held) + len(table.tail)
    _hold(all(extent.holders == count for extent, count in holders.items()), "holders are counted wrong")
    held = [*tails]
    for extent in holders:
        held += extent.blocks[len(extent.free_rows) * extent.width :]
    free = list(pool.free_order())
    whole = {extent for extent in pool.free_extents() if not extent.holders}
    given_back = {extent for extent in pool.free_extents() if extent.holders}
    _hold(all(extent.free_rows for extent in given_back), "a free extent has a holder")
    _hold(len(free) == pool.free_blocks, f"{len(free)} free blocks, {pool.free_blocks} counted")
    _hold(sorted(held + free) == list(range(pool.num_blocks)), "a block is lost, or in two places")
    shared = sum(group.shared_blocks for group in memory.groups)
    _hold(shared == entries - memory.used_blocks, f"{shared} shared blocks, {entries} in all tables")
    _check_extents(pool, [*holders, *whole])
    if pool.ledger is not None:
        cached: Counter[str] = Counter()
        for extent in whole:
            if extent.key is not None:
                cached[extent.tenant] += len(extent.blocks)
        _hold(+pool.ledger.cached == cached, "what is cached of each tenant is counted wrong")


def _check_holder(s: Scheduler, request: Request) -> None:
    loads = s.offloading is not None and s.offloading.is_abandoned(request)
    _hold(request.alive or loads, f"{request!r} has ended and holds blocks")


def _check_table(s: Scheduler, request: Request, table: Table, spec: GroupSpec) -> None:
    tokens = _expected_tokens(s, request)
    enough = table.places >= spec.blocks_of(tokens)
    _hold(enough, f"{request!r} holds {table.places} blocks for {tokens} tokens")
    skippable = spec.skipped_blocks(tokens + spec.window % spec.block_size)
    _hold(table.nulls <= skippable, f"{request!r} has left blocks that its next token reads")


def _check_extents(pool: ExtentPool, extents: list[Extent]) -> None:
    """Those with content are in the index, once, and nothing else is."""
    indexed = list(pool.findable_extents())
    _hold(all(extent.blocks for extent in indexed), "an empty extent is still in the index")
    _hold(len(indexed) == len(set(indexed)), "an extent is indexed twice")
    _hold(set(indexed) == {extent for extent in extents if extent.key is not None}, "the index is wrong")
    for extent in indexed:
        _check_family(extent)
    for key, siblings in pool.index.items():
        _hold(all(each.key == key and not each.is_spare for each in siblings), "an entry has another content")
        ordered = all(one.end <= other.number for one, other in pairwise(siblings))
        _hold(ordered, "extents of a segment overlap")
    for key, spares in pool.spares.items():
        known = {number for each in pool.index[key] for number in range(each.number, each.end, each.units)}
        for each in spares:
            _hold(each.key == key and each.is_spare, "a spare has another content")
            numbers = range(each.number, each.end, each.units)
            _hold(known.issuperset(numbers), "a spare is not found in the place of another")


def _check_family(extent: Extent) -> None:
    for child in extent.children or ():
        _hold(child.parent is extent, "a child has another parent")
        _hold(extent.number < child.number <= extent.end, "a child does not follow its parent's blocks")
    if extent.parent is not None:
        _hold(extent in (extent.parent.children or ()), "a parent does not know its child")


def _expected_tokens(s: Scheduler, request: Request) -> int:
    """Tokens for which a request should have blocks."""
    if not s.memory.holds(request):
        return 0
    if request.state is State.PREFILL and s.profile.whole_prompt:
        return request.known_tokens
    return s.running.planned(request)
