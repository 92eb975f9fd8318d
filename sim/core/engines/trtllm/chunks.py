"""Context chunking: how TensorRT-LLM shares a step's tokens among prompts.

Sizes are tokens of a prompt's remainder. With reuse a first chunk is moved behind the cached prefix, not
shortened by it, so a chunk that does not end the prompt costs its whole size.

Source: TensorRT-LLM, tensorrt_llm/_torch/pyexecutor/scheduler/scheduler.py, `PyMicroBatchScheduler`
(002f3cc), which mirrors cpp/tensorrt_llm/batch_manager/microBatchScheduler.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Context(NamedTuple):
    """A prompt to be computed: `remaining` tokens, of which the first `reusable` are cached."""

    remaining: int
    reusable: int


def cost(size: int, context: Context) -> int:
    """Tokens that a chunk of this size computes."""
    if context.reusable <= 0 or context.reusable + size < context.remaining:
        return size
    return max(0, context.remaining - context.reusable)


def chunk_sizes(contexts: Sequence[Context], budget: int, most: int, unit: int, *, equal: bool) -> list[int]:
    """The chunk of each prompt, 0 for those that get none in this step.

    `budget`: tokens left in the step. `most`: tokens of a step. `unit`: a chunk that does not end its prompt
    is a multiple of it. `equal`: all prompts advance alike, a unit each in turn; else they are served in
    order.
    """
    whole = [min(cost(context.remaining, context), most) for context in contexts]
    longest = max([cost(context.remaining, context) for context in contexts], default=0)
    if longest <= most and sum(whole) <= budget:
        return [context.remaining for context in contexts]
    return _alike(contexts, budget, most, unit) if equal else _in_order(contexts, budget, most, unit)


def _in_order(contexts: Sequence[Context], budget: int, most: int, unit: int) -> list[int]:
    sizes = []
    for context in contexts:
        size = context.remaining
        if budget < cost(size, context):
            size = budget
        if cost(size, context) > most:
            size = min(most, context.remaining)
        if size < context.remaining:
            size = size // unit * unit
        budget -= cost(size, context)
        sizes.append(size)
    return sizes


def _alike(contexts: Sequence[Context], budget: int, most: int, unit: int) -> list[int]:
    sizes = [0] * len(contexts)
    used = 0
    grown = True
    while used < budget and grown:
        grown = False
        for number, context in enumerate(contexts):
            size = min(sizes[number] + unit, context.remaining)
            more = cost(size, context) - cost(sizes[number], context)
            if used + more > budget or size > most:
                continue
            used += more
            grown = grown or size > sizes[number]
            sizes[number] = size
    return sizes
