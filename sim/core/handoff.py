"""Handoff of a prompt between two replicas: its blocks are held where they are read, reserved where written.

    source   the prompt ends, `hold`  ...... read ......  `give_back`
    target                     `reserve` ... written ...  `land`, then the request is submitted

A stand-in has the blocks meanwhile: at the source the request has ended, at the target it has not come yet.
The block of the prompt's last token is not handed over: a scheduler computes that token at least, so that the
first token of the output can be drawn.
"""

from __future__ import annotations

from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler


def stand_in(request: Request) -> Request:
    """A request of the same prompt, which is never submitted and holds its blocks."""
    other = Request(request.id, request.keys, request.prompt_tokens, 1, index=request.index)
    other.tenant = request.tenant
    return other


def handed_over(request: Request, block_size: int) -> int:
    """How many blocks of a prompt are handed over: those before the block of its last token."""
    return (request.prompt_tokens - 1) // block_size


def hold(scheduler: Scheduler, holder: Request) -> list[int]:
    """Holds the blocks of a prompt that has just been computed. Returns their numbers, in order."""
    scheduler.stride.settle()
    memory = scheduler.memory
    memory.claim(holder, memory.find(holder))
    return memory.blocks(holder)


def unread(scheduler: Scheduler, holder: Request, hit: Hit) -> list[int]:
    """The reserved blocks that are to be written: those handed over that `reserve` did not find."""
    memory = scheduler.memory
    size = memory.block_size
    return memory.blocks(holder)[hit.tokens // size : handed_over(holder, size)]


def reserve(scheduler: Scheduler, holder: Request) -> Hit | None:
    """Takes blocks for a whole prompt. Returns what of it is cached already; None: there is no room."""
    scheduler.stride.settle()
    memory = scheduler.memory
    hit: Hit = memory.find(holder)
    if not memory.fits_now(holder, hit, holder.prompt_tokens):
        return None
    memory.claim(holder, hit)
    memory.grow(holder, holder.prompt_tokens)
    return hit


def land(scheduler: Scheduler, holder: Request) -> None:
    """Makes findable what was written to reserved blocks, and gives them back."""
    scheduler.stride.settle()
    memory = scheduler.memory
    memory.publish(holder, handed_over(holder, memory.block_size) * memory.block_size)
    give_back(scheduler, holder)


def give_back(scheduler: Scheduler, holder: Request) -> None:
    """Frees the blocks of a prompt that has been read, or of one that will not come."""
    scheduler.stride.settle()
    scheduler.memory.release(holder)
    scheduler.queue.blocked = False
