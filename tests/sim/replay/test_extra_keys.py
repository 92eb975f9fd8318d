"""Adapters, salts and multimodal items in a trace, which separate equal tokens in the cache."""

import numpy as np
import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.content import item, with_items
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replay.simulation import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Spans, Trace, starts, table


def trace(count: int = 2, tokens: int = 64, gap_s: float = 1.0, **columns) -> Trace:
    """Requests with one and the same prompt."""
    made = {
        "arrival_s": [gap_s * number for number in range(count)],
        "input_tokens": [tokens] * count,
        "output_tokens": [40] * count,
    }
    zeros = np.zeros(count, np.int64)
    spans = Spans(starts(zeros + 1), zeros + 5, zeros, zeros + tokens)
    return Trace("made", table({**made, **columns}), spans)


def hits(work: Trace, **fields) -> list[int]:
    result = replay(work, Scenario(costs="roofline", num_gpu_blocks=200, **fields), check_every=1)
    return result.requests["cached_tokens"].tolist()


def test_an_item_replaces_its_placeholders():
    spans = with_items([(1, 0, 10), (2, 3, 6)], [("a", 2, 3), ("b", 8, 4)])
    assert spans == [
        (1, 0, 2),
        (item("a"), 0, 3),
        (1, 5, 3),
        (item("b"), 0, 2),
        (item("b"), 2, 2),
        (2, 5, 4),
    ]
    assert item("a") != item("b") and item("a") < -(1 << 60)


@pytest.mark.parametrize(
    ("columns", "cached"),
    [
        ({}, 48),
        ({"adapter": ["x", "x"]}, 48),
        ({"adapter": ["x", None]}, 0),
        ({"salt": ["s", "t"]}, 0),
        ({"multimodal": ["cat@20+20", "cat@20+20"]}, 48),
        ({"multimodal": ["cat@20+20", "dog@20+20"]}, 16),
        ({"multimodal": ["cat@20+20", "cat@21+20"]}, 16),
        ({"multimodal": ["cat@0+5 dog@40+8", "cat@0+5 cow@40+8"]}, 32),
    ],
)
def test_a_prefix_is_found_as_far_as_everything_agrees(columns, cached):
    assert hits(trace(**columns)) == [0, cached]
    ids = [np.arange(64)] * 2
    assert hits(Trace("ids", trace(**columns).requests, token_ids=ids)) == [0, cached]


def test_adapters_beyond_a_steps_most_wait_and_others_pass_them():
    work = trace(4, gap_s=0.0, adapter=["a", "b", "a", None])
    both = replay(work, Scenario(costs="roofline")).requests["admitted_s"]
    assert both.nunique() == 1
    one = replay(work, Scenario(costs="roofline", max_loras=1), check_every=1).requests
    admitted = one["admitted_s"].tolist()
    assert admitted[0] == admitted[2] == admitted[3] < admitted[1]
    # It takes the place of the adapter in the step after the last token is planned.
    assert one["first_token_s"][1] >= one["finished_s"][0]


def test_a_replay_with_few_adapters_is_the_same_step_by_step():
    adapters = [f"adapter {number % 3}" for number in range(30)]
    work = trace(30, gap_s=0.01, adapter=adapters)
    scenario = Scenario(costs="roofline", max_loras=2, max_num_seqs=4)
    fast, slow = (replay(work, scenario, fast_forward=fast) for fast in (True, False))
    assert fast.requests.equals(slow.requests)


@pytest.mark.parametrize("text", ["cat", "cat@1", "cat@1+0", "@1+2", "cat@60+5", "a@3+3 b@5+1"])
def test_an_item_that_can_not_be_is_refused(text):
    with pytest.raises(BadInput, match="row 0: multimodal"):
        Feed(trace(multimodal=[text, None]), 16).request(0, 0)


def test_images_wait_for_the_encoder_which_takes_the_longest():
    items = [f"{number}@8+40" for number in range(4)]
    work = trace(4, gap_s=0.0, multimodal=items)

    def chunks(**fields) -> int:
        scenario = Scenario(costs="roofline", num_gpu_blocks=200, max_num_seqs=4, **fields)
        return len(replay(work, scenario).steps)

    assert chunks(max_num_batched_tokens=2048) < chunks(max_num_batched_tokens=2048, encoder_tokens=40)
    with pytest.raises(BadInput, match="encoder_tokens is 39, and the trace's longest image has 40 tokens"):
        chunks(encoder_tokens=39)
