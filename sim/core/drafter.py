"""Protocol of a drafter: how many draft tokens a request proposes, and how many of them are accepted."""

from __future__ import annotations

from typing import Protocol

from pagecast.sim.core.request import Request


class Drafter(Protocol):
    """Says how many draft tokens a request verifies beside its next token.

    `lookahead`: a request gets blocks for so many tokens beyond those that it computes (vLLM: where the
    drafter keeps KV of its own). `reserved`: so many tokens of the budget are kept free for each of
    `max_num_seqs` requests. `recomputes_block`: the last block of a cached prefix is computed again, because
    the drafter needs the hidden states that are not cached (EAGLE, MTP).
    """

    lookahead: int
    reserved: int
    recomputes_block: bool

    def draft(self, request: Request, requests: int) -> int:
        """How many tokens are drafted after those that a step yields to `request`.

        `requests` is the number of requests in that step. Asked when the step is committed. With asynchronous
        scheduling it is asked when the step is planned, and the next plan leaves room for so many.
        """
        ...
