"""Prefix indexes of routers: they equal plain ones that keep block by block."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.fleet.index.approximate import ApproximateIndex
from pagecast.sim.fleet.index.events import EventIndex

# Prompts: a shared beginning A, then one of two branches.
PROMPTS = st.tuples(st.integers(1, 6), st.sampled_from([b"x", b"y", b""]), st.integers(0, 5))


def path_of(prompt):
    first, branch, more = prompt
    path = [(b"a", 0, first)]
    if branch and more:
        path.append((branch + bytes([first]), first, first + more))
    return path


def blocks_of(path):
    return [(key, block) for key, begin, end in path for block in range(begin, end)]


class BlockByBlock:
    """An LRU list of blocks for each replica, filled from the prompt's start or from its end."""

    def __init__(self, capacity, ttl, leaf_first):
        self.capacity, self.ttl, self.leaf_first = capacity, ttl, leaf_first
        self.blocks = {}

    def add(self, replica, path, now):
        kept = self.blocks.setdefault(replica, OrderedDict())
        listed = blocks_of(path)
        for block in reversed(listed) if self.leaf_first else listed:
            kept[block] = now
            kept.move_to_end(block)
        while len(kept) > self.capacity:
            kept.popitem(last=False)

    def overlaps(self, path, now):
        found = {}
        for replica, kept in self.blocks.items():
            n = 0
            for block in blocks_of(path):
                if kept.get(block, -(10**9)) < now - self.ttl:
                    break
                n += 1
            if n:
                found[replica] = n
        return found


@given(
    st.lists(st.tuples(st.integers(0, 2), PROMPTS), max_size=40),
    st.integers(4, 14),
    st.sampled_from([3, 10**6]),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_an_approximate_index_equals_an_lru_list_of_blocks(sent, capacity, ttl, leaf_first):
    index = ApproximateIndex(capacity=capacity, ttl_ns=ttl, leaf_first=leaf_first)
    plain = BlockByBlock(capacity, ttl, leaf_first)
    for now, (replica, prompt) in enumerate(sent):
        path = path_of(prompt)
        assert index.overlaps(path, now) == plain.overlaps(path, now)
        index.add(replica, path, now)
        plain.add(replica, path, now)
        assert index.blocks(replica) == len(plain.blocks[replica]) <= capacity


def test_what_was_sent_is_believed_after_the_delay_and_until_the_end_of_its_time():
    index = ApproximateIndex(ttl_ns=100, delay_ns=10)
    path = [(b"a", 0, 4)]
    index.add(1, path, 0)
    seen = [index.overlaps(path, now) for now in (9, 10, 110, 111)]
    assert seen == [{}, {1: 4}, {1: 4}, {}]


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 1), st.booleans(), st.sampled_from([b"a", b"b"]), st.integers(0, 6), st.integers(1, 5)
    ),
    max_size=30,
)


@given(EVENTS, st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_an_event_index_is_the_set_of_blocks_as_of_its_delay(events, delay):
    index = EventIndex(delay_ns=delay)
    plain = {0: set(), 1: set()}
    history = []
    for now, (replica, stored, key, begin, length) in enumerate(events):
        index.receive(replica, stored, key, begin, begin + length, now)
        history.append((now, replica, stored, {(key, block) for block in range(begin, begin + length)}))
        plain = {0: set(), 1: set()}
        for time, who, added, blocks in history:
            if time + delay <= now:
                plain[who] = plain[who] | blocks if added else plain[who] - blocks
        for name in (b"a", b"b"):
            path = [(name, 0, 11)]
            expected = {}
            for who, blocks in plain.items():
                n = 0
                while n < 11 and (name, n) in blocks:
                    n += 1
                if n:
                    expected[who] = n
            assert index.overlaps(path, now) == expected


def test_a_replica_that_is_gone_is_forgotten():
    approximate = ApproximateIndex(delay_ns=5)
    events = EventIndex(delay_ns=5)
    path = [(b"a", 0, 4)]
    for replica in (0, 1):
        approximate.add(replica, path, 0)
        events.receive(replica, True, b"a", 0, 4, 0)
    for index in (approximate, events):
        index.forget(0)
        assert index.overlaps(path, 10) == {1: 4}
        index.forget(1)
        assert index.overlaps(path, 10) == {}
