"""Turns of decoding requests in models whose layers keep different tokens.

In its turn a request gives back the blocks that left its windows, takes those that its next token begins and
publishes those that it fills. Only requests at certain offsets in a block have anything to do: they are due.
"""

from __future__ import annotations

from pagecast.sim.core.decoders import admission_order
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.request import Request
from pagecast.sim.core.running import Running


def publish_known(running: Running, memory: KvMemory) -> None:
    """Publishes what requests without a token in flight have filled, ahead of all turns.

    Their last token became known with a commit, and no plan in flight will publish it.
    """
    if running.knows_ahead():
        for request in running.decoders.requests:
            if running.knows(request):
                memory.publish(request, running.planned(request))


def due(running: Running, memory: KvMemory) -> list[Request]:
    """The decoding requests that have a turn in the step being planned, in admission order."""
    requests = running.decoders.at_offsets(running.tick, memory.offsets)
    if memory.fresh:
        if memory.late:
            memory.keep_fresh(running.decoders.requests)
        requests = list({**dict.fromkeys(requests), **memory.fresh})
    if len(requests) > 1:
        requests.sort(key=admission_order)
    return requests


def take_turn(running: Running, memory: KvMemory, request: Request, computed: int) -> None:
    """Takes the block of a request's next token and publishes what it fills.

    What left its windows is given back already.
    """
    if memory.fresh and not (memory.late and running.processed(request, computed) < computed - 1):
        memory.fresh.pop(request, None)
    if not computed % memory.block_size:
        memory.grow(request, computed + 1)
    unknown = running.commit_lag > 0  # the newest token's content, until its commit
    later = not running.chunked and memory.publishes_later(request)
    if unknown and running.knows(request):
        unknown = later = False
    known_tokens = computed if unknown else computed + 1
    if known_tokens % memory.aligned:
        return
    if later:
        memory.filled[request] = known_tokens
    else:
        memory.publish(request, known_tokens)
