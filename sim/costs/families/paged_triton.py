"""Our own engine's Triton kernels: decode attention that splits work evenly, prompt attention cut in pieces.

Decode attention shares the blocks of a batch evenly, so that only their number counts. Prompt attention runs
one program per SM over pieces of tiles, most keys first, as `kernels.prefill_plan` cuts them. Steps with
prompts are padded to CUDA graphs of their own; the kernels of larger ones are launched one by one, and such
a step lasts as long as its launches at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import sqrt

import numpy as np
from pagecast.sim.costs.decode_line import FEMTO, DecodeLine
from pagecast.sim.costs.families.attention_tiles import BLOCK, tile_rows
from pagecast.sim.costs.families.common import (
    ARRIVALS,
    ARRIVING_TOKENS,
    LAUNCH_FLOOR,
    PROMPT_STEP,
    REQUEST,
    REQUESTS_BESIDE_PROMPTS,
    SHAPES,
    TOKENS_AFTER_PROMPTS,
    every_shape,
)
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.costs.families.term import (
    Coefficients,
    ComputedStep,
    KernelFamily,
    Place,
    Term,
    Units,
)
from pagecast.sim.costs.pieces import WindowLine
from pagecast.traces.arrays import Ints

# Of the prefill kernel: the most pieces waiting to be merged, of an SM and of a head, the least key blocks of
# a piece, and what merging a round of pieces costs in key blocks.
PIECES_PER_SM, MOST_PIECES, LEAST_PIECE, MERGING = 2, 80, 2, 3
# Of the decode kernel on an H200, with KV of 128 dimensions: tokens x KV heads that a step reads before
# memory streams at its full rate, those of a shared prefix of which half the readers find in the cache, and
# how much of one too long for it they find at least (least error on the sweeps of two pairs of H200s).
STREAMING, CACHED, LONG_SHARED = 196_608, 8_192, 0.5
LIGHT = 2_048  # tokens of a step that leaves a GPU half of what it gains by a rest
# A GPU that has just done much arithmetic runs at lower clocks. Each decode step after it loses `COOLING`
# times what the one before lost (seen after prompts of 256 to 8,192 tokens on an H200). A replay charges the
# losses of four steps to the first: `COOLING_STEPS` times its own.
COOLING = 0.75
COOLING_STEPS = (1 - COOLING**4) / (1 - COOLING)
# The slope of what synchronous steps took beyond their calibrated costs in a run whose n-grams were looked up
# and never found (3,078 decode steps of up to 31 requests, Qwen3-8B on an H200: `h200f-qwen3-8b-ngram-chat`).
LOOKUP_NS = 15_200


def first_tokens(shape: TileShape) -> int:
    """Context tokens of a decode step that are read before memory streams: each costs somewhat more."""
    return STREAMING // shape.kv_heads


def cached_share(shape: TileShape, shared: float, n: int) -> float:
    """Share of the common context of `n` decoding requests that a cache holds, by their mean prefix.

    `shared` counts the context tokens that stand in another one's blocks too.
    """
    prefix = shared / max(n - 1, 1) * shape.kv_heads / CACHED
    return 1 / (1 + prefix**2)


def light_share(tokens: int) -> float:
    """How far a step of so many tokens leaves a GPU its clocks: attention is faster in such steps."""
    return 1 / (1 + (tokens / LIGHT) ** 2)


def prompt_span(shape: TileShape, chunks: Sequence[tuple[int, int]]) -> float:
    """Key blocks that the busiest SM walks: chunks of (tokens, context).

    One program per SM takes every n-th of a step's (piece, KV head) pairs, most keys first, so that the first
    of them has the most to do: every share of the work is rounded up. Tiles are cut in pieces where they
    would leave SMs idle (`prompt_pieces`).
    """
    blocks = np.sort(prompt_pieces(shape, chunks))[::-1]
    turns = np.arange(-(-len(blocks) * shape.kv_heads // shape.sms))
    return float(blocks[turns * shape.sms // shape.kv_heads].sum())


def prompt_pieces(shape: TileShape, chunks: Sequence[tuple[int, int]]) -> Ints:
    """Key blocks of each piece of prompt attention on one KV head, as `kernels.prefill_plan` cuts them."""
    rows = tile_rows(shape.group)
    tiles = np.concatenate([_tile_blocks(tokens, context, rows) for tokens, context in chunks])
    cuts = _cuts(tiles, shape.kv_heads, shape.sms)
    tile = np.repeat(np.arange(len(tiles)), cuts)
    nth = np.arange(len(tile)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    return np.asarray((nth + 1) * tiles[tile] // cuts[tile] - nth * tiles[tile] // cuts[tile], np.int64)


def _cuts(tiles: Ints, kv_heads: int, sms: int) -> Ints:
    """Into how many pieces each tile is cut: where no tile exceeds an even share, only those of the last
    round of the SMs, else any, all to the greatest length with which attention and merging end first."""
    cuts = np.ones_like(tiles)
    most = min(PIECES_PER_SM * sms // kv_heads, MOST_PIECES)
    if most < 2:
        return cuts
    among = np.arange(len(tiles))
    if int(tiles.max()) * sms <= int(tiles.sum()) * kv_heads:
        among = np.argsort(-tiles, kind="stable")[len(tiles) // (sms // kv_heads) * (sms // kv_heads) :]
    mine = tiles[among]
    longest = int(mine.max(initial=0))
    if min(most, longest // LEAST_PIECE) < 2:
        return cuts
    greatest = -(-longest // np.arange(1, min(most, longest // LEAST_PIECE) + 1))
    pieces = -(-mine // greatest[:, None])
    number = pieces.sum(1)
    waiting = number - (pieces == 1).sum(1)
    rounds = -(-number * kv_heads // sms) * (greatest + 1)
    shared = -(-(mine.sum() + number) * kv_heads // sms) + greatest + 1
    merging = np.where(waiting > 0, 1, 0) + -(-MERGING * waiting * kv_heads // sms)
    cost = np.where(waiting <= most, np.minimum(rounds, shared) + merging, np.iinfo(np.int64).max)
    cuts[among] = pieces[np.argmin(cost)]
    return cuts


def _tile_blocks(tokens: int, context: int, rows: int) -> Ints:
    """Key blocks of each tile of a chunk, most first."""
    ends = np.minimum(np.arange(rows, tokens + rows, rows), tokens) + context
    return np.asarray(-(-ends[::-1] // BLOCK), np.int64)


@lru_cache(SHAPES)
def _spans(shape: TileShape) -> Units:
    @lru_cache(1 << 16)
    def span(prefill: tuple[tuple[int, int], ...]) -> float:
        return prompt_span(shape, prefill)

    return lambda step: span(step.prefill) if step.prefill else 0.0


def _light_spans(shape: TileShape) -> Units:
    span = _spans(shape)
    return lambda step: -light_share(step.tokens) * span(step) if step.prefill else 0.0


def _warmth(step: ComputedStep) -> float:
    """Root of the tokens of the last step with prompts, fading step by step."""
    return sqrt(step.last) * COOLING ** (step.since - 1) if step.since else 0.0


def _first_kv_tokens(shape: TileShape) -> Units:
    first = first_tokens(shape)
    return lambda step: min(step.ctx, first)


def _shared_tokens(shape: TileShape) -> Units:
    return lambda step: -step.shared * _least_share(cached_share(shape, step.shared, step.n))


def _far_shared_tokens(shape: TileShape) -> Units:
    return lambda step: -step.shared * (1 - cached_share(shape, step.shared, step.n))


def _least_share(cached: float) -> float:
    return LONG_SHARED + (1 - LONG_SHARED) * cached


def _line(shape: TileShape, terms: Coefficients, n: int, fixed: float) -> DecodeLine:
    kv, first = terms.get("kv_token", 0.0), first_tokens(shape)
    base = fixed + kv * BLOCK / 2 * n
    plain = DecodeLine(n, max(round(base * FEMTO), 0), round(kv * FEMTO), 0)
    slope = round(terms.get("first_kv_token", 0.0) * FEMTO)
    return WindowLine.over(plain, first // n, slope) if slope and n <= first else plain


def _warm_ns(terms: Coefficients, after: int) -> float:
    return terms.get("decode_after_prompts", 0.0) * COOLING_STEPS * sqrt(after)


def _shared_ns(shape: TileShape, terms: Coefficients, tokens: int, requests: int) -> float:
    cached = cached_share(shape, tokens, requests)
    each = terms.get("shared_token", 0.0) * _least_share(cached)
    each += terms.get("far_shared_token", 0.0) * (1 - cached)
    # A context that several read is not cheaper than none.
    return min(each, terms.get("kv_token", 0.0)) * tokens


PAGED_TRITON = KernelFamily(
    "pagecast",
    (
        Term(
            REQUEST,
            "a request in the step: scheduling, sampling, handing out its token",
            every_shape(lambda step: 0.0 if step.ungraphed else step.n + len(step.prefill)),
            Place.HOST,
            needed=True,
        ),
        Term(
            PROMPT_STEP,
            "a step with prompt chunks, of which no full CUDA graph runs from sampling to sampling",
            every_shape(lambda step: 1.0 if step.prefill and not step.ungraphed else 0.0),
        ),
        Term("prompt_chunk", "a prompt chunk", every_shape(lambda step: len(step.prefill)), Place.HOST),
        REQUESTS_BESIDE_PROMPTS,
        TOKENS_AFTER_PROMPTS,
        Term(
            "decode_after_prompts",
            "a decode step soon after prompts: root of their tokens, fading step by step",
            every_shape(_warmth),
            Place.FADING,
            needed=True,
        ),
        Term(
            "kv_token",
            "a context token read by decode attention",
            every_shape(lambda step: step.ctx + BLOCK / 2 * step.n),
            needed=True,
        ),
        Term(
            "first_kv_token",
            "a context token among a step's first, until memory streams",
            _first_kv_tokens,
        ),
        Term(
            "shared_token",
            "a context token that another decoding request reads too: less, by what a cache spares",
            _shared_tokens,
            Place.SHARING,
        ),
        Term(
            "prompt_tile",
            "a tile x key block of prompt attention, as many as the busiest SM takes",
            _spans,
            needed=True,
        ),
        Term(
            "light_prompt_tile",
            "the same of a step with few tokens, which leaves a GPU its clocks: less",
            _light_spans,
        ),
        Term(
            "prompt_kv_token",
            "a context token that a prompt chunk reads, for all its tiles together",
            every_shape(lambda step: sum([chunk[1] for chunk in step.prefill])),
        ),
        Term(
            LAUNCH_FLOOR,
            "launching a step with prompts, which its device time can't go below",
            every_shape(lambda step: 1.0 if step.ungraphed else 0.0),
            Place.LAUNCH,
        ),
        ARRIVALS,
        ARRIVING_TOKENS,
        Term(
            "far_shared_token",
            "a shared token of a prefix too long for the cache: less still, by what readers together spare",
            _far_shared_tokens,
            Place.SHARING,
        ),
    ),
    _line,
    _warm_ns,
    _shared_ns,
    single_tokens_decode=True,
    records_ends=True,
    lookup_ns=LOOKUP_NS,
)
