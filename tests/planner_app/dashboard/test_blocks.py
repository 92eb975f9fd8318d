"""The block view's pictures are the core's state: by hand, and through a replay with cancellations."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.planner_app.dashboard.blocks.detail import facts
from pagecast.planner_app.dashboard.blocks.frames import WHOSE, Frames, Look, frames
from pagecast.planner_app.dashboard.blocks.log import CODES, BlockLog, Collector, findable, record
from pagecast.planner_app.dashboard.blocks.sandbox import (
    Action,
    Sandbox,
    SandboxServer,
    name_of,
    parse,
    text_of,
)
from pagecast.sim.core.check import check
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.events import EventKind
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.identity.scope import Scope
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import State
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.replay.clients import Arrivals
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replica.observer import Observer
from pagecast.sim.replica.replica import Replica
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.replica.workload import TraceWorkload
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Spans, Trace, table


def held_by(scheduler: Scheduler) -> dict[int, list[int]]:
    """The requests that hold each block, as the core has them."""
    held: dict[int, list[int]] = {}
    groups = max(len(scheduler.limits.groups), 1)
    null = scheduler.limits.num_blocks
    for request in scheduler.requests.values():
        for group in range(groups):
            for block in scheduler.memory.blocks(request, group):
                if block != null:
                    held.setdefault(block, []).append(request.index)
    return held


def assert_picture(cells: np.ndarray, scheduler: Scheduler) -> None:
    held, index = held_by(scheduler), findable(scheduler)
    for block, cell in enumerate(cells.tolist()):
        look, whose = Look(cell & 7), cell >> WHOSE
        owners = held.get(block, [])
        if not owners:
            assert look is (Look.CACHED if block in index else Look.FREE), block
        elif len(owners) == 1:
            assert look in (Look.REQUEST, Look.TAIL, Look.LOADING) and [whose] == owners, block
        else:
            assert look is Look.SHARED and whose == len(owners), block


# ---- by hand

_ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(1, 120),
            st.integers(0, 80),
            st.integers(0, 3),
            st.integers(1, 60),
            st.integers(0, 1),
        ),
        st.tuples(st.just("step"), st.integers(1, 20)),
        st.tuples(st.just("grow"), st.integers(0, 9), st.integers(1, 30)),
        st.tuples(st.just("fork"), st.integers(0, 9), st.integers(1, 40)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(0, 6)),
    ),
    min_size=1,
    max_size=25,
)
_SETTINGS = st.builds(
    SandboxServer,
    st.sampled_from([6, 12, 48]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from(["vllm", "nano-vllm"]),
    st.booleans(),
    st.sampled_from([32, 256]),
)


def act(sandbox: Sandbox, words: tuple[str, *tuple[int, ...]]) -> bool:
    """Does one action, where it speaks of a request that there is."""
    name, *numbers = words
    if name in ("grow", "fork", "cancel", "finish") and numbers[0] >= len(sandbox.requests):
        return False
    sandbox.act(Action(name, tuple(numbers)))
    return True


@settings(max_examples=60, deadline=None)
@given(_SETTINGS, _ACTIONS)
def test_whatever_is_done_by_hand_the_picture_is_the_cores_state(setting, actions):
    sandbox = Sandbox(setting)
    for words in actions:
        if not act(sandbox, words):
            continue
        check(sandbox.scheduler)
        shown = frames(sandbox.log())
        if not len(shown):
            continue
        last = len(shown) - 1
        assert_picture(shown.picture(last), sandbox.scheduler)
        held = held_by(sandbox.scheduler)
        for block in range(min(setting.blocks, 6)):
            known = facts(shown, last, block, lambda n: sandbox.requests[n].keys, sandbox.scopes.__getitem__)
            assert sorted(known.owners) == sorted(held.get(block, []))
            if known.look is Look.CACHED:
                assert known.chain[-1].there and known.chain[-1].block == block


@given(_ACTIONS)
def test_a_link_leads_to_the_same_state(actions):
    sandbox, done = Sandbox(SandboxServer()), []
    for words in actions:
        if act(sandbox, words):
            done.append(Action(words[0], tuple(words[1:])))
    again = Sandbox.of(SandboxServer(), parse(text_of(tuple(done))))
    assert np.array_equal(again.log().blocks, sandbox.log().blocks)


def made(text: str, **setting: object) -> Sandbox:
    return Sandbox.of(SandboxServer(**setting), parse(text))


def looks(sandbox: Sandbox) -> dict[Look, int]:
    shown = frames(sandbox.log())
    counts = np.bincount(shown.picture(len(shown) - 1) & 7, minlength=len(Look))
    return {look: int(counts[look]) for look in Look}


def test_a_second_request_shares_the_text_it_begins_with():
    sandbox = made("add-96-64-1-64-0_step-1_add-96-64-1-64-0_step-1")
    assert looks(sandbox)[Look.SHARED] == 4
    assert sandbox.requests[1].cached_tokens == 64
    other = made("add-96-64-1-64-1_step-1_add-96-64-1-64-2_step-1")  # tenants: scopes of their own
    assert looks(other)[Look.SHARED] == 0 and other.requests[1].cached_tokens == 0


def test_a_fork_shares_full_blocks_and_copies_the_last():
    sandbox = made("add-88-0-0-96-0_step-2_fork-0-96_step-1")
    assert looks(sandbox)[Look.SHARED] == 5
    assert any(" copied B " in sandbox.log().line(i, name_of) for i in range(len(sandbox.log())))
    first, second = map(sandbox.scheduler.memory.blocks, sandbox.requests[:2])
    assert first[:5] == second[:5]
    assert first[5] != second[5]


def test_cancel_frees_blocks_and_keeps_what_can_be_found():
    sandbox = made("add-72-0-0-64-0_step-1_cancel-0")
    assert sandbox.requests[0].state is State.CANCELLED
    assert looks(sandbox) == {
        Look.FREE: 44,
        Look.CACHED: 4,
        Look.REQUEST: 0,
        Look.TAIL: 0,
        Look.SHARED: 0,
        Look.LOADING: 0,
    }
    assert looks(made("add-72-0-0-64-0_step-1_cancel-0", caching=False))[Look.CACHED] == 0


def test_a_full_pool_evicts_the_oldest_tail_first():
    sandbox = made("add-160-0-0-1-0_step-2_add-96-0-0-1-0_step-1", blocks=12)
    assert sandbox.requests[0].state is State.FINISHED
    shown = frames(sandbox.log())
    lost = [
        int(b)
        for i in range(len(shown.log))
        if shown.log.line(i, name_of).split()[1] == "evicted"
        for b in shown.log.of(i)
    ]
    assert lost == [9, 8, 7, 6]  # the two blocks never used go first
    chain = facts(shown, len(shown) - 1, 5, lambda n: sandbox.requests[n].keys, sandbox.scopes.__getitem__)
    assert chain.look is Look.CACHED and [link.block for link in chain.chain] == [0, 1, 2, 3, 4, 5]
    assert all(link.there for link in chain.chain)


def test_growing_finishing_and_their_refusals():
    sandbox = made("add-16-0-0-64-0_step-1_grow-0-20")
    assert sandbox.tokens_of(sandbox.requests[0]) == 36
    sandbox.act(Action("finish", (0,)))
    assert sandbox.requests[0].state is State.FINISHED and looks(sandbox)[Look.REQUEST] == 0
    sandbox.act(Action("grow", (0, 5)))
    assert "ended" in sandbox.message
    sandbox.act(Action("step", (3,)))
    assert "no request runs" in sandbox.message
    sandbox.act(Action("add", (4000, 0, 0, 64, 0)))
    assert "rejected" in sandbox.message and "48" in sandbox.message


@pytest.mark.parametrize(
    "text",
    [
        "add",
        "add-1",
        "drop-1",
        "step-x",
        "step-1-2",
        "step--1",
        "add-٣-0-0-1-0",
        "_".join(["step-1"] * 301),
        "step-9999999",
    ],
)
def test_a_link_that_makes_no_sandbox_is_one_line(text):
    with pytest.raises(BadInput) as refused:
        parse(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["grow-3-1", "step-513", "add-0-0-0-1-0", "add-5000-0-0-1-0", "add-1-0-9-1-0"]
)
def test_an_action_out_of_bounds_is_one_line(text):
    with pytest.raises(BadInput) as refused:
        made(text)
    assert "\n" not in str(refused.value)


# ---- through a replay


def busy_trace(rows: int = 60) -> Trace:
    """Requests that share prefixes, queue for blocks, and are given up by many clients."""
    rng = np.random.default_rng(3)
    prompt, output = rng.integers(20, 200, rows), rng.integers(5, 80, rows)
    arrival = np.cumsum(rng.exponential(0.01, rows))
    patience = np.where(rng.random(rows) < 0.4, rng.exponential(0.15, rows), np.nan)
    requests = table(
        {
            "arrival_s": arrival,
            "input_tokens": prompt,
            "output_tokens": output,
            "cancel_after_s": patience,
            "salt": np.where(np.arange(rows) % 5 == 0, "tenant", None),
        }
    )
    content = rng.integers(0, 3, rows)
    spans = Spans(np.arange(rows + 1), content, np.zeros(rows, np.int64), prompt)
    return Trace("busy", requests, spans)


BUSY = Scenario.make(
    {"block_size": 16, "num_gpu_blocks": 50, "max_num_batched_tokens": 256, "max_num_seqs": 8}
)


def cut(log: BlockLog, events: int) -> BlockLog:
    return replace(
        log,
        step=log.step[:events],
        kind=log.kind[:events],
        request=log.request[:events],
        start=log.start[: events + 1],
        blocks=log.blocks[: log.start[events]],
    )


@pytest.mark.parametrize("rules", ["vllm", "nano-vllm"])
def test_a_replays_pictures_are_the_cores_state_cancellations_and_all(rules):
    scenario = BUSY.changed(engine=rules)
    kinds = pictures_equal_the_core(scenario, busy_trace(), least_steps=100)
    assert {"cancelled", "evicted", "reused", "preempted", "freed"} <= kinds


def pictures_equal_the_core(scenario: Scenario, trace: Trace, least_steps: int) -> set[str]:
    """Replays, compares every seventh step's picture with the core, and returns the kinds of events."""
    spec = ReplicaSpec.of(scenario, TraceWorkload(trace))
    scheduler = spec.scheduler(log=True)
    collector, env, steps = Collector(scheduler, int), simpy.Environment(), count()

    class Looking(Observer):
        def step(self, plan: StepPlan, outcome: Outcome, start_ns: int, end_ns: int) -> None:
            collector.take()
            if not next(steps) % 7:
                shown = frames(collector.log())
                assert_picture(shown.picture(len(shown) - 1), scheduler)

    feed = Feed(trace, spec.limits.block_size, scenario)
    Replica(env, spec, Arrivals(trace), feed, [Looking()], scheduler=scheduler)
    env.run()
    assert next(steps) > least_steps
    log = collector.log()
    return {log.line(index, str).split()[1] for index in range(len(log))}


def test_pictures_of_a_model_with_windows_are_the_cores_state():
    scenario = Scenario.make(
        {
            "model": "openai/gpt-oss-20b",
            "num_gpu_blocks": 90,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 8,
            "costs": "roofline",
        }
    )
    trace = busy_trace()
    kinds = pictures_equal_the_core(scenario, trace, least_steps=50)
    assert {"left", "freed", "evicted", "reused", "preempted"} <= kinds
    shown = frames(record(trace, scenario))
    assert shown.log.groups == (
        "window of 128 tokens, blocks of 16 tokens",
        "full attention, blocks of 16 tokens",
    )
    written = int(shown.log.of(int(np.flatnonzero(shown.log.kind == CODES[EventKind.ALLOCATED])[0]))[0])
    known = facts(shown, 0, written, lambda row: Feed(trace, 16).request(row, 0).keys, lambda row: Scope())
    assert known.group.startswith("group 0: window of 128 tokens")


def test_a_replay_with_a_host_tier_shows_loads():
    shown = frames(record(busy_trace(120), BUSY.changed(kv_offloading_size=0.05)))
    kinds = {shown.log.line(index, str).split()[1] for index in range(len(shown.log))}
    assert {"storing", "offloaded", "loading", "loaded"} <= kinds
    assert Look.LOADING in shown.changes[:, 2] & 7
    assert Look.LOADING not in shown.picture(len(shown) - 1) & 7


def test_blocks_that_are_loaded_from_the_host_are_shown_as_such():
    events = [
        (0, CODES[EventKind.ALLOCATED], 0),
        (0, CODES[EventKind.LOADING], 2),
        (3, CODES[EventKind.LOADED], 2),
        (4, CODES[EventKind.FREED], 2),
    ]
    blocks = np.array([5, 6, 5, 6])
    log = BlockLog(
        num_blocks=8,
        block_size=16,
        step=np.array([step for step, _, _ in events]),
        kind=np.array([int(kind) for _, kind, _ in events]),
        request=np.zeros(4, np.int64),
        start=np.array([0, 2, 4, 4, 4]),
        blocks=blocks,
        detail={},
    )
    shown = frames(log)
    assert [Look(cell & 7) for cell in shown.picture(0)[5:7].tolist()] == [Look.LOADING, Look.LOADING]
    assert [Look(cell & 7) for cell in shown.picture(1)[5:7].tolist()] == [Look.REQUEST, Look.TAIL]
    assert not shown.picture(2).any()


def test_what_was_planned_but_never_computed_is_withdrawn_with_its_request():
    """A prompt of two chunks, given up while the second is computed: pagecast's engine keeps the first."""
    requests = table(
        {
            "arrival_s": np.zeros(1),
            "input_tokens": np.array([400]),
            "output_tokens": np.array([9]),
            "cancel_after_s": np.array([0.005]),
        }
    )
    shown = frames(record(Trace("one gives up", requests), BUSY.changed(engine="pagecast")))
    last = shown.log.line(len(shown.log) - 1, str)
    assert last.split()[1:3] == ["withdrawn", "16-24"], last
    cells = shown.picture(len(shown) - 1) & 7
    assert (cells[:16] == Look.CACHED).all() and not cells[16:].any()


@pytest.fixture(scope="module")
def played() -> Frames:
    return frames(record(busy_trace(), BUSY))


def test_any_frame_is_what_its_events_lead_to(played):
    for frame in range(0, len(played), 23):
        alone = frames(cut(played.log, int(played.first[frame + 1])))
        assert np.array_equal(played.picture(frame), alone.picture(len(alone) - 1))


def test_parts_join_without_a_seam(played, monkeypatch):
    monkeypatch.setattr("pagecast.planner_app.dashboard.blocks.frames.MOST_EVENTS", 200)
    apart = frames(played.log)
    assert len(apart.parts) > 2 and apart.span(1)[0] == apart.span(0)[1]
    for frame in range(0, len(played), 31):
        assert np.array_equal(apart.picture(frame), played.picture(frame))


def test_frames_come_with_the_replays_clock(played):
    times = played.time_s
    assert times is not None and len(times) == len(played)
    assert np.all(np.diff(times) >= 0) and times[-1] > times[0] >= 0


def test_a_blocks_chain_ages_and_scope_are_its_writers(played):
    trace, feed = busy_trace(), Feed(busy_trace(), 16)

    def keys(row: int) -> BlockKeys:
        return feed.request(row, 0).keys

    def scope(row: int) -> Scope:
        return Scope(salt="tenant") if row % 5 == 0 else Scope()

    last = len(played) // 2
    for block in range(played.log.num_blocks):
        known = facts(played, last, block, keys, scope)
        if known.look is Look.FREE:
            assert not known.chain
            continue
        assert [link.position for link in known.chain] == list(range(known.position + 1))
        assert known.chain[-1].block == block
        assert [link.key for link in known.chain] == [
            keys(known.writer).block_key(i).hex() for i in range(known.position + 1)
        ]
        assert 0 <= known.idle_steps <= known.age_steps and known.age_s is not None
        assert known.scope == ("salt tenant" if known.writer % 5 == 0 else "the default one")
        assert known.scope_digest == scope(known.writer).digest.hex()
    assert len(trace) == 60
