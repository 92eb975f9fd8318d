"""TensorRT-LLM's capacity policies and context chunks: its own examples, with the iterations it names.

The examples are those of cpp/tests/unit_tests/batch_manager/capacitySchedulerTest.cpp: which requests compute
in which iterations, in a pool of 100 or 200 tokens with 10 per block.
"""

import pytest
from pagecast.sim.core.check import check
from pagecast.sim.core.engines.registry import PROFILES
from pagecast.sim.core.engines.trtllm.chunks import Context, chunk_sizes, cost
from pagecast.sim.core.engines.trtllm.settings import TrtllmSettings
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

NO_EVICT, MAX_UTILIZATION, STATIC = "trtllm-guaranteed-no-evict", "trtllm-max-utilization", "trtllm-static"
ALL = (NO_EVICT, MAX_UTILIZATION, STATIC)
TOKENS_PER_BLOCK = 10
CHUNKS = TrtllmSettings(chunked_context=True)
EQUAL = TrtllmSettings(chunked_context=True, chunking="equal_progress", unit=20)


def request(number: int, prompt: int, output: int, text: int | None = None) -> Request:
    text = number if text is None else text
    keys = BlockKeys.of_spans(TOKENS_PER_BLOCK, ((text, 0, prompt),), (1000 + number, 0))
    return Request(str(number), keys, prompt, output, index=number)


def scheduler(profile: str, tokens: int, *, most: int = 2, budget: int = 1000, **more) -> Scheduler:
    more = {"engine": CHUNKS, **more}
    limits = Limits(tokens // TOKENS_PER_BLOCK, TOKENS_PER_BLOCK, most, budget, **more)
    return Scheduler(limits, PROFILES[profile])


def serve(s: Scheduler, *requests: Request) -> dict[str, list[tuple[int, int]]]:
    """In which iterations each request computes, as ranges; all are submitted at once."""
    for each in requests:
        assert s.submit(each), each.reason
    busy: dict[str, list[tuple[int, int]]] = {each.id: [] for each in requests}
    iteration = 0
    while s.requests:
        plan = s.plan(0, once=True)
        if plan is None:
            continue  # all that could run was paused: an engine's loop goes on
        for each in [*plan.decodes, *(chunk.request for chunk in plan.chunks)]:
            ranges = busy[each.id]
            if ranges and ranges[-1][1] == iteration:
                ranges[-1] = (ranges[-1][0], iteration + 1)
            else:
                ranges.append((iteration, iteration + 1))
        s.commit(plan)
        check(s)
        iteration += 1
    return busy


@pytest.mark.parametrize("profile", ALL)
def test_two_that_fit_run_together(profile):
    """SimpleShouldFit."""
    busy = serve(scheduler(profile, 200), request(0, 10, 80), request(1, 10, 80))
    assert busy == {"0": [(0, 80)], "1": [(0, 80)]}


@pytest.mark.parametrize("profile", ALL)
def test_two_that_fit_run_together_in_chunks(profile):
    """SimpleShouldFitInChunk: chunks of 20, 20 and 10."""
    s = scheduler(profile, 200, budget=40, engine=EQUAL)
    assert serve(s, request(0, 50, 40), request(1, 50, 40)) == {"0": [(0, 42)], "1": [(0, 42)]}


def test_with_max_utilization_the_last_is_paused_when_blocks_run_out():
    """SimpleDoesntFitMaxUtilization: request 1 begins anew with 51 tokens and 39 to go."""
    s = scheduler(MAX_UTILIZATION, 100)
    busy = serve(s, request(0, 10, 80), request(1, 10, 80))
    assert busy == {"0": [(0, 80)], "1": [(0, 41), (80, 119)]}
    assert s.preemptions == 1


def test_without_eviction_the_second_waits_for_the_first():
    """The same two, GUARANTEED_NO_EVICT (SimpleDoesntFitPriorities without priorities)."""
    busy = serve(scheduler(NO_EVICT, 100), request(0, 10, 80), request(1, 10, 80))
    assert busy == {"0": [(0, 80)], "1": [(80, 160)]}


def test_a_request_begun_in_chunks_is_paused():
    """SimpleDoesntFitMaxUtilizationInChunk, until request 0 is done."""
    s = scheduler(MAX_UTILIZATION, 100, budget=40, engine=EQUAL)
    busy = serve(s, request(0, 30, 60), request(1, 30, 60))
    assert busy["0"] == [(0, 61)]
    assert busy["1"][0] == (0, 22)
    assert busy["1"][1][0] == 61


def test_the_first_chunk_takes_the_blocks_of_the_whole_prompt():
    """SimpleDoesntFitMaxUtilizationInChunkedCache: 70 of 100 tokens are taken, although 40 are computed."""
    s = scheduler(MAX_UTILIZATION, 100, budget=40)
    assert serve(s, request(0, 70, 20), request(1, 70, 20)) == {"0": [(0, 21)], "1": [(21, 42)]}


@pytest.mark.parametrize("profile", ALL)
def test_duplicates_wait_until_they_can_reuse(profile):
    """DelayDuplicateRequest: two of three equal prompts wait one iteration; in static batches none does."""
    s = scheduler(profile, 200, most=3)
    same = [request(number, 21, 2, text=7) for number in range(3)]
    busy = serve(s, *same)
    if profile == STATIC:
        assert busy == {"0": [(0, 2)], "1": [(0, 2)], "2": [(0, 2)]}
    else:
        assert busy == {"0": [(0, 2)], "1": [(1, 3)], "2": [(1, 3)]}
        assert [each.cached_tokens // TOKENS_PER_BLOCK for each in same] == [0, 2, 2]


@pytest.mark.parametrize("profile", [NO_EVICT, MAX_UTILIZATION])
def test_a_duplicate_waits_for_the_last_chunk(profile):
    """DelayDuplicateRequestChunked: chunks of 20, 20 and 10; four blocks are reused."""
    s = scheduler(profile, 200, budget=20, engine=EQUAL)
    same = [request(number, 50, 40, text=7) for number in range(2)]
    assert serve(s, *same) == {"0": [(0, 42)], "1": [(3, 43)]}
    assert same[1].cached_tokens == 40


@pytest.mark.parametrize("profile", [NO_EVICT, MAX_UTILIZATION])
def test_each_of_three_that_go_on_after_each_other_waits_for_the_one_before(profile):
    """DelayFiveRequestsComplicated: two prompts of their own, three that begin alike; three blocks reused."""
    s = scheduler(profile, 1000, most=5)
    spans = [(1, 11), (2, 21), (0, 11), (0, 21), (0, 31)]
    requests = []
    for number, (offset, prompt) in enumerate(spans):
        keys = BlockKeys.of_spans(TOKENS_PER_BLOCK, ((7, offset, prompt),), (1000 + number, 0))
        requests.append(Request(str(number), keys, prompt, 80, index=number))
    busy = serve(s, *requests)
    assert busy == {"0": [(0, 80)], "1": [(0, 80)], "2": [(0, 80)], "3": [(1, 81)], "4": [(2, 82)]}
    assert sum(each.cached_tokens for each in requests) == 3 * TOKENS_PER_BLOCK


def test_the_third_waits_for_both_of_a_static_batch():
    """SimpleFitsStaticBatch: the second of the batch ends half way."""
    s = scheduler(STATIC, 200)
    busy = serve(s, request(0, 10, 80), request(1, 10, 40), request(2, 10, 80))
    assert busy == {"0": [(0, 80)], "1": [(0, 40)], "2": [(80, 160)]}


def test_a_static_batch_ends_before_another_begins():
    busy = serve(scheduler(STATIC, 200), request(0, 10, 20), request(1, 10, 40), request(2, 10, 5))
    assert busy == {"0": [(0, 20)], "1": [(0, 40)], "2": [(40, 45)]}
    mixed = serve(scheduler(NO_EVICT, 200), request(0, 10, 20), request(1, 10, 40), request(2, 10, 5))
    assert mixed["2"] == [(20, 25)]


@pytest.mark.parametrize("profile", [NO_EVICT, MAX_UTILIZATION])
def test_a_prompt_waits_for_the_block_that_another_computes(profile):
    s = scheduler(profile, 400, most=4)
    same = [request(number, 51, 4, text=7) for number in range(3)]
    busy = serve(s, *same)
    # Requests 1 and 2 wait for request 0's first block, then for nothing: their last, partial one is private.
    assert busy == {"0": [(0, 4)], "1": [(1, 5)], "2": [(1, 5)]}
    assert [each.cached_tokens for each in same] == [0, 50, 50]


def test_without_chunks_prompts_are_served_whole():
    s = scheduler(NO_EVICT, 400, most=4, budget=100, engine=TrtllmSettings(chunked_context=False))
    busy = serve(s, request(0, 60, 3), request(1, 60, 3), request(2, 30, 3))
    assert busy == {"0": [(0, 3)], "1": [(1, 4)], "2": [(1, 4)]}
    assert not s.submit(request(9, 99, 3))


def test_what_can_never_run_is_rejected():
    s = scheduler(NO_EVICT, 100)
    assert s.submit(request(0, 60, 40))
    assert not s.submit(request(1, 60, 41))


def test_chunks_in_order_are_cut_to_units():
    shapes = [Context(35, 0), Context(50, 0), Context(5, 0)]
    assert chunk_sizes(shapes, 60, 100, 10, equal=False) == [35, 20, 5]
    assert chunk_sizes(shapes, 90, 100, 10, equal=False) == [35, 50, 5]


def test_chunks_of_equal_progress_grow_in_turn():
    shapes = [Context(35, 0), Context(50, 0), Context(5, 0)]
    assert chunk_sizes(shapes, 60, 100, 10, equal=True) == [35, 20, 5]
    assert chunk_sizes(shapes, 15, 100, 10, equal=True) == [10, 0, 5]


def test_a_chunk_with_a_cached_prefix_is_moved_not_shortened():
    context = Context(100, 40)
    assert [cost(size, context) for size in (20, 50, 60, 100)] == [20, 50, 60, 60]
    assert chunk_sizes([context], 50, 50, 10, equal=False) == [50]
    assert chunk_sizes([context], 60, 60, 10, equal=False) == [100]


def test_unknown_settings_are_named():
    with pytest.raises(BadInput, match="context chunking policy 'x' is not known"):
        scheduler(NO_EVICT, 100, engine=TrtllmSettings(chunking="x"))
    with pytest.raises(BadInput, match=r"a chunk of 10 tokens does not fit in max_num_batched_tokens \(8\)"):
        scheduler(NO_EVICT, 100, budget=8)
    with pytest.raises(BadInput, match="choose the policy fcfs"):
        scheduler(NO_EVICT, 100, policy="priority")
    with pytest.raises(BadInput, match="context_chunking_policy is for TensorRT-LLM"):
        Scenario(context_chunking_policy="equal_progress").limits()


WAITING = TrtllmSettings(chunked_context=True, wait_steps=3, wait_ratio=0.5)


def steps_held_back(*prompts: Request, first: int = 20, engine: TrtllmSettings = WAITING) -> int:
    """The steps for which prompts wait that come while a request generates; 100 tokens fit in a step."""
    s = scheduler(NO_EVICT, 2000, most=8, budget=100, engine=engine)
    assert s.submit(request(0, first, 40, text=77))
    s.commit(s.plan(0))
    for each in prompts:
        assert s.submit(each)
    for step in range(10):
        plan = s.plan(0)
        s.commit(plan)
        check(s)
        if plan.chunks:
            return step
    raise AssertionError("the prompts never begin")


def test_prompts_wait_to_fill_a_batch_while_others_generate():
    """The cases of TensorRT-LLM's test_py_executor.py, TestWaitingRequests, with 100 tokens in a step."""
    assert steps_held_back(request(1, 10, 5)) == 3  # as long as it may
    assert steps_held_back(request(1, 60, 5)) == 0  # enough tokens
    assert steps_held_back(request(1, 25, 5), request(2, 24, 5)) == 0  # with the one that generates
    assert steps_held_back(request(1, 25, 5), request(2, 23, 5)) == 3
    assert steps_held_back(request(1, 60, 5, text=77), first=50) == 3  # 50 of its 60 tokens are cached
    assert steps_held_back(request(1, 10, 5), engine=CHUNKS) == 0


def test_prompts_do_not_wait_where_nobody_generates():
    s = scheduler(NO_EVICT, 200, engine=WAITING)
    assert serve(s, request(0, 10, 5)) == {"0": [(0, 5)]}


@pytest.mark.parametrize("profile", ALL)
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "overlap"])
def test_stretches_are_the_same_as_single_steps(profile, ahead):
    trace = read("chat", limit=60)
    wait = {"batch_wait_timeout_iters": 5, "batch_wait_max_tokens_ratio": 0.2} if ahead else {}
    scenario = Scenario(engine=profile, costs="roofline", num_gpu_blocks=600, async_scheduling=ahead, **wait)
    fast = replay(trace, scenario, check_every=10)
    slow = replay(trace, scenario, fast_forward=False)
    assert fast.requests.equals(slow.requests)
    assert fast.summary["evicted_blocks"] == slow.summary["evicted_blocks"]
    assert profile == MAX_UTILIZATION or not fast.summary["preemptions"]


@pytest.mark.parametrize("profile", [NO_EVICT, MAX_UTILIZATION])
@pytest.mark.parametrize(("tokens", "most"), [(1000, 3), (90, 8)], ids=["places", "blocks"])
def test_a_request_that_fits_begins_in_the_next_step_with_tokens_left(profile, tokens, most):
    """Prompts fill a step each. The fourth does not fit: the second and third do not wait for the first."""
    s = scheduler(profile, tokens, most=most, budget=22)
    busy = serve(s, *(request(number, 20, 10) for number in range(4)))
    assert [busy[id][0][0] for id in "012"] == [0, 1, 2]
