"""Server of a trace in wall time, which records what happens step by step.

Prompts are made from the trace's content ids, so equal content is equal tokens here as in the simulator.
Outputs are sampled, save where the trace says what they are because a later prompt quotes them: these
are written as named.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pagecast.engine.described import described
from pagecast.engine.engine import Engine
from pagecast.engine.observed import observed
from pagecast.engine.params import SamplingParams
from pagecast.engine.recording import NS, Recording, recorded_run
from pagecast.engine.sequence import Sequence
from pagecast.sim.core.events import Event
from pagecast.sim.core.identity.content import own_output, own_prompt, token_ids, tokens
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.request import State
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replay.held_clients import clients_of
from pagecast.sim.replica.arrivals import NEVER_NS
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.run_journal import RunJournal
from pagecast.traces.schema import Spans, Trace

_POSITIVE = (1 << 62) - 1
_NAP_S = 0.02  # the longest sleep, so that an interrupt is heard soon


class TraceServer:
    """One pass of a trace through an engine that was made with `log_events=True`.

    `ended` is called once for each request, soon after it has ended. `journal` is written as the run happens.
    """

    def __init__(
        self,
        engine: Engine,
        trace: Trace,
        *,
        temperature: float = 0.0,
        ended: Callable[[], None] | None = None,
        journal: RunJournal | None = None,
    ) -> None:
        self.engine = engine
        speculates = engine.loop.drafter is not None
        self._recording = Recording(engine.limits.num_blocks, journal, speculates=speculates)
        self._tell_end = ended
        self._untold = 0  # requests that have ended since `ended` was called
        self.ids = trace.token_ids
        self.trace = with_spans(trace, engine.limits.block_size)
        self._params = SamplingParams(temperature=temperature, ignore_eos=True)
        self._feed = Feed(self.trace, engine.limits.block_size)
        self._arrivals = clients_of(self.trace)
        self._quoted = _quoted(self.trace)
        self._content = self.trace.integers("output_content")
        self._offset = self.trace.integers("output_offset")
        self._names = {name: _texts(self.trace, name) for name in ("adapter", "salt")}
        self._sequences: dict[int, Sequence] = {}
        self._submitted_ns: dict[int, int] = {}

    def run(self) -> RecordedRun:
        """Serves the whole trace; takes as long as it does. Raises what the engine raises, and leaves no
        request of the trace behind then."""
        engine, loop, arrivals = self.engine, self.engine.loop, self._arrivals
        loop.restart()
        engine.settle()
        with observed(engine, self._recording, self._ended):
            while True:
                self._take_in()
                worked = loop.step()
                self._tell_ends()
                if worked:
                    continue
                if arrivals.next_ns == NEVER_NS:
                    break
                time.sleep(min(max(arrivals.next_ns - loop.clock.now(), 0) / NS, _NAP_S))
        return self._recorded(self._recording, loop.scheduler.events or [])

    def _recorded(self, recording: Recording, events: list[Event]) -> RecordedRun:
        return recorded_run(self.trace, recording, self._sequences, self._submitted_ns, events, self._meta())

    def _take_in(self) -> None:
        loop, arrivals = self.engine.loop, self._arrivals
        while (due := arrivals.take(loop.clock.now())) is not None:
            row, arrival_ns = due
            if arrival_ns is None:
                loop.cancel(str(row))
                continue
            sequence = self._sequence(row, arrival_ns)
            self._sequences[row] = sequence
            self._submitted_ns[row] = at_ns = loop.clock.now()
            names = {name: texts[row] for name, texts in self._names.items()}
            self._recording.submitted(sequence, at_ns, **names)
            loop.submit(sequence)

    def _sequence(self, row: int, arrival_ns: int) -> Sequence:
        request = self._feed.request(row, arrival_ns)
        return Sequence(request, self.prompt(row), self._params, seed=row, forced=self.forced(row))

    def prompt(self, row: int) -> NDArray[np.int32]:
        """Token ids of a row's prompt."""
        vocab = self.engine.loaded.spec.facts.vocab
        if self.ids is not None:
            return (self.ids[row] % vocab).astype(np.int32)
        spans = self.trace.spans.row(row) if self.trace.spans is not None else []
        spans = spans or [(own_prompt(row), 0, self._feed.input_tokens[row])]
        return (token_ids(spans) % np.uint64(vocab)).astype(np.int32)

    def forced(self, row: int) -> NDArray[np.int32] | None:
        """The tokens to generate where the trace names them."""
        content = int(self._content[row])
        if content < 0 and row not in self._quoted:
            return None
        named = (content, int(self._offset[row])) if content >= 0 else (own_output(row), 0)
        vocab = np.uint64(self.engine.loaded.spec.facts.vocab)
        return (tokens(*named, self._feed.output_tokens[row]) % vocab).astype(np.int32)

    def _ended(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.state is not State.FINISHED:
            self._arrivals.failed(request)
        self._arrivals.ended(request.index, self.engine.loop.clock.now())
        self._recording.ended(sequence)
        self._untold += 1

    def _tell_ends(self) -> None:
        """Calls `ended` between steps: what it raises then leaves the loop's own work whole."""
        if self._tell_end is None:
            return
        while self._untold:
            self._untold -= 1
            self._tell_end()

    def _meta(self) -> dict[str, Any]:
        """The contents of `meta.json`."""
        return {"name": self.trace.name, **run_meta(self.engine, self._params.temperature)}


def run_meta(engine: Engine, temperature: float) -> dict[str, Any]:
    """What `meta.json` holds of any trace that the engine serves at this temperature."""
    meta = described(engine)
    meta["config"]["temperature"] = temperature
    return meta


def with_spans(trace: Trace, block_size: int) -> Trace:
    """The trace with prompts of token ids named by content: equal names where whole blocks are equal.

    Recorded runs know prompts by content, not by ids.
    """
    if trace.token_ids is None:
        return trace
    rows: list[tuple[int, int, int]] = []
    starts = [0]
    for ids in trace.token_ids:
        digests = BlockKeys.of_ids(block_size, ids).digests
        for digest in digests:
            rows.append((_name(digest), 0, block_size))
        rest = np.asarray(ids[len(digests) * block_size :], np.int64)
        if len(rest):
            before = digests[-1] if digests else b""
            rows.append((_name(before + rest.tobytes()), 0, len(rest)))
        starts.append(len(rows))
    flat = np.array(rows, np.int64).reshape(-1, 3)
    spans = Spans(np.array(starts, np.int64), flat[:, 0].copy(), flat[:, 1].copy(), flat[:, 2].copy())
    return replace(trace, spans=spans, token_ids=None)


def _texts(trace: Trace, column: str) -> list[str]:
    if column not in trace.requests:
        return [""] * len(trace)
    return [str(text) for text in trace.requests[column].fillna("")]


def _name(text: bytes) -> int:
    return xxhash.xxh3_64_intdigest(text) & _POSITIVE


def _quoted(trace: Trace) -> set[int]:
    """Rows whose output, unnamed as it is, is part of some prompt."""
    if trace.spans is None:
        return set()
    used = set(trace.spans.content[trace.spans.content < 0].tolist())
    return {row for row in range(len(trace)) if own_output(row) in used} if used else set()
