"""Protocol of a drafter: how many draft tokens a request proposes, and how many of them are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagecast.sim.core.request import Request


class Drafter(Protocol):
    """Says how many draft tokens a request verifies beside its next token.

    `lookahead`: a request gets blocks for so many tokens beyond those that it computes (vLLM: where the
    drafter keeps KV of its own). `reserved`: so many tokens of the budget a request's drafting takes
    (`DraftingRules`). `recomputes_block`: the last block of a cached prefix is computed again, because the
    drafter needs the hidden states that are not cached (EAGLE, MTP). `most`: draft tokens of a request at
    most. `padding`: draft tokens of a full row; 0 where their number depends on the batch.
    """

    lookahead: int
    reserved: int
    recomputes_block: bool
    most: int
    padding: int

    def draft(self, request: Request, requests: int) -> int:
        """How many tokens are drafted after those that a step yields to `request`.

        `requests` is the number of requests in that step. Asked when the step is committed. With asynchronous
        scheduling it is asked when the step is planned, and the next plan leaves room for so many.
        """
        ...


@dataclass(frozen=True)
class DraftingRules:
    """What engines and their versions do otherwise where requests speculate.

    `slots_per_request`: the tokens that drafting takes of the budget (`Drafter.reserved`) are taken for each
    request of a step; else for `max_num_seqs` requests in every step. `pads_joining`: a request that joins
    decoding requests with one token to compute gets a full row, with drafts that are never right.
    `pads_cached`: so does a request with a cached prefix that joins no decodes; and a row that would exceed
    `max_model_len` is computed without padding, where else the request waits. `publishes_output`: blocks
    are published when the step that fills them is committed; else without asynchronous scheduling by the
    request's next step.
    `lookahead_keys`: a block's key covers the token after it, so that no hit leaves out its last block.
    `room_for_lookahead`: the budget must be larger than `Drafter.lookahead`. `trims_computed`: drafts
    that are accepted beyond a request's end don't count as computed.
    """

    slots_per_request: bool = False
    pads_joining: bool = False
    pads_cached: bool = False
    publishes_output: bool = False
    lookahead_keys: bool = False
    room_for_lookahead: bool = False
    trims_computed: bool = False


RESERVED = DraftingRules()
