"""The engine's side of a server: its step loop, which takes requests from a mailbox between steps.

The tokens and ends of a step go out as one message, and the server in front passes them to its clients. So
the engine shares its process, and Python's lock, with nothing that serves HTTP.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

from pagecast.engine.engine import Engine
from pagecast.engine.host_tier import HostTransfer
from pagecast.engine.params import SamplingParams
from pagecast.engine.sampling import SEEDS
from pagecast.engine.sequence import Sequence
from pagecast.planner_app.server.backend import ReplicaLoad, SpeculationUse, TransferCount
from pagecast.planner_app.server.engine_mail import (
    Cancellation,
    Draining,
    Failure,
    Farewell,
    GenerationEnd,
    GenerationStart,
    Mailbox,
    StepNews,
    Submission,
)
from pagecast.planner_app.server.generation import Bell, Generation
from pagecast.planner_app.server.history import History
from pagecast.planner_app.stderr import complain
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.identity.scope import DEFAULT_SCOPE, Scope
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request

_NAP_S = 0.1  # the longest wait for something to do
_FLUSH_NS = 200_000_000


class EngineWork:
    """Runs an engine on the requests that come by mail, until a `Farewell` or the end of the connection.

    `drain` may be called from a signal handler. `failed` is the error that ended the engine, if one did.
    """

    def __init__(self, engine: Engine, connection: socket.socket) -> None:
        self.engine = engine
        self.history = History()
        self.failed: BaseException | None = None
        self._mailbox = Mailbox(connection)
        self._ending = False
        self._draining = False
        self._without_token: set[int] = set()  # generations that have none so far
        self._live: dict[int, Generation] = {}  # only where the history is kept
        config = engine.options.speculation
        self._speculation = None if config is None else SpeculationUse.of(config.num_speculative_tokens)
        self._transfers = TransferCount()
        self._received = 0
        self._reported: tuple[int, ReplicaLoad] | None = None  # with the latest news
        self._begin_news()
        engine.loop.restart()
        engine.loop.log = self
        engine.on_end = self._note_end

    def _begin_news(self) -> None:
        self._computed = 0
        self._end_ns = 0
        self._numbers: list[int] = []
        self._tokens: list[int] = []
        self._admitted: list[GenerationStart] = []
        self._endings: list[GenerationEnd] = []

    def drain(self) -> None:
        """Has the server in front finish the requests under way, and then end."""
        self._draining = True

    # ---- the loop

    def run(self) -> None:
        """Serves to the end. It raises nothing: see `failed`."""
        try:
            self._serve()
            self.engine.loop.drain()
        except BaseException as error:
            self.failed = error
            complain(f"the engine has failed: {error}")
            self._mailbox.send(Failure(str(error)))
            self._wait_for_farewell()
        finally:
            self._report()
            self.history.close()
            self._mailbox.close()

    def _serve(self) -> None:
        loop = self.engine.loop
        flushed_ns = 0
        wait_s = 0.0
        while True:
            messages = self._mailbox.receive(wait_s)
            for message in messages:
                self._take(message)
            self._pass_on_draining()
            if self._ending or self._mailbox.closed:
                return
            busy = loop.step()
            self._report()
            now = loop.clock.now()
            if now - flushed_ns > _FLUSH_NS:
                flushed_ns = now
                self.history.flush()
            wait_s = 0.0 if busy else _NAP_S

    def _wait_for_farewell(self) -> None:
        while not (self._ending or self._mailbox.closed):
            for message in self._mailbox.receive(_NAP_S):
                self._ending = self._ending or isinstance(message, Farewell)
            self._pass_on_draining()

    def _pass_on_draining(self) -> None:
        if self._draining:
            self._draining = False
            self._mailbox.send(Draining())

    def _take(self, message: Any) -> None:
        if isinstance(message, Submission):
            self._submit(message)
        elif isinstance(message, Cancellation):
            self.engine.loop.cancel(str(message.number))
        else:
            self._ending = True

    def _submit(self, submission: Submission) -> None:
        """Hands a generation to the engine."""
        engine, sampling, prompt = self.engine, submission.sampling, submission.prompt
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
        scope = Scope(salt=submission.salt) if submission.salt else DEFAULT_SCOPE
        keys = BlockKeys.of_ids(engine.limits.block_size, prompt.astype("int64"), scope)
        request = Request(
            str(submission.number),
            keys,
            len(prompt),
            sampling.max_tokens or max(1, engine.loaded.max_model_len - len(prompt)),
            arrival_ns=submission.arrival_ns,
            priority=submission.priority,
            index=submission.number,
        )
        seed = submission.number if sampling.seed is None else sampling.seed + submission.choice
        sequence = Sequence(
            request, prompt, params, seed=seed % SEEDS, stops=stops, listener=self._note_token
        )
        if self.history.kept:
            token_list = prompt.tolist()
            generation = Generation(submission.number, token_list, sampling, Bell(), salt=submission.salt)
            self._live[submission.number] = generation
            self.history.note_coming(request, generation)
        self.history.note_outside(engine.loop.clock.now(), submission.number, cancelled=False)
        self._without_token.add(submission.number)
        self._received += 1
        engine.loop.submit(sequence)

    # ---- tokens and ends

    def _note_token(self, sequence: Sequence, token: int) -> None:
        request = sequence.request
        number = request.index
        if number in self._without_token:
            self._without_token.remove(number)
            start = GenerationStart(
                number, request.admitted_ns, request.cached_tokens, request.external_tokens
            )
            self._admitted.append(start)
        self._numbers.append(number)
        self._tokens.append(token)
        if self._live:
            self._live[number].tokens.append(token)

    def _note_end(self, sequence: Sequence) -> None:
        request = sequence.request
        self.history.note_ended(request, request.finished_ns)
        self._endings.append(
            GenerationEnd(request.index, sequence.finish_reason, sequence.reason, request.preemptions)
        )

    def _report(self) -> None:
        """Sends the news since the last report, if there are any."""
        load = self._load()
        if not (self._computed or self._endings) and (self._received, load) == self._reported:
            return
        self._reported = (self._received, load)
        for ending in self._endings:
            self._without_token.discard(ending.number)
            self._live.pop(ending.number, None)
        offloading = self.engine.loop.scheduler.offloading
        news = StepNews(
            self._received,
            self._computed,
            self._end_ns,
            self._numbers,
            self._tokens,
            self._admitted,
            self._endings,
            load,
            self.engine.loop.scheduler.preemptions,
            self._speculation,
            None if offloading is None else self._transfers.use(offloading),
            self.history.failed,
        )
        self._mailbox.send(news)
        self._begin_news()

    def _load(self) -> ReplicaLoad:
        scheduler = self.engine.loop.scheduler
        return ReplicaLoad(
            len(scheduler.running.requests),
            len(scheduler.queue),
            scheduler.memory.used_blocks,
            self.engine.limits.num_blocks,
        )

    # ---- `engine.loop.Log`

    def idle(self, start_ns: int) -> None:
        self.history.note_idle(start_ns)

    def step(self, plan: StepPlan, start_ns: int, planned_ns: int) -> None:
        self.history.note_planned(start_ns)

    def committed(self, plan: StepPlan, outcome: Outcome, end_ns: int) -> None:
        if self._speculation is not None:
            self._speculation.count(plan, outcome)
            self.history.note_verified(plan, outcome)
        self.history.note_committed(plan, end_ns)
        self._end_ns = end_ns
        self._computed += plan.decode_n + sum(computed for computed, _ in plan.prefill)

    def transferred(self, transfers: Iterable[HostTransfer], now_ns: int) -> None:
        recorded = [one.recorded(now_ns) for one in transfers]
        self._transfers.count(recorded)
        self.history.note_transferred(recorded, now_ns)
