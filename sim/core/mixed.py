"""vLLM v1's step: running requests first, in admission order, then waiting ones, under one token budget.

There are no phases. Every request's computed tokens catch up with its known tokens; a long prompt takes
what the budget leaves. Out of blocks, the newest running request (or the least urgent one) is preempted,
and nobody is admitted in that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagecast.sim.core.plan import Chunk, StepPlan
from pagecast.sim.core.request import Request, State

if TYPE_CHECKING:
    from pagecast.sim.core.scheduler import Scheduler


def plan(s: Scheduler, now: int) -> StepPlan | None:
    """One step by vLLM's rule, or None where nothing can be computed."""
    chunks: list[Chunk] = []
    preempted: list[Request] = []
    if not s.prefilling and len(s.decoders.crossing(s.tick)) <= s.pool.queue.count:
        s.serve_decoders()
        late: list[Request] = []
    else:
        late = _serve_running(s, chunks, preempted)
    decoders, tick = s.decoders, s.tick
    n = len(decoders) - len(late)
    if late:
        left_out = set(late)
        on_time = [request for request in decoders.requests if request not in left_out]
        context = sum(tick - request.lag for request in on_time)
        longest = max((tick - request.lag for request in on_time), default=0)
        decodes = tuple(on_time)
    else:
        context, longest = decoders.context(tick), decoders.longest(tick)
        decodes = decoders.snapshot()
    for request in late:
        decoders.delay(request)
    if not preempted:
        budget = s.limits.max_num_batched_tokens - n - sum(chunk.tokens for chunk in chunks)
        _admit_waiting(s, budget, chunks, now)
    if not n and not chunks:
        return None
    prefill = []
    for chunk in chunks:
        if chunk.tokens == 1:
            n += 1
            context += chunk.start
            longest = max(longest, chunk.start)
        else:
            prefill.append((chunk.tokens, chunk.start))
    made = StepPlan(
        s.step,
        1,
        tick,
        n,
        context,
        longest,
        tuple(prefill),
        len(s.running),
        len(s.waiting),
        s.cache.used_blocks,
        tuple(chunks),
        decodes,
        tuple(preempted),
    )
    s.step += 1
    s.tick += 1
    s.finish_planning(made)
    return made


def _serve_running(s: Scheduler, chunks: list[Chunk], preempted: list[Request]) -> list[Request]:
    """Blocks for running requests, preempting where they run out.

    Returns the decoding requests that this step leaves out: those behind a request that had to preempt
    itself.
    """
    decoders, tick, size = s.decoders, s.tick, s.limits.block_size
    if _enough(s):
        s.serve_decoders()
        wanting: list[Request] = list(s.prefilling)
    else:
        # Who fills a block needs none, but publishes in its turn.
        wanting = sorted([*decoders.crossing(tick), *decoders.filling(tick), *s.prefilling], key=_order)
    for request in dict.fromkeys(wanting):
        if request.state is State.WAITING:
            continue  # preempted in this very step
        if request.state is State.PREFILL:
            tokens = _next_chunk(s, request, chunks)
            blocks = s.cache.blocks_for(request.computed + tokens) - request.table_blocks
        else:
            tokens = 0
            blocks = int((tick - request.lag) % size == 0)
        if not _make_room(s, request, blocks, chunks, preempted):
            return [other for other in decoders.requests if other.order > request.order]
        if tokens:
            if blocks > 0:
                s.cache.allocate(request, blocks)
            chunks.append(s.compute(request, tokens))
        elif request.state is State.DECODE:
            if blocks:
                s.serve_decoder(request)
            if not s.delay and (tick - request.lag) % size == size - 1:
                s.cache.publish(request, tick - request.lag + 1)
    return []


def _enough(s: Scheduler) -> bool:
    """Whether nobody will be preempted and every prompt chunk comes after all decodes: nearly always."""
    needed = len(s.decoders.crossing(s.tick))
    for request in s.prefilling:
        tokens = _next_chunk(s, request, ())
        needed += s.cache.blocks_for(request.computed + tokens) - request.table_blocks
    return needed <= s.pool.queue.count and next(reversed(s.running)) in s.prefilling


def _next_chunk(s: Scheduler, request: Request, chunks: Sequence[Chunk]) -> int:
    taken = len(s.decoders) + sum(chunk.tokens for chunk in chunks)
    return max(min(request.known - request.computed, s.limits.max_num_batched_tokens - taken), 0)


def _make_room(
    s: Scheduler, request: Request, blocks: int, chunks: list[Chunk], preempted: list[Request]
) -> bool:
    """Preempts until `blocks` are free. False: the request itself had to go."""
    while s.pool.queue.count < blocks:
        s.failed_allocations += 1
        victim = _victim(s)
        s.preempt(victim, served=victim.order < request.order)
        preempted.append(victim)
        chunks[:] = [chunk for chunk in chunks if chunk.request is not victim]
        if victim is request:
            return False
    return True


def _victim(s: Scheduler) -> Request:
    """The newest running request; by priority, the least urgent and of these the latest to arrive."""
    if s.limits.policy == "priority":
        return max(s.running, key=lambda request: (request.priority, request.arrival_ns))
    return next(reversed(s.running))


def _admit_waiting(s: Scheduler, budget: int, chunks: list[Chunk], now: int) -> None:
    """Admits waiting requests in order until the batch, the budget or the blocks are used up.

    The whole known sequence must fit in free blocks; only the first chunk's are allocated.
    """
    cache, limits = s.cache, s.limits
    s.blocked = False
    while budget > 0:
        request = s.waiting.first()
        if request is None:
            return
        if len(s.running) >= limits.max_num_seqs:
            s.blocked = True
            return
        hit = cache.lookup(request)
        cached = hit.blocks * limits.block_size
        if cache.blocks_for(request.known) - hit.blocks + hit.idle > s.pool.queue.count:
            s.failed_allocations += 1
            s.blocked = not s.may_find_more(request, hit)
            return
        tokens = min(request.known - cached, budget)
        budget -= tokens
        s.waiting.remove(request)
        s.running[request] = None
        s.admit(request, hit, now)
        blocks = cache.blocks_for(cached + tokens) - hit.blocks
        if blocks:
            cache.allocate(request, blocks)
        chunks.append(s.compute(request, tokens))


def _order(request: Request) -> int:
    return request.order
