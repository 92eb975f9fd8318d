"""vLLM's kernels on Hopper: FlashAttention 3, and CUDA graphs that steps with prompts use in pieces.

FlashAttention 3 cuts a step's attention into tiles of 128 query rows (the heads of a group packed) by one
sequence's keys, walks them in blocks of 128 keys, and hands them to the SMs in order of request. Long
sequences of a decode batch are split so that no piece exceeds 1.1 times an SM's even share; beside a long
prompt chunk nothing is split (its `prepare_varlen_num_blocks` and `num_splits_heuristic`). What follows are
closed forms of that schedule, checked against a simulation of it over lognormal contexts and over those of
`azure_conv_repeat2`: an SM left alone runs at most twice as fast as its share of the memory allows.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from pagecast.sim.costs.decode_line import FEMTO, DecodeLine
from pagecast.sim.costs.families.attention_tiles import BLOCK, Tiles, tile_rows
from pagecast.sim.costs.families.common import (
    ARRIVALS,
    ARRIVING_TOKENS,
    PROMPT_STEPS,
    REQUESTS,
    REQUESTS_BESIDE_PROMPTS,
    SHAPES,
    TOKENS_AFTER_PROMPTS,
    UNGRAPHED_STEPS,
    prompt_tiles,
)
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.costs.families.term import Coefficients, ComputedStep, KernelFamily, Term, Units
from pagecast.sim.costs.families.uneven_line import UnevenLine

EVEN_TOKENS = 64  # a batch is even when its longest context exceeds the mean by less than this
LONGEST_TILE = 0.36  # of the longest tile's time is not hidden behind other tiles
MOST_IMBALANCE = 0.15  # splitting long sequences keeps the idle share below this
# Tiles of whole sequences, as a share of the SMs, from which on and until which idle SMs begin to count.
IMBALANCE_FROM, IMBALANCE_OVER = 0.18, 0.18
SHARE = 1.1  # of an SM's even share, the longest piece of a split sequence
ALONE = 2.0  # how much faster an SM reads when few others do
SPLIT_BELOW = 0.8  # of the SMs that a prompt chunk's tiles may take for sequences to be split
# Fitted to the synchronous steps of `azure_conv` on top of measured operations.
EXPOSED = 0.43
# Its `use_one_mma_wg`: where no query packs more rows, one warpgroup computes a tile of so many.
NARROW_ROWS = 64
TILES = Tiles(rows=BLOCK, packed=True, exposed=EXPOSED, narrow_rows=NARROW_ROWS)
# vLLM's host time for n-grams beyond its calibrated costs, per request of a step and more in a step with
# prompts: the mean of three runs on three hosts (46, 103 and 119 us; 1.0, 0.7 and 2.0 ms:
# `vllm-h200-qwen3-8b-ngram-azure`, `-later` and `-14`), whose sums differ by 45%.
LOOKUP_NS, LOOKUP_PROMPT_NS, LOOKUP_SD = 89_000, 1_230_000, 0.45


def imbalance_cap(shape: TileShape, n: int) -> float:
    """The most that idle SMs add to a decode batch of `n` requests, as a share of its work.

    With few requests every sequence is split finely and nothing is lost; the loss is in full once the
    tiles of whole sequences are about a third of the SMs.
    """
    waves = shape.kv_heads * n / shape.sms
    return MOST_IMBALANCE * min(max((waves - IMBALANCE_FROM) / IMBALANCE_OVER, 0.0), 1.0)


def tail_tokens(shape: TileShape) -> float:
    """Context tokens whose reading takes as long as what shows of one token of the longest sequence."""
    return LONGEST_TILE * shape.sms / shape.kv_heads


def even_waves(shape: TileShape, n: int) -> float:
    """Time over work of a decode batch whose `n` contexts are equal: the last wave is seldom full."""
    pieces = max(1, -int(-shape.sms // (SHARE * shape.kv_heads * n)))
    tiles = n * shape.kv_heads * pieces
    full, rest = divmod(tiles, shape.sms)
    last = max(1.0 / ALONE, rest / shape.sms) if rest else 0.0
    return (full + last) * shape.sms / tiles


def splits_beside(shape: TileShape, chunk_tokens: int) -> bool:
    """Whether sequences are still split beside a prompt chunk of this many tokens."""
    return shape.kv_heads * -(-chunk_tokens // tile_rows(shape.group)) < SPLIT_BELOW * shape.sms


@lru_cache(SHAPES)
def _kv_tokens(shape: TileShape) -> Units:
    """Context tokens that decode attention reads, with the time of SMs left idle."""
    tail = tail_tokens(shape)

    @lru_cache(1 << 12)
    def cap(n: int) -> float:
        return imbalance_cap(shape, n)

    @lru_cache(1 << 12)
    def waves(n: int) -> float:
        return even_waves(shape, n)

    def units(step: ComputedStep) -> float:
        n, ctx, longest = step.n, step.ctx, step.longest
        if not n:
            return 0.0
        if not step.prefill and longest - ctx / n < EVEN_TOKENS:
            return n * ceil((longest + 1) / BLOCK) * BLOCK * waves(n)
        return ctx + BLOCK / 2 * n + min(cap(n) * ctx, tail * (longest - ctx / n))

    return units


@lru_cache(SHAPES)
def _prompt_tiles(shape: TileShape) -> Units:
    """Key blocks of prompt attention on each SM.

    Where the longest tile is not split, also those by which it outlasts all others' work.
    """
    share = shape.kv_heads / shape.sms
    tiles = prompt_tiles(shape)

    @lru_cache(1 << 14)
    def splits(tokens: int) -> bool:
        return splits_beside(shape, tokens)

    def units(step: ComputedStep) -> float:
        prefill = step.prefill
        if not prefill:
            return 0.0
        work = tiles(step)
        if splits(max([chunk[0] for chunk in prefill])):
            return work
        keys = max([chunk[0] + chunk[1] for chunk in prefill])
        read = (step.ctx / BLOCK + step.n / 2) * share
        return work + max(0.0, max(step.longest, keys) / BLOCK - work - read)

    return units


def _line(shape: TileShape, terms: Coefficients, n: int, fixed: float) -> DecodeLine:
    """Even contexts in whole waves, a tail that grows with the longest, and a cap once it is split."""
    kv = terms.get("kv_token", 0.0)
    rounding = kv * BLOCK / 2 * n

    def line(base: float, per_ctx: float, per_max: float) -> DecodeLine:
        return DecodeLine(n, max(round(base * FEMTO), 0), round(per_ctx * FEMTO), round(per_max * FEMTO))

    waves, cap, tail = even_waves(shape, n), imbalance_cap(shape, n), tail_tokens(shape)
    even = line(fixed + rounding * waves, kv * waves, 0.0)
    capped = line(fixed + rounding, kv * (1 + cap), 0.0)
    if cap == 0.0:
        return UnevenLine.of(capped, capped, even, EVEN_TOKENS)
    uneven = line(fixed + rounding, kv * (1 - tail / n), kv * tail)
    return UnevenLine.of(uneven, capped, even, EVEN_TOKENS)


FLASH_ATTENTION_3 = KernelFamily(
    "flash-attention-3",
    (
        REQUESTS,
        PROMPT_STEPS,
        UNGRAPHED_STEPS,
        REQUESTS_BESIDE_PROMPTS,
        TOKENS_AFTER_PROMPTS,
        Term(
            "kv_token",
            "a context token read by decode attention, with the time of SMs left idle",
            _kv_tokens,
            needed=True,
        ),
        Term(
            "prompt_tile",
            "a tile x key block of prompt attention, as many as an SM takes",
            _prompt_tiles,
            needed=True,
        ),
        ARRIVALS,
        ARRIVING_TOKENS,
    ),
    _line,
    lookup_ns=LOOKUP_NS,
    lookup_prompt_ns=LOOKUP_PROMPT_NS,
    lookup_sd=LOOKUP_SD,
)
