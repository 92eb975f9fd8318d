"""Kernels of which only the work is known: no schedule of tiles, CUDA graphs up to a size.

For engines other than those whose kernels have a file of their own, as vLLM with FlashInfer.
"""

from __future__ import annotations

from pagecast.sim.costs.decode_line import FEMTO, DecodeLine
from pagecast.sim.costs.families.attention_tiles import BLOCK
from pagecast.sim.costs.families.common import (
    ARRIVALS,
    ARRIVING_TOKENS,
    PROMPT_STEPS,
    REQUESTS,
    REQUESTS_BESIDE_PROMPTS,
    TOKENS_AFTER_PROMPTS,
    UNGRAPHED_STEPS,
    every_shape,
    prompt_tiles,
)
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.costs.families.term import Coefficients, ComputedStep, KernelFamily, Term


def _kv_tokens(step: ComputedStep) -> float:
    return step.ctx + BLOCK / 2 * step.n


def _line(_: TileShape, terms: Coefficients, n: int, fixed: float) -> DecodeLine:
    kv = terms.get("kv_token", 0.0)
    base = fixed + kv * BLOCK / 2 * n
    return DecodeLine(n, max(round(base * FEMTO), 0), round(kv * FEMTO), 0)


PLAIN = KernelFamily(
    "plain",
    (
        REQUESTS,
        PROMPT_STEPS,
        UNGRAPHED_STEPS,
        REQUESTS_BESIDE_PROMPTS,
        TOKENS_AFTER_PROMPTS,
        Term(
            "kv_token",
            "a context token read by decode attention",
            every_shape(_kv_tokens),
            needed=True,
        ),
        Term(
            "prompt_tile",
            "a tile x key block of prompt attention, as many as an SM takes",
            prompt_tiles,
            needed=True,
        ),
        ARRIVALS,
        ARRIVING_TOKENS,
    ),
    _line,
)
