"""Blocks for decoding requests, a tick at a time: where events are kept, keys come block by block, or blocks
are short. (Many ticks at once, with none of these: `Decoders.grow`.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagecast.sim.core.decoders import give_one
from pagecast.sim.core.events import Event, EventKind
from pagecast.sim.core.request import Request

if TYPE_CHECKING:
    from pagecast.sim.core.scheduler import Scheduler


def serve_ticks(s: Scheduler, ticks: int) -> None:
    """Serves so many ticks one by one and moves the scheduler's clocks on."""
    for _ in range(ticks):
        s.pool.step = s.step
        serve_all(s)
        s.step += 1
        s.tick += 1


def serve_all(s: Scheduler) -> None:
    """Gives each decoding request the block it needs at this tick; there are enough."""
    decoders, tick = s.decoders, s.tick
    crossing = decoders.crossing(tick)
    if not decoders.explicit and s.events is None:
        if crossing:
            for request, block in zip(crossing, s.pool.take(len(crossing)), strict=True):
                assert request.tail is not None
                request.tail.blocks.append(block)
        return
    filling = {} if s.delay else decoders.filling(tick)
    if not crossing and not filling:
        return
    for request in sorted({**crossing, **filling}, key=lambda r: r.order):
        if request in crossing:
            serve_one(s, request)
        if request in filling:
            s.cache.publish(request, tick - request.lag + 1)


def serve_one(s: Scheduler, request: Request) -> None:
    """Gives one decoding request a block at this tick."""
    block = s.pool.take(1)[0]
    if s.events is not None:
        s.events.append(Event(s.step, EventKind.ALLOCATED, request.id, (block,)))
    give_one(request, s.tick, block, s.limits.block_size)
    if s.delay and (s.events is not None or request.keys.explicit):
        s.cache.publish(request, s.tick - request.lag)
