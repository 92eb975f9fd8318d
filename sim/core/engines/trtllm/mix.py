"""TensorRT-LLM's step: the capacity scheduler says who may run, the micro-batch scheduler who computes.

Requests are looked at in the order of their arrival, those that run and those that wait. A prompt takes all
its blocks with its first chunk. A request whose next new block is about to be computed by another waits for
it, so that it can reuse it.

Source: TensorRT-LLM, tensorrt_llm/_torch/pyexecutor/scheduler/scheduler.py (002f3cc), which mirrors
cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp and scheduledBlocksManager.h.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple, Protocol

from pagecast.sim.core.decoders import arrival_order
from pagecast.sim.core.engines.trtllm.chunks import Context, chunk_sizes, cost
from pagecast.sim.core.engines.trtllm.settings import TrtllmSettings
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.head_start import NO_START
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


class Contributed:
    """The first new blocks of prompts that are being computed: who needs one of them next, waits for it."""

    def __init__(self, step: Step, memory: Memory) -> None:
        self._memory = memory
        self._blocks: set[tuple[bytes, int]] = set()
        if memory.caching:
            for request in step.running.chunked:
                block = self._first_new(request, memory.find_whole(request))
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
        if number >= request.known_tokens // size:
            return None
        keys = request.keys
        for digest, end in zip(keys.digests, keys.ends, strict=True):
            if number < end:
                return digest, number
        return None


class Waiting:
    """The waiting requests that a step may begin: as many as there are places, the oldest first.

    Those that only await a block of others take a place, too: TensorRT-LLM has no more active requests than
    the batch may have. Tenants at their ceilings take none.
    """

    def __init__(self, step: Step, queue: Queue) -> None:
        tenants = step.limits.tenants
        self._queue = queue
        self._places = step.limits.max_num_seqs - len(step.running.requests)
        self._ceilings = TenantCeilings(step) if tenants is not None and tenants.limited else None
        limit = self._places if self._ceilings is None else queue.size
        self.requests = list(islice(queue, max(limit, 0)))
        self._asked = 0
        self._begun = 0

    def asks(self, request: Request, *, lasting: bool) -> bool:
        """Whether a request is one of them. `lasting`: who is not stays so until a request comes or goes."""
        if self._ceilings is not None and not self._ceilings.opens(request):
            self._queue.pass_over(request, lasting=lasting)
            return False
        self._asked += 1
        return self._asked <= self._places

    def begin(self, request: Request) -> None:
        """Takes note that a request fits."""
        self._begun += 1
        if self._ceilings is not None:
            self._ceilings.enter(request)

    def end(self) -> None:
        """All were asked: nobody else is until a request comes or goes, unless one was passed over."""
        queue = self._queue
        more = self._asked > self._places or (self._ceilings is None and queue.size > len(self.requests))
        if more or (queue.gated and not self._begun):
            queue.blocked = not queue.asks_again


class GuaranteedNoEvict:
    """Admits what can run to its end: nobody is ever paused. `static`: a batch ends before another begins."""

    def __init__(self, *, static: bool = False) -> None:
        self.static = static

    def fitting(self, step: Step, memory: Memory, queue: Queue) -> list[Candidate]:
        """The generating requests, then prompts in order, until the longest output of one does not fit."""
        running = step.running
        chunked = running.chunked
        generating = [each for each in running.requests if each not in chunked]
        free = memory.free_blocks
        for request in generating:
            free -= memory.missing(request, request.most_tokens)
        generating = sorted([each for each in generating if each.state is State.DECODE], key=arrival_order)
        fits = [Candidate(request) for request in generating]
        if self.static and len(running.requests) > len(chunked):
            queue.blocked = True
            return fits
        contributed = Contributed(step, memory)
        waiting = Waiting(step, queue)
        for request in sorted([*chunked, *waiting.requests], key=arrival_order):
            if request in chunked:
                blocks = memory.missing(request, request.most_tokens)
                if blocks > free:
                    break
                free -= blocks
                fits.append(Candidate(request))
                continue
            if not waiting.asks(request, lasting=True):
                continue
            hit = memory.find_whole(request)
            if not self.static and contributed.awaits(request, hit):
                queue.pass_over(request)
                continue
            blocks = -(-request.most_tokens // memory.block_size) * memory.crossing_blocks
            blocks -= hit.held
            if blocks > free:
                step.refuse(request, hit)
                break
            free -= blocks
            waiting.begin(request)
            fits.append(Candidate(request, hit))
        else:
            waiting.end()
        return fits


class MaxUtilization:
    """Admits what fits in this step; when blocks run out the last that were begun are paused.

    A request that is paused counts as free at once, but its content is found, and its blocks are told from
    those that others hold, from the next step on.
    """

    def fitting(self, step: Step, memory: Memory, queue: Queue) -> list[Candidate]:
        """Requests in order, with the blocks of this step alone; the first chunk takes the whole prompt's."""
        running = step.running
        waiting = Waiting(step, queue)
        order = sorted([*running.requests, *waiting.requests], key=arrival_order)
        crossing = step.crossing()
        contributed = Contributed(step, memory)
        hits: dict[Request, Hit] = {}
        fits: list[Candidate] = []
        blocks_in_step = 0
        position, end = 0, len(order)
        while position < end:
            request = order[position]
            hit = None
            blocks = 0
            if request in running.requests:
                if request in crossing or (
                    request.state is State.DRAINING and not request.computed_tokens % memory.block_size
                ):
                    blocks = memory.crossing_blocks
            else:
                if not waiting.asks(request, lasting=False):  # a pause may make room for it
                    position += 1
                    continue
                hit = hits[request] if request in hits else memory.find_whole(request)
                if contributed.awaits(request, hit):
                    queue.pass_over(request)
                    position += 1
                    continue
                blocks = -(-request.known_tokens // memory.block_size) * memory.crossing_blocks
                blocks -= hit.held
            if blocks_in_step + blocks <= memory.free_blocks:
                blocks_in_step += blocks
                if hit is not None:
                    waiting.begin(request)
                if request.state is not State.DRAINING:
                    fits.append(Candidate(request, hit))
                position += 1
                continue
            last = next((at for at in range(end - 1, position - 1, -1) if _may_pause(step, order[at])), None)
            if last is None:
                if hit is not None:
                    step.refuse(request, hit)
                else:
                    queue.blocked = not queue.asks_again
                break
            if not step.preempted:
                hits = {each: memory.find_whole(each) for each in order[position:end] if _waits(each)}
            step.failed_allocations += 1
            step.preempt(order[last])
            end = last
        else:
            waiting.end()
        return fits


def _waits(request: Request) -> bool:
    return request.state is State.WAITING


def _may_pause(step: Step, request: Request) -> bool:
    """Whether a request was begun, and has more to compute than its last token."""
    return request in step.running.requests and request.state is not State.DRAINING


class TrtllmMix:
    """Prompts and decodes share a step, as the capacity rule and the token budget allow."""

    def __init__(self, capacity: Capacity, limits: Limits, settings: TrtllmSettings) -> None:
        self.capacity = capacity
        self.settings = settings
        self.unit = settings.unit or limits.block_size
        self.budget = limits.max_num_batched_tokens
        self._size = limits.block_size
        self._waited = 0  # steps for which prompts have been held back

    def fill(self, step: Step, memory: Memory, queue: Queue) -> None:
        """Lets all generating requests decode, and fills the rest of the step with prompts."""
        running = step.running
        queue.asks_again = False
        queue.blocked = False
        queue.gated = False
        if not queue.size and not running.chunked and not running.draining and step.decode_all():
            step.end_decodes()
            return
        fits = self.capacity.fitting(step, memory, queue)
        computing, contexts = self._choose(step, fits)
        prompts = self._prompts(contexts, self.budget - len(computing))
        if self.settings.wait_steps and prompts and computing and self._holds_back(contexts, len(computing)):
            prompts = []
            queue.blocked = False
        self._begin(step, memory, prompts)
        self._decode(step, computing)
        self._trim(prompts, self.budget - len(computing))
        for completes in (False, True):
            for prompt in prompts:
                if prompt.tokens and prompt.completes is completes:
                    step.compute(prompt.request, prompt.tokens, prompt.start)
        if queue.blocked and (step.preempted or any(hit is not None for _, hit in fits)):
            # One was begun, whose blocks the others can share from now on, or had to wait for tokens; or one
            # was paused, whose content can be found from now on.
            queue.blocked = False

    def _holds_back(self, contexts: list[Candidate], tokens: int) -> bool:
        """Whether prompts wait for others to share their step. `tokens`: of the requests that generate.

        A prompt counts with all its tokens but the cached ones that it begins with, as in `PyExecutor`
        (`_waiting_requests`).
        """
        for request, hit in contexts:
            tokens += max(request.known_tokens - (hit.tokens if hit is not None else 0), 1)
        if self._waited >= self.settings.wait_steps or tokens >= self.settings.wait_ratio * self.budget:
            self._waited = 0
            return False
        self._waited += 1
        return True

    def _choose(self, step: Step, fits: list[Candidate]) -> tuple[dict[Request, None], list[Candidate]]:
        """The requests that decode, in order, and the prompts that the micro batch may have."""
        decoders = step.running.decoders.requests
        contexts = []
        tokens = 0
        computing: dict[Request, None] = {}
        for candidate in fits:
            request = candidate.request
            if request in decoders:
                if tokens + 1 > self.budget:
                    break
                tokens += 1
                computing[request] = None
            elif self.settings.chunked_context:
                contexts.append(candidate)
            else:
                shape = _shape(request, candidate.hit)
                needed = max(cost(shape.remaining, shape), 1)
                if tokens + needed > self.budget:
                    break
                tokens += needed
                contexts.append(candidate)
            if len(computing) + len(contexts) >= step.limits.max_num_seqs:
                break
        return computing, contexts

    def _prompts(self, contexts: list[Candidate], budget: int) -> list[Prompt]:
        """The prompts with their chunks; those whose chunk does not end them first."""
        shapes = [_shape(request, hit) for request, hit in contexts]
        sizes = [shape.remaining for shape in shapes]
        if self.settings.chunked_context:
            equal = self.settings.chunking == "equal_progress"
            sizes = chunk_sizes(shapes, budget, self.budget, self.unit, equal=equal)
        prompts = [
            Prompt(request, size, new=hit is not None)
            for (request, hit), size in zip(contexts, sizes, strict=True)
            if size > 0
        ]
        return sorted(prompts, key=Prompt.order)

    def _begin(self, step: Step, memory: Memory, prompts: list[Prompt]) -> None:
        """Gives new requests what is cached for them, and then the rest of their prompts' blocks."""
        reserved = 0
        begun = []
        for prompt in prompts:
            request = prompt.request
            if not prompt.new:
                continue
            hit = memory.find(request)
            if not memory.fits(request, hit, request.known_tokens, reserved):
                prompt.tokens = 0  # the policy counts a block that is shared twice
                continue
            prompt.start = step.head_start(request, hit)
            prompt.move_behind(hit.tokens + prompt.start.tokens, self._size)
            step.admit(request, hit, prompt.start)
            step.run(request)
            reserved += memory.missing(request, request.known_tokens)
            begun.append(request)
        for request in begun:
            memory.grow(request, request.known_tokens)

    def _decode(self, step: Step, computing: dict[Request, None]) -> None:
        """Lets requests decode; the others sit the step out."""
        decoders = step.running.decoders.requests
        left_out = [request for request in decoders if request not in computing]
        if left_out:
            step.leave_out(left_out)
            for request in computing:
                begins, fills = request in step.crossing(), request in step.filling()
                step.decode(request, begins=begins, fills=fills)
        else:
            while not step.decode_all():
                step.preempt(max(decoders, key=arrival_order))
        step.end_decodes()

    def _trim(self, prompts: list[Prompt], budget: int) -> None:
        """Cuts chunks from the back where less was cached in fact than the micro batch was told."""
        if not self.settings.chunked_context:
            return
        excess = sum(prompt.tokens for prompt in prompts) - budget
        for prompt in sorted(prompts, key=Prompt.order, reverse=True):
            if excess <= 0:
                return
            excess -= prompt.shrink(excess, self._size)


class Prompt:
    """A prompt that computes in a step: `tokens` of it, at first the size of its chunk. `new`: it begins."""

    def __init__(self, request: Request, tokens: int, *, new: bool) -> None:
        self.request = request
        self.tokens = tokens
        self.new = new
        self.start = NO_START
        self.at = request.computed_tokens

    @property
    def completes(self) -> bool:
        """Whether the chunk ends the prompt."""
        return self.at + self.tokens >= self.request.known_tokens

    def order(self) -> bool:
        """Sorts prompts: chunks that do not end theirs go first."""
        return self.completes

    def move_behind(self, tokens: int, block_size: int) -> None:
        """Moves the first chunk behind a cached prefix. One that does not end the prompt ends a block.

        One that would be empty then, as its unit is less than a block, is left as it is: TensorRT-LLM would
        compute nothing of it in this step, and go on with it in the next.
        """
        self.at = tokens
        left = self.request.known_tokens - tokens
        whole = (tokens + self.tokens) // block_size * block_size - tokens
        if tokens and self.tokens < left and whole > 0:
            self.tokens = whole
        self.tokens = min(self.tokens, left)

    def shrink(self, tokens: int, block_size: int) -> int:
        """Cuts at least so many tokens, to the end of a block. Returns how many; 0: none would be left."""
        kept = (self.at + max(self.tokens - tokens, 0)) // block_size * block_size - self.at
        if kept <= 0:
            return 0
        cut = self.tokens - kept
        self.tokens = kept
        return cut


def _shape(request: Request, hit: Hit | None) -> Context:
    """The rest of a prompt, and how much of it is cached in full blocks."""
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
        blocks = -(-request.most_tokens // limits.block_size)
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
