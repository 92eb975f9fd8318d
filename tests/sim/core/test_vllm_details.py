"""Details of vLLM's scheduler that only rare scenarios show: ties, ends in one step, steps not overlapped."""

from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import Outcome
from pagecast.sim.core.request import Request
from pagecast.sim.core.rules.order import ByPriority
from pagecast.sim.core.scheduler import Scheduler

SIZE = 2


def request(id: str, spans, output_tokens: int, output_content: int = -1, **fields) -> Request:
    keys = BlockKeys.of_spans(SIZE, spans, (output_content, 0))
    prompt = sum(length for _, _, length in spans)
    return Request(id, keys, prompt, output_tokens, **fields)


def scheduler(**limits) -> Scheduler:
    given = {"num_blocks": 10, "block_size": SIZE, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return Scheduler(Limits(**{**given, **limits}))


def test_equal_requests_go_by_the_order_of_the_trace():
    queue = ByPriority()
    waiting = [request(str(row), ((1, 0, 1),), 1, priority=1, arrival_ns=5, index=row) for row in (4, 2, 10)]
    for one in waiting:
        queue.add(one)
    assert [one.id for one in queue] == ["2", "4", "10"]
    queue.remove(waiting[1])
    queue.put_back([waiting[1]])
    assert queue.first(scheduler().memory) is waiting[1]


def test_a_preempted_request_keeps_its_place_among_its_equals():
    s = scheduler(num_blocks=2, policy="priority")
    for id in ("1", "2"):
        s.submit(request(id, ((int(id), 0, 2),), 2, output_content=-int(id), index=int(id)))
    s.commit(s.plan(0))
    s.submit(request("10", ((10, 0, 2),), 1, index=10))
    s.plan(1)
    assert [one.id for one in s.running.requests] == ["2"]
    assert [one.id for one in s.queue] == ["1", "10"]


def test_requests_that_end_with_one_step_give_back_their_blocks_in_the_order_of_admission():
    s = scheduler(num_blocks=4)
    older = request("older", ((1, 0, 2),), 5)
    newer = request("newer", ((2, 0, 2),), 2, output_content=-2)
    s.submit(older)
    s.submit(newer)
    s.commit(s.plan(0))
    made = s.plan(1)
    older_blocks = s.memory.blocks(older)
    newer_blocks = s.memory.blocks(newer)
    ended = s.commit(made, Outcome(stopped=("older",)))
    assert [one.id for one in ended] == ["older", "newer"]
    after = request("after", ((3, 0, 8),), 1)
    s.submit(after)
    s.plan(2)
    # Unfindable blocks come first, the last given back foremost; then what can be found, the oldest first.
    unfindable = [newer_blocks[1], older_blocks[1]]
    assert s.memory.blocks(after) == [*unfindable, older_blocks[0], newer_blocks[0]]


def hit_of_a_quote(drained: bool) -> int:
    """Tokens found of another request's prompt and output, in the step that fills their second block."""
    s = scheduler(pipeline_depth=1)
    s.submit(request("writer", ((1, 0, 2),), 6, output_content=5))
    flying = [s.plan(0), s.plan(1)]
    s.commit(flying.pop(0))
    if drained:
        s.commit(flying.pop(0))
    quote = request("quote", ((1, 0, 2), (5, 0, 4)), 1)
    s.submit(quote)
    s.plan(2)
    return quote.cached_tokens


def test_a_block_can_be_found_in_the_step_that_fills_it_if_its_last_token_is_known_by_then():
    assert hit_of_a_quote(drained=False) == 2
    assert hit_of_a_quote(drained=True) == 4
