"""Orders of free blocks that are kept in stretches: extents of hybrid models, and the host tier's LRU."""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.core.events import EventLog
from pagecast.sim.core.memory.extent_pool import ExtentPool
from pagecast.sim.core.memory.table import Table
from pagecast.sim.core.request import Request
from pagecast.sim.core.tiers.host_blocks import HostBlocks

ROOM = 12
NOBODY = cast(Request, None)


def publish(pool: ExtentPool, table: Table, rows: int, number: int) -> None:
    """Takes blocks for a table and makes them findable from place `number` of a segment on."""
    table.add_rows(pool.take(rows), rows)
    pool.publish(table, rows, b"text", number, 1)


def test_of_equal_contents_the_next_is_found_once_the_first_is_evicted() -> None:
    pool = ExtentPool(8, EventLog(enabled=False))
    first = Table(pool.nothing)
    second = Table(pool.nothing)
    publish(pool, first, 3, 0)
    publish(pool, second, 3, 0)
    assert [extent.is_spare for extent in (*first.extents(), *second.extents())] == [False, True]
    pool.drop(first.extents(), pool.nothing)
    assert list(pool.take(3)) == [6, 7, 2]  # blocks without content, then the last of what is free
    assert [(extent.number, list(extent.blocks)) for extent in pool.index[b"text"]] == [
        (0, [0, 1]),
        (2, [5]),
    ]
    assert [(extent.number, list(extent.blocks)) for extent in pool.spares[b"text"]] == [(0, [3, 4])]


def test_an_extent_grows_only_while_one_table_holds_it() -> None:
    pool = ExtentPool(8, EventLog(enabled=False))
    table = Table(pool.nothing)
    publish(pool, table, 2, 0)
    publish(pool, table, 1, 2)
    (extent,) = table.extents()
    assert list(extent.blocks) == [0, 1, 2]
    pool.hold([extent])
    publish(pool, table, 1, 3)
    assert [list(each.blocks) for each in table.extents()] == [[0, 1, 2], [3]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("tdr"), st.integers(0, 5), st.integers(1, 6)), max_size=60))
def test_without_numbers_the_same_contents_are_evicted(steps: list[tuple[str, int, int]]) -> None:
    """`t`: a table takes rows with the content of a text; `d`: it gives all back; `r`: its first ones."""
    found = []
    for numbered in (True, False):
        pool = ExtentPool(24, EventLog(enabled=False), numbered=numbered)
        tables: dict[int, Table] = {}
        seen = []
        for step, text, rows in steps:
            table = tables.get(text)
            if step == "t" and rows <= pool.free_blocks:
                table = tables.setdefault(text, Table(pool.nothing))
                number = table.places
                table.add_rows(pool.take(rows), rows)
                pool.publish(table, rows, b"%d" % (text // 2), number, 1)
            elif step == "d" and table is not None:
                pool.drop(table.extents(), table.tail)
                del tables[text]
            elif step == "r" and table is not None:
                pool.drop_in_turn([(NOBODY, table, 0, min(table.nulls + rows, table.places))])
            seen.append((pool.free_blocks, pool.evicted_blocks))
        rows_left = sorted(
            (extent.key, number, extent.is_spare)
            for extent in pool.findable_extents()
            for number in range(extent.number, extent.end)
        )
        found.append((seen, rows_left))
    assert found[0] == found[1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("slp"), st.integers(0, 5), st.integers(1, 6)), max_size=60))
def test_host_blocks_give_way_in_the_order_of_their_last_use(steps: list[tuple[str, int, int]]) -> None:
    host = HostBlocks(ROOM)
    order: OrderedDict[int, None] = OrderedDict()
    for step, sequence, length in steps:
        names = [100 * sequence + i for i in range(length)]
        if step == "s":
            stored = set(names) & order.keys()
            new = [name for name in names if name not in stored]
            excess = len(order) + len(new) - ROOM
            victims = [name for name in order if name not in stored][: max(excess, 0)]
            assert host.reserve(names) == new
            for name in victims:
                del order[name]
            host.written(new)
            order |= dict.fromkeys(new)
        elif step == "l":
            host.touch(names)
            for name in reversed(names):
                if name in order:
                    order.move_to_end(name)
        elif leading := host.leading(names):
            host.pin(names[:leading])
            host.unpin(names[:leading])
            for name in names[:leading]:
                order.move_to_end(name)
        assert host.slots.keys() == order.keys()
