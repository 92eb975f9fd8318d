"""Admission rules that reserve blocks for output, and watermarks around any rule."""

from __future__ import annotations

from collections.abc import Callable

from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request
from pagecast.sim.core.rules.rules import Admission
from pagecast.sim.core.step import Step

TokensToReserve = Callable[[Request], int]
"""For how many tokens a request is to have blocks when it ends."""


def completion(request: Request) -> int:
    """Prompt and output as they will be: nobody is ever preempted. The last token needs no block."""
    return request.total_tokens - 1


def with_output(tokens: int) -> TokensToReserve:
    """The prompt and `tokens` of output, or what is known already where that is more."""

    def tokens_to_reserve(request: Request) -> int:
        return max(request.prompt_tokens + tokens - 1, request.known_tokens)

    return tokens_to_reserve


class ReserveOutput:
    """Admits a request where its blocks to the end fit beside those that the running ones may still take.

    Those that wait with blocks which a load fills count as running. What a request does not use is free again
    when it ends. One that outgrows its reservation takes blocks as any other, and may cause a preemption.
    Where nobody runs or loads, a prompt that fits is admitted.
    """

    def __init__(self, tokens_to_reserve: TokensToReserve) -> None:
        self._tokens_to_reserve = tokens_to_reserve

    def admits(self, step: Step, memory: Memory, queue: Queue, request: Request, hit: Hit) -> bool:
        """Whether the blocks of the request, and of all running ones to their ends, are free."""
        if not memory.fits(request, hit, request.known_tokens):
            return False
        others = list(step.running.requests)
        loading = False
        if step.offloading is not None:
            others += [other for other in step.offloading.holders if other is not request]
            loading = bool(step.offloading.loading)
        if not step.running.requests and not loading:
            return True
        reserved = sum(
            [memory.missing(other, step.with_lookahead(self._tokens_to_reserve(other))) for other in others]
        )
        return memory.fits(request, hit, step.with_lookahead(self._tokens_to_reserve(request)), reserved)


class Watermarks:
    """Stops admission when requests would hold more than `high` of all blocks, until they hold at most `low`.

    In between, requests end and nobody new comes: the hysteresis keeps a full replica from admitting one
    request for each that ends, and preempting another for it. vLLM's own setting `watermark` is a single mark
    without it (`margin_of` in `engines/vllm/tuned.py`).
    """

    def __init__(self, rule: Admission, low: float, high: float) -> None:
        self._rule = rule
        self._low = low
        self._high = high
        self.closed = False
        self.closings = 0

    def admits(self, step: Step, memory: Memory, queue: Queue, request: Request, hit: Hit) -> bool:
        """Whether the rule admits the request, and the marks do."""
        blocks = memory.num_blocks
        if not step.running.requests:
            self.closed = False
            return self._rule.admits(step, memory, queue, request, hit)
        if self.closed and memory.used_blocks > self._low * blocks:
            return False
        self.closed = False
        if not memory.fits(request, hit, request.known_tokens, blocks - int(self._high * blocks)):
            self.closed = True
            self.closings += 1
            return False
        return self._rule.admits(step, memory, queue, request, hit)
