"""vLLM's settings that most servers leave alone; tests/differential compares decisions under them."""

from dataclasses import replace
from typing import Any

import pytest
from pagecast.sim.core.engines.vllm.profile import vllm
from pagecast.sim.core.engines.vllm.settings import VllmSettings
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import StepPlan
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.scheduler import Scheduler

SIZE = 4
NEWEST = "0.33"
LIMITS = Limits(99, SIZE, 8, 64, max_model_len=64)


def scheduler(version: str = NEWEST, limits: Limits = LIMITS, **chosen: Any) -> Scheduler:
    return Scheduler(replace(limits, engine=VllmSettings(**chosen)), vllm(version))


def request(number: int, prompt: int, output: int = 8) -> Request:
    keys = BlockKeys.of_spans(SIZE, [(number, 0, prompt)], (1000 + number, 0))
    return Request(str(number), keys, prompt, output, arrival_ns=number)


def step(s: Scheduler) -> StepPlan:
    plan = s.plan(0)
    assert plan is not None
    s.commit(plan)
    return plan


def test_a_watermark_leaves_blocks_free_while_somebody_runs():
    s = scheduler(watermark=0.5)
    for number in range(8):
        s.submit(request(number, 40))
    assert max(step(s).running for _ in range(8)) == 4  # a fifth prompt would leave 49 blocks
    alone = scheduler(watermark=0.9)
    alone.submit(request(0, 56))
    assert step(alone).running == 1


def test_a_threshold_lets_prompts_share_a_step_but_spares_a_lone_one():
    s = scheduler(long_prefill_token_threshold=16)
    s.submit(request(0, 40))
    assert step(s).prefill == ((40, 0),)
    s = scheduler(long_prefill_token_threshold=16)
    for number in range(3):
        s.submit(request(number, 40))
    assert step(s).prefill == ((16, 0),) * 3
    old = scheduler("0.24", long_prefill_token_threshold=16)
    old.submit(request(0, 40))
    assert step(old).prefill == ((16, 0),)


def test_without_chunks_a_prompt_waits_for_room_in_the_step():
    s = scheduler(chunked_prefill=False)
    for number in range(2):
        s.submit(request(number, 40))
    assert [step(s).prefill for _ in range(2)] == [((40, 0),), ((40, 0),)]


def test_a_part_of_a_prompt_is_enough_without_the_reserve():
    small = replace(LIMITS, num_blocks=16)
    for whole, running in ((True, 1), (False, 2)):
        s = scheduler(limits=small, scheduler_reserve_full_isl=whole)
        s.submit(request(0, 40))
        s.submit(request(1, 40))
        assert step(s).running == running


def test_prompts_come_in_one_of_so_many_steps():
    s = scheduler(prefill_schedule_interval=4)
    s.submit(request(0, 8, 16))
    step(s)
    s.submit(request(1, 8))
    assert [len(step(s).prefill) for _ in range(4)] == [0, 0, 0, 1]


def test_a_chunk_ends_ahead_of_an_image_that_the_encoder_has_no_room_for():
    s = scheduler(encoder_tokens=16)
    for number in range(3):
        made = request(number, 20)
        made.items = [(str(number), 4, 12)]
        s.submit(made)
    assert step(s).prefill == ((20, 0), (4, 0), (4, 0))
    assert [step(s).prefill for _ in range(2)] == [((16, 4),), ((16, 4),)]


def test_a_full_queue_rejects():
    s = scheduler(max_num_queued_reqs=1)
    assert s.submit(request(0, 8))
    late = request(1, 8)
    assert not s.submit(late)
    assert late.state is State.REJECTED
    assert late.reason == "max_num_queued_reqs 1 is reached"
    s = scheduler(max_num_queued_tokens=10)
    assert [s.submit(request(number, 8)) for number in range(3)] == [True, True, False]
    step(s)
    assert s.submit(request(3, 8))  # both have their first tokens


@pytest.mark.parametrize(
    ("version", "chosen", "problem"),
    [
        ("0.24", {"max_num_queued_reqs": 5}, r"vLLM 0\.24 has no max_num_queued_reqs; choose vllm@0\.30"),
        (NEWEST, {"chunked_prefill": False, "max_num_scheduled_tokens": 32}, "a prompt must fit in one step"),
        (NEWEST, {"watermark": 1.0}, "watermark is 1.0"),
    ],
)
def test_settings_that_cannot_work_are_errors(version, chosen, problem):
    with pytest.raises(BadInput, match=problem):
        scheduler(version, **chosen)
