"""Hit ratios equal those of a cache simulated block by block, and the published table."""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.traces.hits import curve, hits
from pagecast.traces.read import read
from pagecast.traces.schema import Trace, table

from .making import prompt_tokens, trace_of, traces


def simulated(trace: Trace, capacity: int, block_size: int) -> tuple[int, int, int]:
    """References, hits and distinct blocks of one LRU cache, as plainly as it can be said."""
    cache: OrderedDict[tuple, None] = OrderedDict()
    references = hits_so_far = 0
    seen = set()
    for row in range(len(trace)):
        tokens = tuple(prompt_tokens(trace, row))
        missed = False
        for end in range(block_size, len(tokens) + block_size, block_size):
            block = tokens[:end]
            references += 1
            missed = missed or block not in cache
            hits_so_far += not missed
            cache[block] = None
            cache.move_to_end(block)
            seen.add(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return references, hits_so_far, len(seen)


@given(traces(quoting=True), st.integers(1, 6), st.integers(1, 25))
def test_one_pass_equals_a_simulated_cache(trace: Trace, block_size: int, capacity: int) -> None:
    result = hits(trace, [capacity], block_size)
    references, reuses, distinct = simulated(trace, capacity, block_size)
    assert (result.references, result.unique_blocks) == (references, distinct)
    assert result.capacity[capacity] == pytest.approx(reuses / references)
    assert result.infinite == pytest.approx(simulated(trace, 10**6, block_size)[1] / references)


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=8), st.integers(1, 3)
)
def test_prompts_as_token_ids(prompts: list[list[int]], block_size: int) -> None:
    lengths = [len(prompt) for prompt in prompts]
    columns = {
        "arrival_s": np.zeros(len(prompts)),
        "input_tokens": lengths,
        "output_tokens": [1] * len(prompts),
    }
    ids = [np.array(prompt, dtype=np.int64) for prompt in prompts]
    trace = Trace("ids", table(columns), token_ids=ids)
    references, reuses, distinct = simulated(trace, 4, block_size)
    result = hits(trace, [4], block_size)
    assert (result.references, result.unique_blocks) == (references, distinct)
    assert result.capacity[4] == pytest.approx(reuses / references)


def test_mooncake_conversation_as_published(shared: Path) -> None:
    trace = read(shared / "traces/mooncake_conversation_trace.jsonl.zst")
    result = hits(trace, [1_000, 10_000, 30_000, 50_000, 100_000])
    assert (result.references, result.unique_blocks) == (288_500, 182_790)
    assert round(result.infinite, 4) == 0.3664
    assert [round(ratio, 4) for ratio in result.capacity.values()] == [0.0445, 0.2112, 0.3257, 0.3546, 0.3637]


def test_scopes_share_nothing() -> None:
    prompts = [[(0, 0, 8)]] * 3
    assert hits(trace_of(prompts), [100], 4).infinite == pytest.approx(4 / 6)
    apart = trace_of(prompts, salt=["a", "b", "a"])
    assert hits(apart, [100], 4).infinite == pytest.approx(2 / 6)
    assert hits(trace_of(prompts, model=["a", None, "b"]), [100], 4).infinite == 0


def test_unique_prompts_never_hit() -> None:
    result = hits(trace_of([[], [], []]), [10], 2)
    assert (result.references, result.unique_blocks, result.infinite) == (9, 9, 0.0)


def test_the_curve_rises_to_the_infinite_ratio() -> None:
    result = hits(read("chat"), [10**9], 16)
    capacities, ratios = curve(result)
    assert (np.diff(ratios) >= 0).all()
    assert ratios[-1] == result.infinite == result.capacity[10**9]
    assert capacities[-1] > 1000


@pytest.mark.parametrize(("capacities", "block_size"), [([0], 16), ([10], 0), ([-5], 16)])
def test_nonsense_is_refused(capacities: list[int], block_size: int) -> None:
    with pytest.raises(BadInput):
        hits(trace_of([[]]), capacities, block_size)
