"""Engine backend: the server's side of an engine that runs in another process.

It sends submissions and cancellations by mail, and gives each step's tokens to the clients.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import numpy as np
from pagecast.planner_app.server.backend import HostTierUse, Observer, ReplicaLoad, SpeculationUse
from pagecast.planner_app.server.engine_mail import (
    Cancellation,
    Draining,
    EngineFacts,
    Failure,
    Farewell,
    GenerationEnd,
    MailReader,
    StepNews,
    Submission,
    packed,
)
from pagecast.planner_app.server.errors import ApiError, backend_failed
from pagecast.planner_app.server.generation import NEVER, Generation
from pagecast.planner_app.server.text import GrowingText
from pagecast.planner_app.server.tokenizer import Tokenizer
from pagecast.planner_app.stderr import complain


class EngineBackend(asyncio.Protocol):
    """Implements `GenerationBackend` with an engine at the other end of `connection`.

    `drain` is called once, when the engine's process is told to end or has ended.
    """

    def __init__(self, facts: EngineFacts, connection: socket.socket, tokenizer: Tokenizer) -> None:
        self.limits = facts.limits
        self.max_model_len = facts.max_model_len
        self.observer: Observer | None = None
        self.drain: Callable[[], None] | None = None
        self._start_ns = facts.start_ns
        self._connection = connection
        self._tokenizer = tokenizer
        self._transport: asyncio.WriteTransport | None = None
        self._reader = MailReader()
        self._live: dict[int, Generation] = {}
        self._submitted = 0
        self._latest_arrival_ns = NEVER
        self._received = 0  # of these, those that the engine's scheduler has been given
        self._texts: dict[int, GrowingText] = {}  # of those with stop strings
        self._load = ReplicaLoad(0, 0, 0, facts.limits.num_blocks)
        self._preemptions = 0
        self._speculation: SpeculationUse | None = None
        self._host_tier: HostTierUse | None = None
        self._failure = ""
        self.unrecorded = ""
        self._stopping = False
        self._closed: asyncio.Event = asyncio.Event()

    def now(self) -> int:
        """On the engine's clock."""
        return time.perf_counter_ns() - self._start_ns

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=self._connection)

    async def stop(self) -> None:
        self._stopping = True
        self._send(Farewell())
        await self._closed.wait()
        for generation in list(self._live.values()):
            self._end(generation, "abort", "the server was stopped")

    # ---- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's classes are its own

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            if isinstance(message, StepNews):
                self._deliver(message)
            elif isinstance(message, Failure):
                self._give_up(message.reason)
            elif isinstance(message, Draining):
                self._drain()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set()
        if not (self._stopping or self._failure):
            complain("the engine's process has ended")
            self._give_up("it has ended")
        self._drain()

    def _drain(self) -> None:
        drain, self.drain = self.drain, None
        if drain is not None:
            drain()

    def _send(self, message: Any) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(packed(message))

    # ---- requests

    def submit(self, generation: Generation) -> None:
        error = self._refusal(generation)
        if error is not None:
            generation.refuse(error)
            return
        generation.arrival_ns = max(generation.arrival_ns, self._latest_arrival_ns + 1)  # no two at once
        self._latest_arrival_ns = generation.arrival_ns
        self._live[generation.number] = generation
        self._submitted += 1
        if generation.sampling.stop:
            self._texts[generation.number] = GrowingText(self._tokenizer, generation.sampling)
        prompt = np.asarray(generation.prompt, np.int32)
        submission = Submission(
            generation.number,
            prompt,
            generation.sampling,
            generation.arrival_ns,
            generation.priority,
            generation.salt,
            generation.choice,
        )
        self._send(submission)

    def cancel(self, generation: Generation) -> None:
        if generation.number in self._live and not generation.done:
            self._end(generation, "abort", "")
            self._send(Cancellation(generation.number))

    def _refusal(self, generation: Generation) -> ApiError | None:
        if not self.alive:
            return backend_failed("engine", self._failure or "it has ended")
        sampling = generation.sampling
        if 0 < sampling.min_tokens < (sampling.max_tokens or self.max_model_len) and not sampling.ignore_eos:
            return ApiError(
                "the engine can't go on after an end token: leave min_tokens out, set it to max_tokens, "
                "or set ignore_eos",
                param="min_tokens",
            )
        refused = self.limits.refusal(len(generation.prompt), self._output_tokens(generation))
        return ApiError(refused) if refused else None

    def _output_tokens(self, generation: Generation) -> int:
        return generation.sampling.max_tokens or max(1, self.max_model_len - len(generation.prompt))

    def _give_up(self, reason: str) -> None:
        self._failure = reason
        for generation in list(self._live.values()):
            generation.error = backend_failed("engine", reason)
            self._end(generation, "error", reason)

    # ---- tokens and ends

    def _deliver(self, news: StepNews) -> None:
        """Gives the tokens and ends of the last steps to the clients."""
        live = self._live
        self._load = news.load
        self._received = news.received
        self._preemptions = news.preemptions
        self._speculation = news.speculation
        self._host_tier = news.host_tier
        self.unrecorded = news.unrecorded
        end_ns = news.end_ns
        for start in news.admitted:
            generation = live.get(start.number)
            if generation is not None:
                generation.admitted_ns = start.admitted_ns
                generation.cached_tokens = start.cached_tokens
                generation.external_tokens = start.external_tokens
        gaps: dict[int, int] = {}
        first: list[Generation] = []
        generated = 0
        for number, token in zip(news.numbers, news.tokens, strict=True):
            generation = live.get(number)
            if generation is None:
                continue
            if generation.first_ns == NEVER:
                generation.first_ns = end_ns
                first.append(generation)
            else:
                gap = end_ns - generation.last_ns
                if gap:  # several tokens of one step are one output
                    gaps[gap] = gaps.get(gap, 0) + 1
            generated += 1
            generation.tokens.append(token)
            generation.count += 1
            generation.last_ns = end_ns
            if not generation.bell.rung:
                generation.bell.ring()
            if generation.sampling.stop:
                self._stop_at_text(generation)
        for end in news.ended:
            generation = live.get(end.number)
            if generation is not None:
                self._end_as(generation, end)
        if self.observer is not None and news.computed:
            self.observer.step(news.computed, generated, gaps, first, self.now() - end_ns)

    def _stop_at_text(self, generation: Generation) -> None:
        text = self._texts[generation.number]
        text.add(generation.tokens[-1:])
        if text.stopped is not None:
            generation.stop_reason = text.stopped
            self._end(generation, "stop", "")
            self._send(Cancellation(generation.number))

    def _end_as(self, generation: Generation, end: GenerationEnd) -> None:
        reason = end.finish_reason
        generation.preemptions = end.preemptions
        if reason == "stop":
            last = generation.tokens[-1]
            if last in generation.sampling.stop_token_ids:
                generation.stop_reason = last
            generation.hidden = 0 if generation.sampling.include_stop else 1
        if reason in ("failed", "rejected"):
            status = HTTPStatus.BAD_REQUEST if reason == "rejected" else HTTPStatus.INTERNAL_SERVER_ERROR
            generation.error = ApiError(end.reason, status=status)
        finish_reason = {"cancelled": "abort", "failed": "error", "rejected": "error"}.get(reason, reason)
        self._end(generation, finish_reason, end.reason)

    def _end(self, generation: Generation, finish_reason: str, reason: str) -> None:
        self._live.pop(generation.number, None)
        self._texts.pop(generation.number, None)
        generation.finish_reason = finish_reason
        generation.reason = reason
        generation.finished_ns = self.now()
        generation.bell.ring()
        if self.observer is not None:
            self.observer.ended(generation)

    # ---- figures

    @property
    def alive(self) -> bool:
        has_died = self._closed.is_set() and not self._stopping
        return not (self._failure or has_died)

    def load(self) -> ReplicaLoad:
        """As of the engine's last step."""
        load = self._load
        waiting = load.waiting + self._submitted - self._received
        return ReplicaLoad(load.running, waiting, load.used_blocks, load.num_blocks)

    def adapters(self) -> tuple[list[str], list[str]]:
        """The engine has none."""
        return [], []

    def host_tier(self) -> HostTierUse | None:
        return self._host_tier

    def speculation(self) -> SpeculationUse | None:
        return self._speculation

    def preemptions(self) -> int:
        return self._preemptions
