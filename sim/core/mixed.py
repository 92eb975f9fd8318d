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
from pagecast.sim.core.serving import serve_all, serve_one

if TYPE_CHECKING:
    from pagecast.sim.core.scheduler import Scheduler


def plan(s: Scheduler, now: int) -> StepPlan | None:
    """One step by vLLM's rule, or None where nothing can be computed."""
    while True:
        made, preempted = _plan(s, now)
        if made is not None or not preempted or s.in_flight:
            return made
        # All that could run was preempted and its blocks are free now, so somebody can run.


def _plan(s: Scheduler, now: int) -> tuple[StepPlan | None, bool]:
    chunks: list[Chunk] = []
    preempted: list[Request] = []
    if not s.prefilling and len(s.decoders.crossing(s.tick)) <= s.pool.queue.count:
        serve_all(s)
        late: set[Request] = set()
    else:
        late = _serve_running(s, chunks, preempted)
    decoders, tick = s.decoders, s.tick
    n = decoders.count
    if late:
        on_time = [request for request in decoders.requests if request not in late]
        n = len(on_time)
        context = sum(tick - request.lag for request in on_time)
        longest = max((tick - request.lag for request in on_time), default=0)
        decodes = tuple(on_time)
    else:
        context, longest = decoders.context(tick), decoders.longest(tick)
        decodes = decoders.snapshot()
    if not preempted:
        budget = s.limits.max_num_batched_tokens - n - sum(chunk.tokens for chunk in chunks)
        _admit_waiting(s, budget, chunks, now)
    if not n and not chunks:
        return None, bool(preempted)
    for request in late:
        if request.state is State.DECODE:
            decoders.delay(request)
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
        s.waiting.size,
        s.cache.used_blocks,
        tuple(chunks),
        decodes,
        tuple(preempted),
    )
    s.step += 1
    s.tick += 1
    s.finish_planning(made)
    return made, bool(preempted)


def _serve_running(s: Scheduler, chunks: list[Chunk], preempted: list[Request]) -> set[Request]:
    """Blocks for running requests, preempting where they run out.

    Returns the running requests that this step leaves out: those behind a request that had to preempt
    itself, and those that vLLM's loop passes over (see `_make_room`).
    """
    decoders, tick, size = s.decoders, s.tick, s.limits.block_size
    late: set[Request] = set()
    if _enough(s):
        serve_all(s)
        wanting: list[Request] = list(s.prefilling)
    else:
        # Who fills a block needs none, but publishes in its turn.
        wanting = sorted([*decoders.crossing(tick), *decoders.filling(tick), *s.prefilling], key=_order)
    for request in dict.fromkeys(wanting):
        if request.state is State.WAITING or request in late:
            continue
        if request.state is State.PREFILL:
            tokens = _next_chunk(s, request, chunks)
            blocks = s.cache.blocks_for(request.computed + tokens) - request.table_blocks
        else:
            tokens = 0
            blocks = int((tick - request.lag) % size == 0)
        if not _make_room(s, request, blocks, chunks, preempted, late):
            late.update(other for other in decoders.requests if other.order > request.order)
            break
        if tokens:
            if blocks > 0:
                s.cache.allocate(request, blocks)
            chunks.append(s.compute(request, tokens))
        elif request.state is State.DECODE:
            if blocks:
                serve_one(s, request)
            if not s.delay and (tick - request.lag) % size == size - 1:
                s.cache.publish(request, tick - request.lag + 1)
    return late


def _enough(s: Scheduler) -> bool:
    """Whether nobody will be preempted and every prompt chunk comes after all decodes: nearly always."""
    needed = len(s.decoders.crossing(s.tick))
    for request in s.prefilling:
        tokens = _next_chunk(s, request, ())
        needed += s.cache.blocks_for(request.computed + tokens) - request.table_blocks
    return needed <= s.pool.queue.count and next(reversed(s.running)) in s.prefilling


def _next_chunk(s: Scheduler, request: Request, chunks: Sequence[Chunk]) -> int:
    taken = s.decoders.count + sum(chunk.tokens for chunk in chunks)
    return max(min(request.known - request.computed, s.limits.max_num_batched_tokens - taken), 0)


def _make_room(
    s: Scheduler,
    request: Request,
    blocks: int,
    chunks: list[Chunk],
    preempted: list[Request],
    late: set[Request],
) -> bool:
    """Preempts until `blocks` are free. False: the request itself had to go.

    vLLM walks the running list by index. Where it preempts somebody before that index who had no tokens
    in this step (all are in flight already), it does not step back, and passes over whoever is next.
    """
    passed_over = 0
    while s.pool.queue.count < blocks:
        s.failed_allocations += 1
        victim = _victim(s)
        before = victim.order < request.order
        idle = victim.state is State.DRAINING or victim in late
        passed_over += before and idle
        s.preempt(victim, served=before and not idle)
        late.discard(victim)
        preempted.append(victim)
        chunks[:] = [chunk for chunk in chunks if chunk.request is not victim]
        if victim is request:
            return False
    if passed_over:
        behind = [other for other in s.running if other.order > request.order]
        late.update(behind[:passed_over])
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
        shared = cache.shared(request, hit)
        cached = hit.blocks * limits.block_size + shared
        if cache.blocks_for(request.known) - hit.blocks + hit.idle > s.pool.queue.count:
            s.failed_allocations += 1
            s.blocked = not s.may_find_more(request, hit)
            return
        tokens = min(request.known - cached, budget)
        budget -= tokens
        s.waiting.remove(request)
        s.running[request] = None
        s.admit(request, hit, now, shared)
        blocks = cache.blocks_for(cached + tokens) - hit.blocks
        if blocks:
            cache.allocate(request, blocks)
        chunks.append(s.compute(request, tokens, shared))


def _order(request: Request) -> int:
    return request.order
