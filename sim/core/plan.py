"""A step's plan: everything a backend needs to execute it, fixed once made."""

from __future__ import annotations

from typing import NamedTuple

from pagecast.sim.core.request import Request


class Chunk(NamedTuple):
    """A piece of a prompt: `tokens` tokens of `request` from position `start` on.

    `last`: it completes what is known of the sequence, so the step yields the request's next token.
    `copied`: before anything is computed, this block is copied over the one in which the chunk begins
    (-1: none); what the copy holds before `start` is the request's own.
    """

    request: Request
    start: int
    tokens: int
    last: bool
    copied: int = -1


class StepPlan(NamedTuple):
    """Step number `step`; or `steps` decode steps in a row that differ only in context length.

    `decode_n` requests compute one token each, over `decode_ctx` tokens of context together (the longest
    has `decode_max`), the tokens being computed not counted; a prompt chunk of one token counts as a
    decode there. `prefill` holds the chunks of more than one token as `(tokens, already there)`; `chunks`
    all of them. `running` and `waiting` are counted after scheduling, `used_blocks` likewise.
    `decodes` are the decoding requests in admission order: request r computes position `tick - r.lag`
    (its block table is `r.blocks()`; the last block is new where that position begins one).
    """

    step: int
    steps: int
    tick: int
    decode_n: int
    decode_ctx: int
    decode_max: int
    prefill: tuple[tuple[int, int], ...]
    running: int
    waiting: int
    used_blocks: int
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = ()

    @property
    def last(self) -> int:
        """The number of the last step planned here."""
        return self.step + self.steps - 1


class Outcome(NamedTuple):
    """What came of a plan. `stopped`: ids of requests that ended early (end of text, or a failure)."""

    stopped: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()


DONE = Outcome()
