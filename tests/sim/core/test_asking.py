"""Whoever fits is begun: steps in which nobody is asked decide as if all had been.

A queue that is marked blocked is not looked at until a request comes or goes (`Queue.blocked`). Each closed
loop here is served twice, once with the mark taken away before every step.
"""

import random
from collections import deque

import pytest
from pagecast.sim.core.engines.registry import PROFILES
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler

BLOCK = 16
SEEDS = range(24)


def serve(profile: str, seed: int, *, ask: bool) -> list[tuple]:
    """The steps of a closed loop. `ask`: the queue is looked at in every step."""
    draw = random.Random(seed)
    users = draw.choice([3, 8, 16])
    limits = Limits(
        draw.choice([24, 40, 200]),
        BLOCK,
        draw.choice([2, 6, 32]),
        draw.choice([64, 100, 512]),
        caching=draw.random() < 0.8,
        pipeline_depth=draw.randrange(2),
    )
    try:
        s = Scheduler(limits, PROFILES[profile])
    except BadInput:
        pytest.skip(f"{profile} has no replica with these limits")
    alike = draw.choice([0, 64, 100, 128])  # prompts that fill steps and blocks to the last token, too
    sizes = [
        (alike or draw.randrange(1, 140), draw.randrange(1, 40), draw.randrange(12)) for _ in range(2 * users)
    ]
    waiting = deque(enumerate(sizes))
    steps: list[tuple] = []
    idle = 0

    def submit() -> None:
        if waiting:
            number, (prompt, output, text) = waiting.popleft()
            spans = ((text, 0, prompt // 2), (100 + number, 0, prompt - prompt // 2))
            spans = tuple(span for span in spans if span[2])
            keys = BlockKeys.of_spans(BLOCK, spans, (1000 + number, 0))
            request = Request(str(number), keys, prompt, output, index=number)
            if not s.submit(request):
                submit()

    for _ in range(users):
        submit()
    while s.requests:
        if ask:
            s.queue.blocked = False
        plan = s.plan(0, once=True)
        if plan is not None:
            chunks = tuple((chunk.request.id, chunk.start, chunk.tokens) for chunk in plan.chunks)
            steps.append((chunks, sorted(each.id for each in plan.decodes), plan.waiting, plan.used_blocks))
        idle = 0 if plan is not None or s.running.in_flight else idle + 1
        assert idle < 5, f"{profile} {seed}: nobody computes, with {s.memory.free_blocks} blocks free"
        if s.running.in_flight and (plan is None or len(s.running.in_flight) > limits.pipeline_depth):
            for _ in s.commit(s.running.in_flight[0]):
                submit()
    return steps


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_request_that_fits_is_begun_in_the_step_in_which_it_does(profile):
    for seed in SEEDS:
        assert serve(profile, seed, ask=False) == serve(profile, seed, ask=True), seed
