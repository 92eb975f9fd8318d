"""nano-vLLM's step: prompts or decodes, never both, and prompts first.

A prompt's blocks are allocated whole at admission; only the first prompt of a step may be chunked, and it
keeps its place at the head of the queue until it is done. Blocks are published when a step is committed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagecast.sim.core.cache import Hit
from pagecast.sim.core.plan import Chunk, StepPlan
from pagecast.sim.core.request import Request
from pagecast.sim.core.serving import serve_all

if TYPE_CHECKING:
    from pagecast.sim.core.scheduler import Scheduler


def plan(s: Scheduler, now: int) -> StepPlan | None:
    """One step by nano-vLLM's rule, or None where nothing can be computed."""
    chunks = _prefill(s, now)
    if chunks:
        made = _plan_of_chunks(s, chunks)
        s.step += 1
        s.finish_planning(made)
        return made
    s.unpark()
    preempted = _make_room(s)
    if not s.decoders.count:
        return None
    tick, decoders = s.tick, s.decoders
    context, longest, decodes = decoders.context(tick), decoders.longest(tick), decoders.snapshot()
    serve_all(s)
    made = StepPlan(
        s.step,
        1,
        tick,
        decoders.count,
        context,
        longest,
        (),
        len(s.running),
        s.waiting.size,
        s.cache.used_blocks,
        (),
        decodes,
        tuple(preempted),
    )
    s.step += 1
    s.tick += 1
    s.finish_planning(made)
    return made


def _prefill(s: Scheduler, now: int) -> list[Chunk]:
    cache, limits = s.cache, s.limits
    chunks: list[Chunk] = []
    batched = 0
    s.blocked = False
    while len(chunks) < limits.max_num_seqs and batched < limits.max_num_batched_tokens:
        request = next(iter(s.prefilling), None) or s.waiting.first()
        if request is None:
            break
        hit: Hit | None = None
        missing = request.known - request.computed
        shared = 0
        if not request.table:
            hit = cache.lookup(request)
            shared = cache.shared(request, hit)
            if cache.blocks_for(request.known) - hit.blocks + hit.idle > s.pool.queue.count:
                s.failed_allocations += 1
                s.blocked = not s.may_find_more(request, hit)
                break
            missing = request.known - hit.blocks * limits.block_size - shared
        left = limits.max_num_batched_tokens - batched
        if left < missing and chunks:
            break
        if hit is not None:
            s.admit(request, hit, now, shared)
            cache.allocate(request, cache.blocks_for(request.known) - hit.blocks)
        tokens = min(missing, left)
        batched += tokens
        if tokens == missing:
            s.waiting.remove(request)
            s.running[request] = None
        chunks.append(s.compute(request, tokens, shared))
    return chunks


def _plan_of_chunks(s: Scheduler, chunks: list[Chunk]) -> StepPlan:
    single = [chunk.start for chunk in chunks if chunk.tokens == 1]
    return StepPlan(
        s.step,
        1,
        s.tick,
        len(single),
        sum(single),
        max(single, default=0),
        tuple((chunk.tokens, chunk.start) for chunk in chunks if chunk.tokens > 1),
        len(s.running),
        s.waiting.size,
        s.cache.used_blocks,
        tuple(chunks),
    )


def _make_room(s: Scheduler) -> list[Request]:
    """Preempts from the newest running request down until this tick's blocks are there."""
    preempted: list[Request] = []
    tick = s.tick
    while len(s.decoders.crossing(tick)) > s.pool.queue.count:
        s.failed_allocations += 1
        victim = next(reversed(s.running))
        s.preempt(victim, served=False)
        preempted.append(victim)
    return preempted
