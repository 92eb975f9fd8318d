"""Terms of the host and of launches, and the work of prompts, which engines share."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from pagecast.sim.costs.families.attention_tiles import chunk_tiles
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.costs.families.term import ComputedStep, Place, Term, Units

REQUEST = "request"
PROMPT_STEP = "prompt_step"
LAUNCH_FLOOR = "launch_floor"
SHAPES = 4  # whose units are kept, so that all draws of a calibration count them once


def every_shape(units: Units) -> Callable[[TileShape], Units]:
    """Units that do not depend on the set-up."""
    return lambda _: units


@lru_cache(SHAPES)
def prompt_tiles(shape: TileShape) -> Units:
    """Key blocks of prompt attention on each SM, where the tiles are shared evenly."""
    share, group = shape.kv_heads / shape.sms, shape.group

    @lru_cache(1 << 16)
    def tiles(tokens: int, context: int) -> float:
        return chunk_tiles(group, tokens, context)

    def units(step: ComputedStep) -> float:
        return sum([tiles(*chunk) for chunk in step.prefill]) * share

    return units


def _requests(step: ComputedStep) -> float:
    return step.n + len(step.prefill)


def _tokens_after_prompts(step: ComputedStep) -> float:
    return min(step.tokens, step.after) if step.prefill else 0.0


REQUESTS = Term(
    REQUEST,
    "a request in the step: scheduling, sampling, handing out its token",
    every_shape(_requests),
    Place.HOST,
    needed=True,
)
PROMPT_STEPS = Term(
    PROMPT_STEP,
    "a step with prompt chunks, of which no full CUDA graph runs from sampling to sampling",
    every_shape(lambda step: 1.0 if step.prefill else 0.0),
)
REQUESTS_BESIDE_PROMPTS = Term(
    "request_beside_prompt",
    "a decoding request in a step with prompt chunks",
    every_shape(lambda step: step.n if step.prefill else 0.0),
)
UNGRAPHED_STEPS = Term(
    "ungraphed_step",
    "a step with more tokens than any CUDA graph",
    lambda shape: lambda step: 1.0 if step.ungraphed and shape.largest_graph else 0.0,
)
TOKENS_AFTER_PROMPTS = Term(
    "token_after_prompts",
    "a token in a step with prompts right after another: a GPU run hot",
    every_shape(_tokens_after_prompts),
)
ARRIVALS = Term(
    "arrival",
    "a request that arrived since the last step",
    every_shape(lambda step: step.arrivals),
    Place.ARRIVAL,
    needed=True,
)
ARRIVING_TOKENS = Term(
    "arriving_token",
    "a prompt token of those",
    every_shape(lambda step: step.arrived_tokens),
    Place.ARRIVAL,
    needed=True,
)
