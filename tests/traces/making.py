"""Makes small traces for the tests, by hand and at random."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from pagecast.sim.core.identity.content import own_output, own_prompt
from pagecast.traces.schema import Spans, Trace, starts, table

Prompt = Sequence[tuple[int, int, int]]


def trace_of(prompts: Sequence[Prompt], **columns: Sequence) -> Trace:
    """A trace of the given prompts, one per second; an empty one is unique and has 5 tokens."""
    made = {
        "arrival_s": np.arange(len(prompts), dtype=float),
        "input_tokens": [sum(length for _, _, length in prompt) or 5 for prompt in prompts],
        "output_tokens": [3] * len(prompts),
        **columns,
    }
    flat = np.array([span for prompt in prompts for span in prompt], dtype=np.int64).reshape(-1, 3)
    counts = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    return Trace("made", table(made), Spans(starts(counts), flat[:, 0], flat[:, 1], flat[:, 2]))


def prompt_tokens(trace: Trace, row: int) -> list[tuple[int, int]]:
    """A prompt as one (content, offset) a token: equal exactly where the tokens are."""
    if trace.token_ids is not None:
        return [(0, token) for token in trace.token_ids[row].tolist()]
    spans = trace.spans.row(row) if trace.spans is not None else []
    if not spans:
        spans = [(own_prompt(row), 0, int(trace.integers("input_tokens")[row]))]
    return [(c, o + i) for c, o, n in spans for i in range(n)]


def output_tokens(trace: Trace, row: int) -> list[tuple[int, int]]:
    """What a request generates, in the same form."""
    content = int(trace.integers("output_content")[row])
    content = own_output(row) if content < 0 else content
    offset = int(trace.integers("output_offset")[row])
    return [(content, offset + i) for i in range(int(trace.integers("output_tokens")[row]))]


@st.composite
def traces(draw: st.DrawFn, quoting: bool = False) -> Trace:
    """Random prompts of few texts, so that many begin alike; with `quoting`, of earlier answers too."""
    prompts: list[list[tuple[int, int, int]]] = []
    for row in range(draw(st.integers(1, 12))):
        texts = [0, 1, 2]
        if quoting and row:
            texts += [own_output(draw(st.integers(0, row - 1))), own_prompt(draw(st.integers(0, row - 1)))]
        if prompts and draw(st.booleans()):
            # Go on from an earlier prompt, or from a part of it.
            base = draw(st.sampled_from(prompts))
            begin = list(base[: draw(st.integers(0, len(base)))])
        else:
            begin = []
        span = st.tuples(st.sampled_from(texts), st.sampled_from([0, 0, 3]), st.integers(1, 9))
        prompts.append(begin + draw(st.lists(span, max_size=3)))
    return trace_of(prompts)
