"""What a version of vLLM decides otherwise than the one before it, in small cases."""

from __future__ import annotations

import numpy as np
import pytest
from pagecast.sim.core.engines.vllm.profile import vllm
from pagecast.sim.core.group_spec import GroupSpec, KvKind
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.speculation.config import SpeculativeConfig
from pagecast.sim.speculation.speculation import Speculation

SIZE = 4


def eagle(version: str, **limits: int) -> Scheduler:
    """A replica whose requests speculate with EAGLE, one draft token each, none of them right."""
    config = SpeculativeConfig(method="eagle", num_speculative_tokens=1)
    bounds = Limits(64, SIZE, max_num_seqs=8, max_num_batched_tokens=64, **limits)
    return Scheduler(bounds, vllm(version), drafter=Speculation(config))


def request(id: str, version: str, spans: list[tuple[int, int, int]], output: int = 4) -> Request:
    prompt = sum(length for _, _, length in spans)
    lookahead = int(version == "0.33")
    keys = BlockKeys.of_spans(SIZE, spans, (1000 + int(id), 0), lookahead=lookahead)
    return Request(id, keys, prompt, output)


def served(s: Scheduler, one: Request) -> int:
    """Serves a request to its end. Returns its prefix hit."""
    assert s.submit(one)
    while s.requests:
        plan = s.plan(0)
        assert plan is not None
        drafter = s.lifecycle.drafter
        assert isinstance(drafter, Speculation)
        s.commit(plan, drafter.outcome(plan))
    return one.cached_tokens


@pytest.mark.parametrize(("version", "same", "other"), [("0.31", 4, 4), ("0.33", 8, 4)])
def test_with_eagle_a_hit_is_one_block_longer_where_keys_cover_the_token_behind_it(
    version: str, same: int, other: int
) -> None:
    s = eagle(version)
    served(s, request("0", version, [(1, 0, 10)]))
    assert served(s, request("1", version, [(1, 0, 10)])) == same
    assert served(s, request("2", version, [(1, 0, 8), (2, 0, 2)])) == other


def test_keys_of_token_ids_cover_what_is_behind_a_block_as_those_of_spans_do() -> None:
    ids = np.arange(9)
    other = ids.copy()
    other[8] = 99
    plain = [BlockKeys.of_ids(SIZE, each).digests for each in (ids, other)]
    assert plain[0] == plain[1]
    assert len(plain[0]) == 2
    covering = [BlockKeys.of_ids(SIZE, each, lookahead=1) for each in (ids, other)]
    assert covering[0].digests[0] == covering[1].digests[0]
    assert covering[0].digests[1] != covering[1].digests[1]
    late = BlockKeys.of_ids(SIZE, ids[:8], lookahead=1)
    assert len(late.digests) == 1
    late.extend(ids[8:])
    assert late.digests == covering[0].digests


@pytest.mark.parametrize(("version", "row"), [("0.24", (1, 0)), ("0.26", (4, 3)), ("0.33", (4, 3))])
def test_a_request_that_joins_with_one_token_computes_a_full_row(version: str, row: tuple[int, int]) -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    limits = Limits(64, SIZE, max_num_seqs=8, max_num_batched_tokens=64)
    s = Scheduler(limits, vllm(version), drafter=Speculation(config))
    for id, prompt in enumerate((9, 9)):
        keys = BlockKeys.of_spans(SIZE, [(1, 0, prompt)], (1000 + id, 0))
        assert s.submit(Request(str(id), keys, prompt, 8))
        plan = s.plan(0)
        assert plan is not None
        if not id:
            s.commit(plan)
    assert [(chunk.tokens, chunk.drafts) for chunk in plan.chunks if chunk.request.id == "1"] == [row]
    joined = next(iter(reversed(s.running.requests)))
    drafter = s.lifecycle.drafter
    assert isinstance(drafter, Speculation)
    s.commit(plan, drafter.outcome(plan))
    assert joined.known_tokens == 10  # none of the row's drafts is right


@pytest.mark.parametrize(("version", "held"), [("0.24", 3), ("0.26", 4)])
def test_a_block_leaves_a_window_when_no_step_in_flight_reads_it(version: str, held: int) -> None:
    groups = (GroupSpec(KvKind.WINDOW, SIZE, window=8),)
    limits = Limits(64, SIZE, max_num_seqs=8, max_num_batched_tokens=64, pipeline_depth=1, groups=groups)
    s = Scheduler(limits, vllm(version))
    keys = BlockKeys.of_spans(SIZE, [(1, 0, 14)], (1000, 0))
    assert s.submit(Request("0", keys, 14, 20))
    first = s.plan(0)
    second = s.plan(0)
    assert first is not None
    assert second is not None
    assert s.memory.used_blocks == held
