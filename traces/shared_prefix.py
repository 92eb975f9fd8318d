"""Contents for requests of which only a hit rate is known: one text that all prompts begin with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.content import own_prompt
from pagecast.traces.arrays import Ints
from pagecast.traces.schema import Spans, Trace, starts
from pagecast.traces.seeds import checked_seed


def with_hit_rate(
    trace: Trace, rate: float, *, block_tokens: int = 16, seed: int = 0, even: bool = False
) -> Trace:
    """The trace with prompts that begin with a share `rate` of one text, in blocks of `block_tokens`.

    `even`: with equally many tokens of it, as system prompts are, but for prompts that are shorter. A cache
    that holds this text then has the hit rate. Where the hits of a server really come from, and what
    they need to stay in the cache, its hit rate does not tell. Errors: BadInput for a rate out of 0 to 1.
    """
    if not 0 <= rate <= 1:
        raise BadInput(f"hit rate {rate:g}: give a share of the prompt tokens, from 0 to 1")
    tokens = trace.integers("input_tokens")
    random = np.random.default_rng(checked_seed(seed))
    # Whole blocks are found again, and a token of each prompt is computed: round up as often as it takes.
    own_share = np.minimum(_even_length(tokens, rate), tokens) if even else tokens * rate
    blocks = np.floor(own_share / block_tokens + random.random(len(tokens))).astype(np.int64)
    shared = np.minimum(blocks, (tokens - 1) // block_tokens) * block_tokens
    rest = tokens - shared
    own = np.array([own_prompt(row) for row in range(len(tokens))], dtype=np.int64)
    counts = (shared > 0).astype(np.int64) + 1
    first = starts(counts)
    content, offset, length = (np.zeros(int(first[-1]), dtype=np.int64) for _ in range(3))
    content[first[1:] - 1], length[first[1:] - 1] = own, rest
    length[first[:-1][shared > 0]] = shared[shared > 0]
    part = "as many tokens of one text" if even else "a share of one text"
    how = f"all prompts begin with {part}, for a hit rate does not tell what is shared"
    note = f"hit rate {rate:.1%}: {how if rate else 'no prompts share anything'}"
    kept = tuple(
        each for each in trace.notes if not each.startswith("the file tells lengths and no contents")
    )
    spans = Spans(first, content, offset, length)
    return replace(trace, spans=spans, token_ids=None, lengths_only=False, notes=(*kept, note))


def assume_reuse(trace: Trace, share: float, *, block_tokens: int = 16) -> Trace:
    """A trace of lengths alone as it is where a share of its prompt tokens is found in the cache.

    All prompts begin with so much of one text, which takes memory once. So with a share that is not exceeded
    in truth, a server does as well as it can, and without any (`without_reuse`) as badly: the two bracket it.
    Errors: BadInput for a share out of 0 to 1, and for a trace with contents.
    """
    if not trace.lengths_only:
        raise BadInput(f"{trace.name}: has contents of prompts, so its reuse is known; assume none")
    if not 0 <= share <= 1:
        raise BadInput(f"reuse {share:g}: give a share of the prompt tokens, from 0 to 1")
    made = with_hit_rate(trace, share, block_tokens=block_tokens)
    note = (
        f"reuse is assumed: {share:.0%} of prompt tokens are of one text that all prompts begin with; the "
        "answer lies between this and the one without reuse, where no more is shared"
    )
    return replace(made, notes=(*made.notes[:-1], note), assumed_reuse=share)


def without_reuse(trace: Trace) -> Trace:
    """The trace that `assume_reuse` was given."""
    return replace(trace, spans=None, lengths_only=True, assumed_reuse=None)


def _even_length(tokens: Ints, rate: float) -> float:
    """The length that is a share `rate` of all tokens where each prompt has so much, or all that it has."""
    low, high = 0.0, float(tokens.max())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if np.minimum(middle, tokens).sum() > rate * tokens.sum() else (middle, high)
        )
    return low


def most_hits(trace: Trace, block_tokens: int) -> float:
    """The hit rate of prompts that are all in the cache: whole blocks, and a token of each is computed."""
    tokens = trace.integers("input_tokens")
    return float(((tokens - 1) // block_tokens * block_tokens).sum() / tokens.sum())
