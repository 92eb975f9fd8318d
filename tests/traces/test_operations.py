"""Cutting, ordering, scaling and mixing keep links, quotes and contents right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.content import own_output
from pagecast.traces.checks import validate
from pagecast.traces.describe import describe
from pagecast.traces.operations import mix, scale, select, slice, sort
from pagecast.traces.prefixes import paths
from pagecast.traces.read import read
from pagecast.traces.schema import Trace, nominal_arrival_s

from .making import output_tokens, prompt_tokens, trace_of, traces


def shared_beginnings(trace: Trace) -> list[list[int]]:
    """For every two prompts, how many tokens they share from the start."""
    prompts = [prompt_tokens(trace, row) for row in range(len(trace))]
    return [[_common(a, b) for b in prompts] for a in prompts]


def _common(a: list, b: list) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def conversation() -> Trace:
    """Two sessions; each second turn quotes the answer before it, by its private name."""
    nan = float("nan")
    return trace_of(
        [
            [(0, 0, 4), (1, 0, 2)],
            [(0, 0, 4), (2, 0, 2)],
            [(0, 0, 4), (1, 0, 2), (own_output(0), 0, 3), (1, 2, 1)],
            [(0, 0, 4), (2, 0, 2), (own_output(1), 0, 3), (2, 2, 1)],
        ],
        arrival_s=[0.0, 10.0, nan, nan],
        after=[-1, -1, 0, 1],
        gap_s=[0.0, 0.0, 20.0, 5.0],
        session=["a", "b", "a", "b"],
    )


@given(traces(quoting=True), st.randoms(use_true_random=False))
def test_rows_in_any_order_share_what_they_shared(trace: Trace, random) -> None:
    rows = list(range(len(trace)))
    random.shuffle(rows)
    rows = rows[: random.randint(1, len(rows))]
    before, after = shared_beginnings(trace), shared_beginnings(select(trace, np.array(rows)))
    assert after == [[before[a][b] for b in rows] for a in rows]


def test_sorting_follows_nominal_arrivals_and_keeps_quotes() -> None:
    trace = conversation()
    assert nominal_arrival_s(trace).tolist() == [0.0, 10.0, 20.0, 15.0]
    ordered = sort(trace)
    assert ordered.requests["session"].tolist() == ["a", "b", "b", "a"]
    assert ordered.requests["after"].tolist() == [-1, -1, 1, 0]
    validate(ordered)
    assert prompt_tokens(ordered, 2)[6:9] == output_tokens(ordered, 1)
    assert prompt_tokens(ordered, 3)[6:9] == output_tokens(ordered, 0)


def test_a_turn_cut_from_its_predecessor_arrives_by_the_clock() -> None:
    cut = slice(conversation(), start_s=5.0, end_s=18.0)
    assert cut.requests["arrival_s"].tolist()[0] == 5.0
    assert cut.requests["after"].tolist() == [-1, 0]
    later = slice(conversation(), start_s=12.0)
    assert later.requests["arrival_s"].tolist() == [8.0, 3.0]
    assert "after" not in later.requests
    assert later.requests["session"].tolist() == ["a", "b"]
    validate(sort(later))
    assert later.spans is not None
    assert (later.spans.content >= 0).all(), "the answers quoted are not there any more: ordinary texts now"
    assert len(prompt_tokens(later, 0)) == 10


def test_slicing_by_rows_and_sessions() -> None:
    trace = conversation()
    assert slice(trace, sessions=1).requests["session"].tolist() == ["a", "a"]
    assert slice(trace, sessions=1).requests["after"].tolist() == [-1, 0]
    assert len(slice(trace, rows=(1, 3))) == 2
    with pytest.raises(BadInput, match="nothing is left"):
        slice(trace, start_s=1e9)


def test_scaling_leaves_think_times_alone_unless_told() -> None:
    trace = conversation()
    twice = scale(trace, 2.0)
    assert twice.requests["arrival_s"].tolist()[:2] == [0.0, 5.0]
    assert twice.requests["gap_s"].tolist() == [0.0, 0.0, 20.0, 5.0]
    assert scale(trace, 2.0, think_times=True).requests["gap_s"].tolist() == [0.0, 0.0, 10.0, 2.5]
    with pytest.raises(BadInput, match="rate factor 0"):
        scale(trace, 0.0)


def test_mixing_keeps_contents_and_sessions_apart() -> None:
    trace = conversation()
    both = mix([trace, trace])
    validate(both)
    assert len(both) == 8
    assert both.requests["session"].nunique() == 4
    assert paths(both).tokens == 2 * paths(trace).tokens
    assert paths(mix([trace, trace], share_contents=True)).tokens < 2 * paths(trace).tokens
    for row, before in enumerate(both.integers("after").tolist()):
        if before >= 0:
            assert prompt_tokens(both, row)[6:9] == output_tokens(both, before)


def test_mixing_with_a_trace_of_unique_prompts() -> None:
    both = mix([conversation(), trace_of([[], []])])
    validate(both)
    assert paths(both).tokens == paths(conversation()).tokens + 10


def test_validation_names_row_and_field() -> None:
    with pytest.raises(BadInput, match="row 1, field input_tokens: 0 is less than 1"):
        validate(trace_of([[], []], input_tokens=[5, 0]))
    with pytest.raises(BadInput, match="row 1, field arrival_s: goes back"):
        validate(trace_of([[], []], arrival_s=[2.0, 1.0]))
    with pytest.raises(BadInput, match="no requests"):
        validate(select(conversation(), np.array([], dtype=np.int64)))


def test_description_of_the_chat_sample() -> None:
    chat = read("chat")
    facts = describe(chat)
    assert facts["requests"] == 2000
    assert facts["sessions"]["count"] == chat.requests["session"].nunique()
    assert facts["input_tokens"]["total"] == chat.requests["input_tokens"].sum()
    assert facts["follow_others"] == (chat.requests["after"] >= 0).sum()
    assert 0.7 < facts["sharing"]["shareable_fraction"] < 1
    assert facts["sharing"]["working_set_tokens"] < facts["input_tokens"]["total"]


def test_description_counts_quoted_answers_and_a_computed_token() -> None:
    facts = describe(sort(conversation()))
    # The first prompt shares nothing, the second 4 tokens; later turns share their predecessor's 6 tokens
    # and 2 of its 3 answer tokens: the last one is never computed.
    assert facts["sharing"]["shareable_tokens"] == 0 + 4 + 8 + 8
    twice = describe(trace_of([[(0, 0, 9)]] * 2))
    assert twice["sharing"]["shareable_tokens"] == 8
    assert twice["interarrival_cv"] == 0
    assert describe(trace_of([[]]))["requests_per_s"] is None
