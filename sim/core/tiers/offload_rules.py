"""Offload rules: what versions of vLLM do otherwise with a host tier, and with a disk behind it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OffloadRules:
    """The defaults are those of vLLM 0.24.

    What is stored. `stores_endings`: the plan after a request's end stores what it left.
    `stores_prompt_ends`: EAGLE's last block is left out of what is stored only where it has generated tokens.
    `stores_computed`: of a request that was cancelled, only computed tokens are stored. `leaves_last_token`:
    of one that came to its end, not the last token, which nobody computes; EAGLE's last block is stored then.
    `stores_short_segments`: where larger blocks of other groups leave only some places at which a hit can
    end, the last segment may be short.
    `stores_whole_blocks`: no offloaded block is stored of which one device block has left its window.
    `offers_again`: a request that asks again stores all its blocks anew.

    What is found. `counts_pending`: a block being written counts as one in a window. `ends_windows`: a window
    ends where the hit does, not with the block; a miss ends the wait for blocks behind it. `drops_marked`:
    hits leave out their last block only in groups that are marked as the drafter's; all groups are looked up
    one block further for it. `counts_offers`: a threshold counts how often a block was to be stored, not
    looked for.

    What gives way. `falls_back_to_recent`: ARC takes recent blocks where no frequent one may go.
    `by_request`: a request's blocks become the last to give way when it ends, not with each look.
    `by_place`: until then those that it stores and uses share its place in the order, the last tokens first.

    Room on the device. `loads_without_lookahead`: a load takes no blocks for draft tokens.
    `reserves_drafts`: beside others' needs it leaves the blocks that one step of drafts takes (1: in
    blocks of the scheduler, 2: in each group).

    The disk. `forgets_after_stores`: what a request asked is forgotten with its end and its last store;
    else with its last transfer. `forgets_with_plan`: at the earliest with the plan after its end, which
    stores what it left.
    `promotions_pend`: a block that is about to be promoted counts as being written. `misses_failed`: what
    could not be read is not asked for again. `polls_stores`: ends of jobs are looked for whenever a request
    stores something, and promotions begin after the stores of a plan.
    """

    stores_endings: bool = False
    stores_prompt_ends: bool = False
    stores_computed: bool = False
    leaves_last_token: bool = False
    stores_short_segments: bool = False
    stores_whole_blocks: bool = False
    offers_again: bool = False
    counts_pending: bool = False
    ends_windows: bool = False
    drops_marked: bool = False
    counts_offers: bool = False
    falls_back_to_recent: bool = False
    by_request: bool = False
    by_place: bool = False
    loads_without_lookahead: bool = False
    reserves_drafts: int = 0
    forgets_after_stores: bool = False
    forgets_with_plan: bool = False
    promotions_pend: bool = False
    misses_failed: bool = False
    polls_stores: bool = False


FIRST_RULES = OffloadRules()
