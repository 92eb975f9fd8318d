"""Step plan: everything a backend needs to execute one step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pagecast.sim.core.request import Request
from pagecast.sim.core.swap_space import SwapCopy

DECODE_TOKENS = 1


def counts_as_decode(tokens: int) -> bool:
    """Whether a request that computes `tokens` tokens in a step counts as a decode: one token does.

    The last token of a prompt costs what a decode costs, so engines and recorded runs count it as one.
    """
    return tokens == DECODE_TOKENS


class Chunk(NamedTuple):
    """`tokens` tokens of `request`, computed from position `start` on: of its prompt, or drafts to verify.

    `last`: it completes what is known of the sequence, so the step yields the request's next token.
    `copied`: before anything is computed, this block is copied over the one in which the chunk begins;
    what the copy holds before `start` is the request's own. `drafts`: how many of the tokens, the last
    ones, are draft tokens that the step verifies. `padded`: none of them is right.
    """

    request: Request
    start: int
    tokens: int
    last: bool
    copied: int | None = None
    drafts: int = 0
    padded: bool = False


class Transfer(NamedTuple):
    """A job: blocks of KV of one request that move together between the device and host memory.

    Device block `blocks[i]` goes with host place `places[i]`; a place has room for one device block. Jobs of
    one direction run one after another, in the order of their numbers. The request may have ended, or lost
    its blocks, before a store is done: until then nobody writes to the blocks, or a plan names the job in
    `flushed`.
    """

    job: int
    request: Request
    blocks: tuple[int, ...]
    places: tuple[int, ...]


class StepPlan(NamedTuple):
    """Step number `step`; or a stretch, `steps` decode steps in a row that differ only in context length.

    Cost (of a stretch: of its first step): `decode_n` requests compute one token each, over `decode_ctx`
    tokens of context together (the longest has `decode_max`), the tokens being computed not counted.
    `prefill` holds the chunks of more than one token as `(tokens, tokens already there)`. A chunk of one
    token counts as a decode.

    Work: `decodes` are the generating requests that compute one token each, in admission order, at
    `positions()`; `chunks` are all others. `preempted` lost their blocks. `tick` is the decoding requests'
    clock (see `Decoders`).

    Host tier: `loads` bring blocks from host memory and begin with the step; they may end in a later one.
    `stores` copy blocks to host memory once the step has computed them. Before the step computes anything,
    all of the stores in `flushed` must be done: their blocks are given to others. A plan may consist of these
    alone (`computes`). `Outcome.transferred` reports which jobs have ended, whatever plan they came with.

    `swaps`: KV of preempted requests that moves before the step.

    `running`, `waiting` and `used_blocks` are counted after scheduling (of a stretch, after its last step;
    the requests that end with it are still counted).
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
    loads: tuple[Transfer, ...] = ()
    stores: tuple[Transfer, ...] = ()
    flushed: tuple[int, ...] = ()
    swaps: tuple[SwapCopy, ...] = ()

    @property
    def computes(self) -> bool:
        """Whether there is anything to compute. A plan of transfers alone is carried out, not committed."""
        return bool(self.decode_n or self.prefill)

    @property
    def last(self) -> int:
        """The number of the last step planned here."""
        return self.step + self.steps - 1

    def positions(self) -> list[int]:
        """The position that each of `decodes` computes (in the first of several steps).

        To be read before the next plan is made: a request that a later plan preempts moves.
        """
        tick = self.tick
        return [tick - request.lag for request in self.decodes]

    def includes(self, request: Request) -> bool:
        """Whether the plan computes tokens of a request."""
        return request in self.decodes or any(chunk.request is request for chunk in self.chunks)

    def tokens_of(self, request: Request) -> int:
        """How many tokens of a request the plan computes."""
        if request in self.decodes:
            return 1
        return sum([chunk.tokens for chunk in self.chunks if chunk.request is request])

    def yields_token(self, request: Request) -> bool:
        """Whether the plan computes a request's next token, and not only a part of its prompt."""
        if request in self.decodes:
            return True
        return any(chunk.last and chunk.request is request for chunk in self.chunks)

    def work(self) -> Iterator[tuple[Request, int, int]]:
        """Each request's part of the step: `(request, first position, tokens)`. Read it as `positions`."""
        for request, position in zip(self.decodes, self.positions(), strict=True):
            yield request, position, 1
        for chunk in self.chunks:
            yield chunk.request, chunk.start, chunk.tokens


class Outcome(NamedTuple):
    """Results of a plan that could not be known when it was made.

    `stopped`: ids of requests that ended early (end of text). `failed`: ids and reasons. `accepted`: ids
    and how many of their drafts were accepted; a request that is not named had all of them accepted.
    `transferred`: the jobs of this plan or of earlier ones that are done by now, in the order they ended;
    `lost`: those of them that failed, whose blocks have no content. `ended_after`: of requests that stopped
    among accepted draft tokens, how many of the tokens that the step yielded are theirs; the others follow
    their end.
    """

    stopped: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    accepted: tuple[tuple[str, int], ...] = ()
    transferred: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    ended_after: tuple[tuple[str, int], ...] = ()


DONE = Outcome()
