"""vLLM's step under settings that most servers leave alone (`VllmSettings`).

With them several prompts may be in chunks at once, with decoding requests between them. So where prompts are
being computed, all requests take their tokens one by one in admission order.

Source: vllm/v1/core/sched/scheduler.py, `Scheduler.schedule`, and kv_cache_manager.py, `allocate_slots`
(0.24 to 0.33).
"""

from __future__ import annotations

from pagecast.sim.core.encoder import Encoder
from pagecast.sim.core.engines.vllm.aligned import ChunkEnds
from pagecast.sim.core.engines.vllm.settings import VllmSettings
from pagecast.sim.core.engines.vllm.versions import VllmRules
from pagecast.sim.core.engines.vllm.waiting import WaitingPass
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.head_start import NO_START, HeadStart
from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.rules.rules import Admission
from pagecast.sim.core.step import Step

_WAITING = (State.WAITING, State.LOADING)


class Tuning:
    """The settings, and what they come to in the step being planned.

    `margin`: blocks that an admission leaves free while others run. `longest_chunk`: tokens of a prompt in
    the step at most; 0: any number. `holds`: no prompt is computed in the step. `computes`: one is.
    """

    def __init__(self, settings: VllmSettings, limits: Limits, rules: VllmRules) -> None:
        self.settings = settings
        self.margin = margin_of(settings, limits)
        self.longest_chunk = 0
        self.holds = False
        self.computes = False
        self.interval = settings.prefill_schedule_interval if rules.keeps_interval else 1
        self.passed_over: set[Request] = set()
        self.encoder: Encoder | None = None
        self.ends: ChunkEnds | None = None  # where chunks end for the sake of recurrent states
        self._spares_lone = rules.spares_lone_prompt
        self._step_tokens = limits.max_num_batched_tokens
        self._latest = -self.interval  # the newest step that computed a prompt
        self._behind = False  # the newest step that might admit prompts left some waiting

    def begin(self, step: Step, queue: Queue) -> None:
        """Starts a step."""
        step.in_turn = False
        self.computes = False
        threshold = self.settings.long_prefill_token_threshold
        if threshold and self._spares_lone:
            requests = len(step.running.requests) + queue.size
            if requests <= 1:
                threshold = 0
            elif self.settings.long_prefill_token_threshold_adaptive:
                threshold = max(threshold, self._step_tokens // requests)
        self.longest_chunk = threshold
        self.holds = self._holds(step)
        if self.encoder is not None:
            self.encoder.begin(step.number)

    def _holds(self, step: Step) -> bool:
        """Whether prompts wait for the interval to end: only while others generate and the queue is short."""
        running = step.running
        if self._behind or step.executed + 1 - self._latest >= self.interval:
            return False
        prompts = sum([request.state is State.PREFILL for request in running.chunked])
        return len(running.requests) > prompts

    def next_chunk(self, step: Step, request: Request) -> int:
        """Tokens that a running request with chunks to come computes now."""
        if self.holds and request.state is State.PREFILL:
            return 0
        tokens = step.next_chunk(request)
        if self.longest_chunk:
            tokens = min(tokens, self.longest_chunk)
        if self.ends is not None and tokens:
            tokens = self.ends.fit(request, request.computed_tokens, tokens)
        if request.items and self.encoder is not None:
            tokens = self.encoder.fit(request, request.computed_tokens, tokens)
        return tokens

    def note_chunk(self, step: Step, request: Request) -> None:
        """Takes note of a chunk of a running request."""
        if step.computes(request):
            self.computes |= request.state is State.PREFILL
            if request.items and self.encoder is not None:
                self.encoder.encode(request, step.number)

    def end(self, step: Step, queue: Queue) -> None:
        """Takes note of what a step computes."""
        if not self.holds and not step.preempted:
            self.passed_over = {request for request in self.passed_over if request.state in _WAITING}
            self._behind = queue.size > len(self.passed_over)
        if self.computes:
            self._latest = step.executed + bool(step.computing())


class TunedPass(WaitingPass):
    """The way through the queue under such settings."""

    def __init__(
        self,
        step: Step,
        memory: Memory,
        queue: Queue,
        admission: Admission,
        rules: VllmRules,
        tuning: Tuning,
    ) -> None:
        super().__init__(step, memory, queue, admission, rules)
        self._tuning = tuning
        self.whole = tuning.settings.scheduler_reserve_full_isl
        self._checks_room |= not self.whole

    def margin(self) -> int:
        return self._tuning.margin if self.step.running.requests else 0

    def _pass_over(self, request: Request, *, lasting: bool = False) -> bool:
        self._tuning.passed_over.add(request)
        return super()._pass_over(request, lasting=lasting)

    def _refuse(self, request: Request, hit: Hit) -> bool:
        super()._refuse(request, hit)
        if not self.whole and (self.step.limits.groups or self.step.left_out):
            self.queue.blocked = False  # a chunk of the next step may have room
        return False

    def _first_tokens(self, request: Request, done: int) -> int:
        tuning = self._tuning
        remaining = request.known_tokens - done
        if tuning.holds and remaining > 1:
            return 0
        longest = tuning.longest_chunk or remaining
        if not tuning.settings.chunked_prefill and min(remaining, longest) > self.budget:
            return 0
        tokens = super()._first_tokens(request, done)
        if tuning.longest_chunk:
            tokens = min(tokens, longest)
        if tuning.ends is not None and tokens:
            padded = tokens > remaining
            fitting = tuning.ends.fit(request, done, tokens)
            tokens = 1 if padded and 0 < fitting < tokens else fitting
        if request.items and tuning.encoder is not None:
            tokens = tuning.encoder.fit(request, done, tokens)
        return tokens

    def _admit(self, request: Request, hit: Hit) -> bool:
        encoder = self._tuning.encoder
        if not request.items or encoder is None:
            return super()._admit(request, hit)
        # What is cached is looked up, and room made for the rest, before blocks are asked for.
        encoder.stalled = False
        tokens = self._first_tokens(request, hit.tokens)
        if not tokens:
            return encoder.stalled and self.rules.encoder.passes_over_unencoded and self._pass_over(request)
        room_tokens = self.step.with_lookahead(hit.tokens + tokens)
        memory = self.memory
        admits = self.admission.admits(self.step, memory, self.queue, request, hit)
        if not admits or not memory.fits_now(request, hit, room_tokens, self.margin()):
            encoder.release(request)
            self._refuse(request, hit)
            self.queue.blocked = False  # every attempt counts as a use of what is cached
            return False
        self.step.admit(request, hit)
        self._run(request, tokens, NO_START)
        return True

    def _run(self, request: Request, tokens: int, start: HeadStart) -> None:
        self._tuning.passed_over.discard(request)
        self._tuning.computes |= request.known_tokens - request.computed_tokens > 1
        super()._run(request, tokens, start)
        if request.items and self._tuning.encoder is not None:
            self._tuning.encoder.encode(request, self.step.number)


class WithMargin:
    """vLLM's admission with a `watermark`, or without `scheduler_reserve_full_isl`."""

    def __init__(self, settings: VllmSettings, limits: Limits) -> None:
        self._margin = margin_of(settings, limits)
        self._whole = settings.scheduler_reserve_full_isl

    def admits(self, step: Step, memory: Memory, queue: Queue, request: Request, hit: Hit) -> bool:
        """Whether the blocks of all known tokens are free, beside those that are left free.

        Without `scheduler_reserve_full_isl` always: the first chunk's blocks alone count (`WaitingPass`).
        """
        margin = self._margin if step.running.requests else 0
        return not self._whole or memory.fits(request, hit, request.known_tokens, margin)


def margin_of(settings: VllmSettings, limits: Limits) -> int:
    """Blocks that an admission leaves free (`watermark`); vLLM counts its null block.

    One mark, asked anew for each request: admission goes on once the next one leaves so many blocks free.
    `Watermarks`, an option of cache policies for any admission, has two, with hysteresis between them.
    """
    return int(settings.watermark * (limits.num_blocks + 1))
