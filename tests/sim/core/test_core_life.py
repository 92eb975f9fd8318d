"""Random lives of the core: no operation breaks an invariant, nothing is lost, nothing waits for ever."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pagecast.sim.core.check import check
from pagecast.sim.core.engines.nano_vllm.profile import NANO_VLLM
from pagecast.sim.core.engines.registry import PROFILES
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler

sys.path.insert(0, str(Path(__file__).parent))

from driver import Life, TwinLife, endless

OPERATIONS = 250
LIVES = st.binary(min_size=700, max_size=1400)
SETTINGS = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(SETTINGS, max_examples=600)
# A request is cancelled right after a step that filled its last block, planned ahead.
CANCELLED_WITH_A_FULL_BLOCK = bytes.fromhex(
    "0187010a0001010000000000963e00000000000000000072000000000000ecf6009600000008b20000001400000000f6"
    "009601000000000000000000007400960101003e00009ee00000000100000000000000ec96010000b600006a04000000"
    "00000000009600000000000000000000ecf60096010000000000000000000000de63"
)


@pytest.mark.parametrize("ids", [False, True], ids=["spans", "ids"])
@pytest.mark.parametrize("profile", ["vllm", "nano-vllm"])
@given(data=LIVES)
@SETTINGS
def test_no_operation_breaks_an_invariant(profile, ids, data):
    """4 x 50 lives of 250 operations: submit, step, cancel, preempt, evict, repeat an id."""
    live(profile, data, ids=ids)


@pytest.mark.slow
@pytest.mark.parametrize("ids", [False, True], ids=["spans", "ids"])
@pytest.mark.parametrize("profile", ["vllm", "nano-vllm"])
@given(data=LIVES)
@MANY
def test_no_operation_breaks_an_invariant_in_many_lives(profile, ids, data):
    live(profile, data, ids=ids)


@pytest.mark.parametrize("ids", [False, True], ids=["spans", "ids"])
@pytest.mark.parametrize("profile", [name for name in PROFILES if name not in ("vllm", "nano-vllm")])
@given(data=LIVES)
@settings(SETTINGS, max_examples=15)
def test_no_operation_breaks_an_invariant_of_another_engine(profile, ids, data):
    live(profile, data, ids=ids)


def live(profile: str, data: bytes, *, ids: bool) -> None:
    """One life, checked as it goes on."""
    life = Life(endless(data), profile, ids=ids)
    while life.operations < OPERATIONS:
        life.operate()
        if life.operations % 25 == 0:
            check(life.s)
    life.drain()


@pytest.mark.parametrize("ids", [False, True], ids=["spans", "ids"])
@given(data=LIVES)
@example(data=CANCELLED_WITH_A_FULL_BLOCK)
@SETTINGS
def test_core_agrees_with_a_scheduler_written_block_by_block(ids, data):
    """2 x 50 lives: the same requests, tokens, blocks and hits in every step."""
    live_twice(data, ids=ids)


@pytest.mark.slow
@pytest.mark.parametrize("ids", [False, True], ids=["spans", "ids"])
@given(data=LIVES)
@MANY
def test_core_agrees_with_a_scheduler_written_block_by_block_in_many_lives(ids, data):
    live_twice(data, ids=ids)


def live_twice(data: bytes, *, ids: bool) -> None:
    """One life of both schedulers, compared as it goes on."""
    life = TwinLife(endless(data), ids=ids)
    while life.operations < OPERATIONS:
        life.operate()
    life.drain()


@pytest.mark.parametrize("log", [False, True], ids=["no log", "log"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_block_that_output_and_prompt_fill_in_one_step_is_found_as_the_outputs(depth, log) -> None:
    """The request that was admitted first fills it first, whether or not a log is kept."""
    s = Scheduler(Limits(50, 4, 4, 4, pipeline_depth=depth), PROFILES["vllm"], log=log)
    prompts = [[(1, 0, 4)], [(1, 0, 4), (100, 0, 5)], [(1, 0, 4), (100, 0, 6)]]
    arrivals = [0, 3 + depth, 7 + depth]
    requests = []
    for number, spans in enumerate(prompts):
        tokens = sum(length for _, _, length in spans)
        output = (100 + 100 * number, 0)
        requests.append(
            Request(str(number), BlockKeys.of_spans(4, spans, output), tokens, 12 if not number else 1)
        )
    plans = []
    for step in range(12):
        if step in arrivals:
            s.submit(requests[arrivals.index(step)])
        plans.append(s.plan(step))
        if requests[2].alive and s.memory.holds(requests[2]):
            break
        if len(plans) > depth:
            s.commit(plans.pop(0))
    assert s.memory.blocks(requests[2])[:2] == s.memory.blocks(requests[0])[:2]


def test_nano_vllm_lets_who_was_admitted_first_decode_first() -> None:
    """With one place per step a request that waits to decode goes ahead of one whose prompt is done later."""
    s = Scheduler(Limits(60, 4, 1, 100), NANO_VLLM)
    for number, output in enumerate((2, 5)):
        s.submit(Request(str(number), BlockKeys.of_spans(4, [(number, 0, 8)], (100 + number, 0)), 8, output))
    for _ in range(3):  # two prompts, and the only decode of the first
        s.commit(s.plan(0))
    assert list(s.requests) == ["1"]
    s.submit(Request("2", BlockKeys.of_spans(4, [(2, 0, 8)], (102, 0)), 8, 5))
    s.commit(s.plan(0))
    decoding = []
    while s.requests:
        plan = s.plan(0)
        decoding += [each.id for each in plan.decodes]
        s.commit(plan)
    assert decoding == ["1"] * 4 + ["2"] * 4
