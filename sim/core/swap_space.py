"""Swap space: host memory for the KV of preempted requests."""

from __future__ import annotations

from typing import NamedTuple

from pagecast.sim.core.request import Request


class SwapCopy(NamedTuple):
    """The KV of `tokens` tokens that moves to host memory (`out`) or back before a step."""

    request: Request
    tokens: int
    out: bool


class SwapSpace:
    """`num_blocks` blocks of host memory, for requests that wait after a preemption."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.free_blocks = num_blocks
        self.num_blocks = num_blocks
        self.swaps: list[SwapCopy] = []  # since the last plan
        self.out_tokens = 0
        self.in_tokens = 0
        self._block_size = block_size

    def put(self, request: Request, tokens: int) -> None:
        """Puts a request's first tokens aside, if there is room; else they will be computed again."""
        blocks = -(-tokens // self._block_size)
        if not tokens or blocks > self.free_blocks:
            return
        self.free_blocks -= blocks
        request.swapped_tokens = tokens
        self.out_tokens += tokens
        self.swaps.append(SwapCopy(request, tokens, out=True))

    def bring_back(self, request: Request, tokens: int) -> None:
        """Brings the last `tokens` tokens back; the others were still cached."""
        self.in_tokens += tokens
        self.swaps.append(SwapCopy(request, tokens, out=False))
        self.drop(request)

    def drop(self, request: Request) -> None:
        """Frees the place of a request that is back, or has ended. Doing it again changes nothing."""
        self.free_blocks += -(-request.swapped_tokens // self._block_size)
        request.swapped_tokens = 0

    def take_swaps(self) -> tuple[SwapCopy, ...]:
        """Returns the copies since the last call, and forgets them."""
        swaps, self.swaps = tuple(self.swaps), []
        return swaps
