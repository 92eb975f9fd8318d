"""Engine backend: the real engine's step loop in a thread of its own.

The thread takes requests and cancellations from an inbox between steps, and hands each step's tokens to the
event loop as one batch. It is the only one that touches the engine; what a scrape reads are single numbers.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import numpy as np
from pagecast.engine.engine import Engine
from pagecast.engine.host_tier import HostTransfer
from pagecast.engine.params import SamplingParams
from pagecast.engine.sampling import SEEDS
from pagecast.engine.sequence import Sequence
from pagecast.planner_app.server.backend import HostTierUse, Observer, ReplicaLoad
from pagecast.planner_app.server.errors import ApiError
from pagecast.planner_app.server.generation import NEVER, Generation
from pagecast.planner_app.server.history import History
from pagecast.planner_app.server.text import GrowingText
from pagecast.planner_app.server.tokenizer import Tokenizer
from pagecast.planner_app.stderr import complain
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.identity.scope import DEFAULT_SCOPE, Scope
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request

_NAP_S = 0.1  # the longest wait for something to do
_FLUSH_NS = 200_000_000


class _Step:
    """Results of the steps since the last hand-over."""

    def __init__(self) -> None:
        self.tokens = 0  # computed in the step
        self.end_ns = 0
        self.heard: list[Generation] = []
        self.ended: list[tuple[Generation, Sequence]] = []


class EngineBackend:
    """Implements `GenerationBackend` with an engine, which it closes in the end."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, most_waiting: int | None = None) -> None:
        self.engine = engine
        self.limits = engine.limits
        self.max_model_len = engine.loaded.max_model_len
        self.observer: Observer | None = None
        self.history = History()
        self._tokenizer = tokenizer
        self._most_waiting = most_waiting
        self._inbox: deque[Callable[[], None]] = deque()
        self._coming = 0  # submissions in the inbox
        self._live: dict[int, Generation] = {}  # the event loop's
        self._texts: dict[int, GrowingText] = {}  # of those with stop strings
        self._computing: dict[Sequence, Generation] = {}  # the thread's
        self._step = _Step()
        self._work = threading.Event()
        self._stopping = False
        self._failed: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # ---- the event loop's side

    async def start(self) -> None:
        """See `GenerationBackend`."""
        self._loop = asyncio.get_running_loop()
        self.engine.loop.restart()
        self.engine.loop.log = self
        self.engine.on_end = self._note_end
        self._thread = threading.Thread(target=self._run, name="engine")
        self._thread.start()

    async def stop(self) -> None:
        """See `GenerationBackend`."""
        self._stopping = True
        self._work.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)
        for generation in list(self._live.values()):
            self._end(generation, "abort", "the server was stopped")
        self.engine.close()

    def submit(self, generation: Generation) -> None:
        """See `GenerationBackend`."""
        error = self._refusal(generation)
        if error is not None:
            generation.error = error
            generation.finish_reason = "error"
            generation.reason = error.message
            generation.bell.ring()
            return
        generation.arrival_ns = self.engine.loop.clock.now()
        self._live[generation.number] = generation
        if generation.sampling.stop:
            sampling = generation.sampling
            text = GrowingText(self._tokenizer, sampling.stop, include_stop=sampling.include_stop)
            self._texts[generation.number] = text
        self._coming += 1
        self._inbox.append(lambda: self._take(generation))
        self._work.set()

    def cancel(self, generation: Generation) -> None:
        """See `GenerationBackend`."""
        if generation.number in self._live and not generation.done:
            self._end(generation, "abort", "")
            self._let_go(generation)

    def _let_go(self, generation: Generation) -> None:
        """Has the engine end a request that nobody waits for any more."""
        id = str(generation.number)
        self._inbox.append(lambda: self._cancel(id))
        self._work.set()

    def _refusal(self, generation: Generation) -> ApiError | None:
        if self._failed is not None:
            return ApiError(f"the engine has failed: {self._failed}", status=HTTPStatus.INTERNAL_SERVER_ERROR)
        if self._most_waiting is not None and self.load().waiting >= self._most_waiting:
            return ApiError(
                f"the waiting queue is full: {self._most_waiting} requests wait; try again later",
                status=HTTPStatus.TOO_MANY_REQUESTS,
            )
        sampling = generation.sampling
        if 0 < sampling.min_tokens < (sampling.max_tokens or self.max_model_len) and not sampling.ignore_eos:
            return ApiError(
                "min_tokens must be max_tokens here: the engine ends no text later than its end token"
            )
        refused = self.limits.refusal(len(generation.prompt), self._output_tokens(generation))
        return ApiError(refused) if refused else None

    def _output_tokens(self, generation: Generation) -> int:
        return generation.sampling.max_tokens or max(1, self.max_model_len - len(generation.prompt))

    def _deliver(self, step: _Step) -> None:
        """Tells clients what came of a step, in the event loop."""
        gaps: dict[int, int] = {}
        first: list[Generation] = []
        for generation in step.heard:
            if generation.done:
                continue
            if generation.first_ns == NEVER:
                generation.first_ns = step.end_ns
                first.append(generation)
            else:
                gap = step.end_ns - generation.last_ns
                if gap:  # several tokens of one step are one output
                    gaps[gap] = gaps.get(gap, 0) + 1
            generation.count += 1
            generation.last_ns = step.end_ns
            generation.bell.ring()
            self._stop_at_text(generation)
        for generation, sequence in step.ended:
            if not generation.done:
                self._end_as(generation, sequence)
        if self.observer is not None and step.tokens:
            late = self.engine.loop.clock.now() - step.end_ns
            self.observer.step(step.tokens, gaps, first, late)

    def _stop_at_text(self, generation: Generation) -> None:
        text = self._texts.get(generation.number)
        if text is None:
            return
        text.add(generation.tokens[generation.count - 1 : generation.count])
        if text.stopped is not None:
            generation.stop_reason = text.stopped
            self._end(generation, "stop", "")
            self._let_go(generation)

    def _end_as(self, generation: Generation, sequence: Sequence) -> None:
        reason = sequence.finish_reason
        if reason == "stop":
            last = generation.tokens[-1]
            if last in generation.sampling.stop_token_ids:
                generation.stop_reason = last
            generation.hidden = 0 if generation.sampling.include_stop else 1
        if reason in ("failed", "rejected"):
            status = HTTPStatus.BAD_REQUEST if reason == "rejected" else HTTPStatus.INTERNAL_SERVER_ERROR
            generation.error = ApiError(sequence.reason, status=status)
        finish_reason = {"cancelled": "abort", "failed": "error", "rejected": "error"}.get(reason, reason)
        self._end(generation, finish_reason, sequence.reason)

    def _end(self, generation: Generation, finish_reason: str, reason: str) -> None:
        self._live.pop(generation.number, None)
        self._texts.pop(generation.number, None)
        generation.finish_reason = finish_reason
        generation.reason = reason
        generation.finished_ns = self.engine.loop.clock.now()
        generation.bell.ring()
        if self.observer is not None:
            self.observer.ended(generation)

    # ---- the engine's side

    def _run(self) -> None:
        loop = self.engine.loop
        flushed = 0
        try:
            while not self._stopping:
                while self._inbox:
                    self._inbox.popleft()()
                busy = loop.step()
                self._hand_over()
                now = loop.clock.now()
                if now - flushed > _FLUSH_NS:
                    flushed = now
                    self.history.flush()
                if not busy and not self._inbox:
                    self._work.clear()
                    if not self._inbox:
                        self._work.wait(_NAP_S)
            loop.drain()
        except BaseException as error:
            self._failed = error
            complain(f"the engine has failed: {error}")
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._give_up, error)
        finally:
            self._hand_over()
            self.history.close()

    def _give_up(self, error: BaseException) -> None:
        for generation in list(self._live.values()):
            generation.error = ApiError(
                f"the engine has failed: {error}", status=HTTPStatus.INTERNAL_SERVER_ERROR
            )
            self._end(generation, "error", str(error))

    def _take(self, generation: Generation) -> None:
        """Hands a generation to the engine."""
        self._coming -= 1
        if generation.done:
            return
        engine, sampling = self.engine, generation.sampling
        prompt = np.asarray(generation.prompt, np.int32)
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            ignore_eos=sampling.ignore_eos or sampling.min_tokens > 0,
            stop_token_ids=sampling.stop_token_ids,
        )
        stops = frozenset(sampling.stop_token_ids)
        if not params.ignore_eos:
            stops |= engine.loaded.spec.eos_ids
        keys = BlockKeys.of_ids(self.limits.block_size, prompt.astype(np.int64), _scope(generation))
        request = Request(
            str(generation.number),
            keys,
            len(prompt),
            self._output_tokens(generation),
            arrival_ns=generation.arrival_ns,
            priority=generation.priority,
            index=generation.number,
        )
        seed = generation.number if sampling.seed is None else sampling.seed + generation.choice
        sequence = Sequence(request, prompt, params, seed=seed % SEEDS, stops=stops, listener=self._hear)
        self._computing[sequence] = generation
        self.history.note_coming(request, generation)
        self.history.note_outside(engine.loop.clock.now(), generation.number, cancelled=False)
        engine.loop.submit(sequence)

    def _cancel(self, id: str) -> None:
        self.engine.loop.cancel(id)

    def _hear(self, sequence: Sequence, token: int) -> None:
        generation = self._computing.get(sequence)
        if generation is None:
            return
        generation.tokens.append(token)
        if generation.admitted_ns == NEVER:
            generation.admitted_ns = sequence.request.admitted_ns
            generation.cached_tokens = sequence.request.cached_tokens
        self._step.heard.append(generation)

    def _note_end(self, sequence: Sequence) -> None:
        generation = self._computing[sequence]
        self.history.note_ended(sequence.request, sequence.request.finished_ns)
        self._step.ended.append((generation, sequence))

    def _hand_over(self) -> None:
        """Passes what has come of the last steps to the event loop."""
        step = self._step
        if not (step.heard or step.ended or step.tokens):
            return
        self._step = _Step()
        for _, sequence in step.ended:
            self._computing.pop(sequence, None)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, step)

    # ---- `engine.loop.Log`

    def idle(self, start_ns: int) -> None:
        """See `engine.loop.Log`."""
        self.history.note_idle(start_ns)

    def step(self, plan: StepPlan, start_ns: int, planned_ns: int) -> None:
        """See `engine.loop.Log`."""
        self.history.note_planned(start_ns)

    def committed(self, plan: StepPlan, outcome: Outcome, end_ns: int) -> None:
        """See `engine.loop.Log`."""
        if self.engine.loop.drafter is not None:
            self.history.note_guessed(plan, outcome)
        self.history.note_committed(plan, end_ns)
        self._step.end_ns = end_ns
        self._step.tokens += plan.decode_n + sum(computed for computed, _ in plan.prefill)

    def transferred(self, transfers: Iterable[HostTransfer], now_ns: int) -> None:
        """See `engine.loop.Log`."""
        self.history.note_transferred([one.recorded(now_ns) for one in transfers], now_ns)

    # ---- figures

    @property
    def alive(self) -> bool:
        """See `GenerationBackend`."""
        return self._failed is None

    def load(self) -> ReplicaLoad:
        """See `GenerationBackend`."""
        scheduler = self.engine.loop.scheduler
        waiting = len(scheduler.queue) + self._coming
        return ReplicaLoad(
            len(scheduler.running.requests), waiting, scheduler.memory.used_blocks, self.limits.num_blocks
        )

    def adapters(self) -> tuple[list[str], list[str]]:
        """See `GenerationBackend`: the engine has none."""
        return [], []

    def host_tier(self) -> HostTierUse | None:
        """See `GenerationBackend`: the engine's is in its recordings."""
        return None

    def preemptions(self) -> int:
        """See `GenerationBackend`."""
        return self.engine.loop.scheduler.preemptions


def _scope(generation: Generation) -> Any:
    return Scope(salt=generation.salt) if generation.salt else DEFAULT_SCOPE
