"""Orders of free blocks that are kept in stretches: extents of hybrid models, and the host tier's LRU."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.core.events import EventLog
from pagecast.sim.core.memory.extent_pool import ExtentPool
from pagecast.sim.core.tiers.host_blocks import HostBlocks

ROOM = 12


def test_of_equal_contents_the_next_is_found_once_the_first_is_evicted() -> None:
    pool = ExtentPool(8, EventLog(enabled=False))
    first = pool.publish(pool.take(3), b"text", 0, 1, None)
    second = pool.publish(pool.take(3), b"text", 0, 1, None)
    assert [extent.is_spare for extent in (*first, *second)] == [False, True]
    pool.drop(first, pool.no_blocks())
    assert list(pool.take(3)) == [6, 7, 2]  # blocks without content, then the last of what is free
    assert [(extent.number, list(extent.blocks)) for extent in pool.index[b"text"]] == [
        (0, [0, 1]),
        (2, [5]),
    ]
    assert [(extent.number, list(extent.blocks)) for extent in pool.spares[b"text"]] == [(0, [3, 4])]


def test_an_extent_grows_only_while_one_table_holds_it() -> None:
    pool = ExtentPool(8, EventLog(enabled=False))
    (extent,) = pool.publish(pool.take(2), b"text", 0, 1, None)
    assert pool.publish(pool.take(1), b"text", 2, 1, extent) == []
    assert list(extent.blocks) == [0, 1, 2]
    pool.hold([extent])
    (further,) = pool.publish(pool.take(1), b"text", 3, 1, extent)
    assert (list(extent.blocks), list(further.blocks)) == ([0, 1, 2], [3])


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
