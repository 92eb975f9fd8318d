"""Blocks of a prompt between two replicas: held, reserved, and findable only as far as they were written."""

import numpy as np
from pagecast.sim.core.handoff import give_back, hold, land, reserve, stand_in, unread
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler


def scheduler(blocks=20):
    return Scheduler(Limits(num_blocks=blocks, block_size=16, max_num_seqs=8, max_num_batched_tokens=512))


def request(name, tokens, output=1):
    return Request(name, BlockKeys.of_ids(16, np.arange(tokens)), tokens, output)


def serve(replica, one):
    assert replica.submit(one)
    for now in range(one.output_tokens + 2):
        plan = replica.plan(now)
        if plan is not None:
            replica.commit(plan, now=now)


def test_a_prompt_is_held_until_it_has_been_read():
    source = scheduler(blocks=5)
    one = request("a", 64)
    serve(source, one)
    holder = stand_in(one)
    assert len(hold(source, holder)) == 3
    assert source.memory.used_blocks == 3
    other = Request("b", BlockKeys.of_ids(16, np.arange(1000, 1080)), 80, 1)
    source.submit(other)
    assert source.plan(1) is None or source.memory.used_blocks <= 5
    assert source.memory.find(stand_in(one)).tokens == 48
    give_back(source, holder)
    assert not source.memory.holds(holder)


def test_what_was_not_written_is_not_found():
    target = scheduler()
    holder = stand_in(request("a", 64))
    hit = reserve(target, holder)
    assert hit is not None and hit.tokens == 0
    assert target.memory.used_blocks == 4
    assert unread(target, holder, hit) == target.memory.blocks(holder)[:3]
    assert target.memory.find(request("b", 200)).tokens == 0
    land(target, holder)
    assert target.memory.used_blocks == 0
    assert target.memory.find(request("b", 200)).tokens == 48


def test_a_second_prompt_takes_what_it_lacks_and_waits_where_there_is_no_room():
    target = scheduler(blocks=8)
    first = stand_in(request("a", 64))
    reserve(target, first)
    land(target, first)
    second = stand_in(request("b", 100))
    hit = reserve(target, second)
    assert hit is not None and hit.tokens == 48
    assert len(unread(target, second, hit)) == 3
    assert reserve(target, stand_in(Request("c", BlockKeys.of_ids(16, np.arange(500, 600)), 100, 1))) is None
    give_back(target, second)
    assert target.memory.used_blocks == 0
