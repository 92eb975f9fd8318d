"""The tree finds exactly the tokens that prompts share with earlier ones."""

from hypothesis import given
from pagecast.traces.prefixes import paths
from pagecast.traces.schema import Trace

from .making import output_tokens, prompt_tokens, traces


def longest_match(earlier: list[list], prompt: list) -> int:
    best = 0
    for other in earlier:
        length = 0
        while length < min(len(other), len(prompt)) and other[length] == prompt[length]:
            length += 1
        best = max(best, length)
    return best


@given(traces(quoting=True))
def test_matched_tokens(trace: Trace) -> None:
    prompts = [prompt_tokens(trace, row) for row in range(len(trace))]
    lengths = paths(trace).matched.tolist()
    assert lengths == [longest_match(prompts[:row], prompts[row]) for row in range(len(trace))]


@given(traces(quoting=True))
def test_matched_tokens_with_answers_kept(trace: Trace) -> None:
    prompts = [prompt_tokens(trace, row) for row in range(len(trace))]
    kept = [prompts[row] + output_tokens(trace, row)[:-1] for row in range(len(trace))]
    lengths = paths(trace, with_outputs=True).matched.tolist()
    assert lengths == [longest_match(kept[:row], prompts[row]) for row in range(len(trace))]


@given(traces(quoting=True))
def test_the_tree_holds_every_distinct_beginning_once(trace: Trace) -> None:
    prompts = [prompt_tokens(trace, row) for row in range(len(trace))]
    beginnings = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    where = paths(trace)
    assert where.tokens == len(beginnings)
    named = {
        (chain, position)
        for chain, begin, end in zip(
            where.chain.tolist(), where.begin.tolist(), where.end.tolist(), strict=True
        )
        for position in range(begin, end)
    }
    assert len(named) == len(beginnings)
    assert (where.end - where.begin).sum() == sum(map(len, prompts))
