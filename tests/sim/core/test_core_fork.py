"""Forks share their parent's prompt to the last token; failures leave nothing behind."""

from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.core.check import check
from pagecast.sim.core.events import EventKind
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.scheduler import Scheduler

SIZE = 4
FAMILY = st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 8), st.integers(1, 4))


def request(id: str, text: int, prompt: int, output: int, parent: Request | None = None) -> Request:
    """A request for `prompt` tokens of a text; what it generates is its own."""
    keys = BlockKeys.of_spans(SIZE, [(text, 0, prompt)], (1000 + int(id), 0))
    return Request(id, keys, prompt, output, parent=parent)


def family(prompt: int, output: int = 6, n: int = 3) -> list[Request]:
    """A request and its forks."""
    parent = request("0", 1, prompt, output)
    return [parent, *(request(str(i), 1, prompt, output, parent) for i in range(1, n))]


def scheduler(blocks: int = 40, budget: int = 64, depth: int = 0, log: bool = False) -> Scheduler:
    return Scheduler(Limits(blocks, SIZE, 8, budget, pipeline_depth=depth), log=log)


def made(s: Scheduler) -> StepPlan:
    plan = s.plan(0)
    assert plan is not None
    return plan


def test_a_fork_computes_one_token_and_copies_the_last_block() -> None:
    s = scheduler(log=True)
    requests = family(prompt=10)
    for each in requests:
        assert s.submit(each)
    first = made(s)
    assert [chunk.request.id for chunk in first.chunks] == ["0"]
    s.commit(first)
    second = made(s)
    parent = s.memory.blocks(requests[0])
    assert [(c.request.id, c.start, c.tokens, c.copied) for c in second.chunks] == [
        ("1", 9, 1, parent[2]),
        ("2", 9, 1, parent[2]),
    ]
    for child in requests[1:]:
        assert s.memory.blocks(child)[:2] == parent[:2]
        assert s.memory.blocks(child)[2] not in parent
        assert child.cached_tokens == 9
    assert s.events is not None
    copies = [(event.request, event.blocks) for event in s.events if event.kind is EventKind.COPIED]
    assert copies == [(child.id, (parent[2], s.memory.blocks(child)[2])) for child in requests[1:]]


def test_a_prompt_of_whole_blocks_has_its_last_block_copied() -> None:
    s = scheduler()
    requests = family(prompt=8, n=2)
    for each in requests:
        s.submit(each)
    s.commit(made(s))
    (chunk,) = made(s).chunks
    assert (chunk.start, chunk.tokens, chunk.copied) == (7, 1, s.memory.blocks(requests[0])[1])


def test_forks_go_ahead_of_later_arrivals_and_on_without_their_parent() -> None:
    s = scheduler(budget=8)
    requests = family(prompt=20)
    for each in [*requests, request("9", 2, 5, 3)]:
        s.submit(each)
    s.commit(made(s))
    assert s.cancel("0", 1)
    check(s)
    plan = made(s)
    assert [chunk.request.id for chunk in plan.chunks] == ["1"]
    assert requests[1].cached_tokens == 8  # what the parent had computed


def test_who_fails_withdraws_what_the_step_was_to_compute() -> None:
    s = scheduler(log=True)
    pair = [request("0", 1, 12, 4), request("1", 1, 14, 4)]
    for each in pair:
        s.submit(each)
    plan = made(s)
    assert pair[1].cached_tokens == 12  # found what "0" fills in the same step
    ended = s.commit(plan, Outcome(failed=(("0", "broken"), ("1", "broken"))), 5)
    assert [(each.id, each.state, each.reason) for each in ended] == [
        ("1", State.CANCELLED, "broken"),
        ("0", State.CANCELLED, "broken"),
    ]
    check(s)
    again = request("2", 1, 14, 4)
    s.submit(again)
    made(s)
    assert again.cached_tokens == 0


@settings(max_examples=150, deadline=None)
@given(
    families=st.lists(FAMILY, max_size=6),
    ends=st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["cancel", "stop", "fail"])), max_size=6),
    blocks=st.integers(8, 30),
    depth=st.integers(0, 1),
)
def test_no_life_with_forks_breaks_an_invariant(
    families: list[tuple[int, int, int, int]], ends: list[tuple[int, str]], blocks: int, depth: int
) -> None:
    s = scheduler(blocks, 10, depth)
    count = 0
    flying: list[StepPlan] = []
    for text, prompt, output, n in families:
        parent = request(str(count), text, prompt, output)
        for each in (parent, *(request(str(count + i), text, prompt, output, parent) for i in range(1, n))):
            s.submit(each)
        count += n
    for turn in range(3000):
        how = [kind for id, kind in ends if id == turn and str(id) in s.requests]
        if "cancel" in how:
            s.cancel(str(turn), turn)
        plan = s.plan(turn)
        if plan is not None:
            flying.append(plan)
        if flying and (plan is None or len(flying) > depth):
            ids = tuple(str(id) for id, kind in ends if kind == "stop" and id <= turn)
            broken = tuple((str(id), "broken") for id, kind in ends if kind == "fail" and id <= turn)
            first = flying.pop(0)
            computing = {r.id for r in (*first.decodes, *(c.request for c in first.chunks if c.last))}
            s.commit(first, Outcome(tuple(id for id in ids if id in computing), broken), turn)
        check(s)
        if not s.requests:
            break
    assert not s.requests
    assert s.memory.used_blocks == 0
