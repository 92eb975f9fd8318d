"""TensorRT-LLM's step: the capacity scheduler says who may run, the micro-batch scheduler who computes.

Requests are looked at in the order of their arrival, those that run and those that wait. A prompt takes all
its blocks with its first chunk. A request whose next new block is about to be computed by another waits for
it, so that it can reuse it.

Source: TensorRT-LLM, tensorrt_llm/_torch/pyexecutor/scheduler/scheduler.py (002f3cc), which mirrors
cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp and scheduledBlocksManager.h.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pagecast.sim.core.engines.trtllm.chunks import Context, chunk_sizes, cost
from pagecast.sim.core.engines.trtllm.settings import TrtllmSettings
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.rules.candidates import TenantCeilings
from pagecast.sim.core.running import Running
from pagecast.sim.core.step import Step


class Candidate(NamedTuple):
    """A request that fits: one that decodes, one whose prompt is begun, or one that waits, with its hit."""

    request: Request
    hit: Hit | None = None


class Capacity(Protocol):
    """Which requests fit in the KV memory in this step, in the order in which they may compute."""

    def fitting(self, step: Step, memory: Memory, queue: Queue) -> list[Candidate]:
        """The requests that fit. It may pause running requests (`Step.preempt`)."""
        ...


def arrival(request: Request) -> tuple[int, int, int]:
    """Sorts requests by their arrival."""
    return request.arrival_ns, request.index, request.order


class Contributed:
    """The first new blocks of prompts that are being computed: who needs one of them next, waits for it."""

    def __init__(self, step: Step, memory: Memory) -> None:
        self._memory = memory
        self._blocks: set[tuple[bytes, int]] = set()
        if memory.caching:
            for request in step.running.chunked:
                block = self._first_new(request, memory.find(request))
                if block is not None:
                    self._blocks.add(block)

    def awaits(self, request: Request, hit: Hit) -> bool:
        """Whether a request had better wait. If not, its own first new block counts as being computed."""
        if not self._memory.caching:
            return False
        block = self._first_new(request, hit)
        if block is None:
            return False
        if block in self._blocks:
            return True
        self._blocks.add(block)
        return False

    def _first_new(self, request: Request, hit: Hit) -> tuple[bytes, int] | None:
        """The key of the block after a cached prefix; None where the prompt has no full one there."""
        size = self._memory.block_size
        number = hit.tokens // size
        if number >= (request.known_tokens - 1) // size:
            return None
        keys = request.keys
        for digest, end in zip(keys.digests, keys.ends, strict=True):
            if number < end:
                return digest, number
        return None


def _ceilings(step: Step) -> TenantCeilings | None:
    """The ceilings of tenants; None where nobody has one."""
    tenants = step.limits.tenants
    return TenantCeilings(step) if tenants is not None and tenants.limited else None


class GuaranteedNoEvict:
    """Admits what can run to its end: nobody is ever paused. `static`: a batch ends before another begins."""

    def __init__(self, *, static: bool = False) -> None:
        self.static = static

    def fitting(self, step: Step, memory: Memory, queue: Queue) -> list[Candidate]:
        """The generating requests, then prompts in order, until the longest output of one does not fit."""
        running = step.running
        decoding = sorted(running.decoders.requests, key=arrival)
        fits = [Candidate(request) for request in decoding]
        free = memory.free_blocks
        for request in decoding:
            free -= memory.missing(request, request.most_tokens)
        if self.static and decoding:
            queue.blocked = True
            return fits
        for request in sorted(running.chunked, key=arrival):
            free -= memory.missing(request, request.most_tokens)
            fits.append(Candidate(request))
        contributed = Contributed(step, memory)
        ceilings = _ceilings(step)
        places = open_places = step.limits.max_num_seqs - len(running.requests)
        for request in list(queue):
            if ceilings is not None and not ceilings.opens(request):
                queue.pass_over(request, lasting=True)
                continue
            hit = memory.find(request)
            if not self.static and contributed.awaits(request, hit):
                queue.pass_over(request)
                continue
            if places <= 0:
                queue.blocked = not queue.passed_over
                break
            blocks = -(-request.most_tokens // memory.block_size) * memory.crossing_blocks
            blocks += hit.idle - hit.blocks
            if blocks > free:
                step.refuse(request, hit)
                break
            free -= blocks
            places -= 1
            if ceilings is not None:
                ceilings.enter(request)
            fits.append(Candidate(request, hit))
        else:
            if queue.gated and places == open_places:
                queue.blocked = not queue.passed_over
        return fits


class MaxUtilization:
    """Admits what fits in this step; when blocks run out the last that were begun are paused."""

    def fitting(self, step: Step, memory: Memory, queue: Queue) -> list[Candidate]:
        """Requests in order, with the blocks of this step alone; the first chunk takes the whole prompt's."""
        running = step.running
        in_progress = sorted([*running.decoders.requests, *running.chunked], key=arrival)
        order = sorted([*in_progress, *queue], key=arrival)
        started = set(in_progress)
        crossing = step.crossing()
        contributed = Contributed(step, memory)
        ceilings = _ceilings(step)
        places = step.limits.max_num_seqs - len(running.requests)
        fits: list[Candidate] = []
        blocks_in_step = 0
        position, end = 0, len(order)
        while position < end:
            request = order[position]
            hit = None
            if request in started:
                blocks = memory.crossing_blocks if request in crossing else 0
                fitting = blocks_in_step + blocks <= memory.free_blocks
            elif ceilings is not None and not ceilings.opens(request):
                queue.pass_over(request)  # a pause may make room for it
                position += 1
                continue
            else:
                hit = memory.find(request)
                if contributed.awaits(request, hit):
                    queue.pass_over(request)
                    position += 1
                    continue
                blocks = -(-request.known_tokens // memory.block_size) * memory.crossing_blocks
                blocks += hit.idle - hit.blocks
                fitting = places > 0 and blocks_in_step + blocks <= memory.free_blocks
            if fitting:
                blocks_in_step += blocks
                places -= hit is not None
                if ceilings is not None:
                    ceilings.enter(request)
                fits.append(Candidate(request, hit))
                position += 1
                continue
            last = next((at for at in range(end - 1, position - 1, -1) if order[at] in started), None)
            if last is None:
                if hit is not None and places > 0:
                    step.refuse(request, hit)
                else:
                    queue.blocked = not queue.passed_over
                break
            step.failed_allocations += 1
            step.preempt(order[last])
            end = last
        return fits


class TrtllmMix:
    """Prompts and decodes share a step, as the capacity rule and the token budget allow."""

    def __init__(self, capacity: Capacity, limits: Limits, settings: TrtllmSettings) -> None:
        self.capacity = capacity
        self.settings = settings
        self.unit = settings.unit or limits.block_size
        self.budget = limits.max_num_batched_tokens

    def fill(self, step: Step, memory: Memory, queue: Queue) -> None:
        """Lets all generating requests decode, and fills the rest of the step with prompts."""
        running = step.running
        queue.passed_over = False
        queue.blocked = False
        queue.gated = False
        if not queue.size and not running.chunked and step.decode_all():
            step.end_decodes()
            return
        fits = self.capacity.fitting(step, memory, queue)
        contexts = self._decode(step, memory, fits)
        self._prefill(step, memory, contexts)
        if queue.blocked and any(hit and request.state is State.WAITING for request, hit in fits):
            # One fits that the step had no tokens left for, in front of the one that does not.
            queue.blocked = False

    def _decode(self, step: Step, memory: Memory, fits: list[Candidate]) -> list[Candidate]:
        """Lets requests decode; returns the prompts that the micro batch may have, up to its size."""
        decoders = step.running.decoders.requests
        contexts = []
        tokens = 0
        computing: dict[Request, None] = {}  # in order: they take blocks
        for candidate in fits:
            request = candidate.request
            if request in decoders:
                tokens += 1
                computing[request] = None
            elif self.settings.chunked_context:
                contexts.append(candidate)
            else:
                there = request.computed_tokens if candidate.hit is None else candidate.hit.tokens
                missing = max(request.known_tokens - there, 1)
                if tokens + missing > self.budget:
                    break
                tokens += missing
                contexts.append(candidate)
            if len(computing) + len(contexts) >= step.limits.max_num_seqs:
                break
        left_out = [request for request in decoders if request not in computing]
        if left_out:
            step.leave_out(left_out)
            for request in computing:
                begins, fills = request in step.crossing(), request in step.filling()
                step.decode(request, begins=begins, fills=fills)
        else:
            while not step.decode_all():
                step.preempt(max(decoders, key=arrival))
        step.end_decodes()
        return contexts

    def _prefill(self, step: Step, memory: Memory, contexts: list[Candidate]) -> None:
        """Computes the chunks of prompts; those that do not end their prompt go first."""
        shapes = [_shape(request, hit) for request, hit in contexts]
        budget = step.budget()
        sizes = [shape.remaining for shape in shapes]
        if self.settings.chunked_context:
            equal = self.settings.chunking == "equal_progress"
            sizes = chunk_sizes(shapes, budget, self.budget, self.unit, equal=equal)
        work = [
            (candidate, cost(size, shape))
            for candidate, size, shape in zip(contexts, sizes, shapes, strict=True)
            if size > 0
        ]
        lasts = [size >= shape.remaining for size, shape in zip(sizes, shapes, strict=True) if size > 0]
        for completes in (False, True):
            for (candidate, tokens), last in zip(work, lasts, strict=True):
                if last is completes:
                    self._compute(step, memory, candidate, tokens)

    def _compute(self, step: Step, memory: Memory, candidate: Candidate, tokens: int) -> None:
        request, hit = candidate
        if hit is None:
            step.compute(request, min(tokens, request.known_tokens - request.computed_tokens))
            return
        current = memory.find(request)
        if not memory.fits(request, current, request.known_tokens):
            return  # its prefix was evicted by others of this step
        start = step.head_start(request, current)
        tokens = min(tokens, request.known_tokens - current.tokens - start.tokens)
        step.admit(request, current, start.tokens)
        step.run(request)
        step.compute(request, tokens, start)
        memory.grow(request, request.known_tokens)


def _shape(request: Request, hit: Hit | None) -> Context:
    """The rest of a prompt, and how much of it is cached."""
    if hit is None:
        return Context(request.known_tokens - request.computed_tokens, 0)
    return Context(request.known_tokens, hit.tokens)


class FitsWhole:
    """Rejects what the capacity scheduler would never let run.

    TensorRT-LLM counts a block for the last token too; without chunks a prompt must fit in one step.
    """

    def __init__(self, limits: Limits, settings: TrtllmSettings) -> None:
        self._limits = limits
        self._settings = settings

    def refusal(self, request: Request, running: Running, queue: Queue) -> str:
        """Why a request may not join the queue; empty where it may."""
        limits = self._limits
        blocks = -(-request.total_tokens // limits.block_size)
        if blocks > limits.num_blocks:
            return f"needs {blocks} blocks of {limits.block_size} tokens; the pool has {limits.num_blocks}"
        if not self._settings.chunked_context and request.total_tokens - 1 > limits.max_num_batched_tokens:
            return (
                f"{request.prompt_tokens} prompt + {request.output_tokens} output tokens exceed "
                f"max_num_batched_tokens {limits.max_num_batched_tokens}, and prompts are not cut"
            )
        return ""

    def admitted(self, request: Request, cached_tokens: int, now: int) -> None:
        pass  # it is asked once
