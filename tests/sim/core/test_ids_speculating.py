"""Prompts given as token ids, with requests that speculate: generated blocks are found by their own keys."""

import pytest
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import DONE
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler


class NoDrafts:
    """A drafter that never drafts anything: requests go on in chunks all the same."""

    lookahead = 0
    reserved = 0
    recomputes_block = False

    def draft(self, request: Request, requests: int) -> int:
        return 0


@pytest.mark.parametrize("prompt", [1, 15, 16, 20])
@pytest.mark.parametrize("speculates", [False, True])
def test_generated_blocks_are_found_wherever_the_prompt_ends(speculates: bool, prompt: int) -> None:
    limits = Limits(num_blocks=16, block_size=16, max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = Scheduler(limits, drafter=NoDrafts() if speculates else None)
    tokens = list(range(100, 160))
    first = Request("first", BlockKeys.of_ids(16, tokens[:prompt]), prompt, 55 - prompt)
    scheduler.submit(first)
    for known in range(prompt, 36):
        plan = scheduler.plan(known)
        assert plan is not None
        first.keys.extend(tokens[known : known + 1])
        scheduler.commit(plan, DONE, known)
    second = Request("second", BlockKeys.of_ids(16, tokens[:34]), 34, 2)
    scheduler.submit(second)
    scheduler.plan(40)
    assert second.cached_tokens == 32
