"""Agent sessions as kv-cache-tester publishes them: JSON lines of one turn each, grouped by session.

`hash_ids` name 64 tokens each, in whole blocks only and local to the session: every session is a text of
its own, and the tokens past the last whole block are private. `t` is when a turn was sent, in seconds
from its session's start, `api_time` how long it took, `think_time` the seconds from the end of its
agent's last answered turn until it was sent (measured so in the data: `t` minus the end agrees with it
to a second, the resolution of both). So a turn comes `think_time` after its agent's last answered turn
has ended, however long that took. A sub-agent (`main/agent_001`) begins a while after its parent's last
turn; agents run beside each other. Source: github.com/callanjfox/kv-cache-tester.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from pagecast.sim.core.identity.content import own_prompt
from pagecast.traces.arrivals import ArrivalProcess
from pagecast.traces.building import BlockSpans, RequestRows
from pagecast.traces.head import json_fields
from pagecast.traces.operations import sort as sort_trace
from pagecast.traces.records import Record, records
from pagecast.traces.schema import Trace
from pagecast.traces.seeds import checked_seed
from pagecast.traces.source import Source

BLOCK_TOKENS = 64
SESSION_RATE = 0.01
recognise = json_fields("session", "agent", "t", "input_length", "output_length", "hash_ids", "think_time")
_COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "session", "after", "gap_s", "model")


@dataclass(slots=True)
class _Session:
    """State of the session being read: its number, and each agent's answered turns."""

    name: str
    number: int
    start_s: float
    last_t: float = 0.0
    answered: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # agent: rows, ends


def read(
    source: Source,
    *,
    limit: int | None = None,
    session_rate: float | None = None,
    seed: int = 0,
    block_tokens: int | None = None,
) -> Trace:
    """Reads the file; sessions start as a Poisson process of `session_rate` per second (0.01 unless given).

    Rows come in the order of arrival that they would have if serving took no time; `limit` counts the
    file's lines.
    """
    sessions = _Sessions(SESSION_RATE if session_rate is None else session_rate, seed)
    rows = RequestRows(source, _COLUMNS)
    spans = BlockSpans(block_tokens or BLOCK_TOKENS)
    cut_off = 0
    for record in records(source, limit):
        row, session = len(rows), sessions.of(record)
        input_tokens = record.whole("input_length")
        rest = own_prompt(row)
        spans.add(record, "hash_ids", input_tokens, last="left out", content=session.number, rest=rest)
        arrival_s, after, gap_s = _when(record, session, row)
        model = record.text("model") if record.values.get("model") is not None else None
        output_tokens = record.whole("output_length", least=0)
        cut_off += output_tokens == 0
        values = (arrival_s, input_tokens, max(output_tokens, 1), session.name, after, gap_s, model)
        rows.add(record.line, *values)
    notes = [
        f"{sessions.count} sessions start at {sessions.law.rate:g} per second (Poisson, seed {seed})",
        "answers are not named in this format: later turns do not reuse the blocks of generated tokens",
    ]
    if session_rate is None:
        notes[0] += ": the format has no absolute times; choose with --session-rate"
    if cut_off:
        notes.append(f"{cut_off} answers of no recorded length (cut off) count as one token")
    trace = sort_trace(rows.finish(spans.finish(), sort=True, time_field="t", notes=notes))
    return replace(trace, block_tokens=spans.block_tokens)


class _Sessions:
    """The sessions of a file, one after the other, with a start drawn for each."""

    def __init__(self, rate: float, seed: int) -> None:
        self.law = ArrivalProcess("poisson", rate)
        self.count = 0
        self._rng = np.random.default_rng(checked_seed(seed))
        self._next_s = 0.0
        self._now: _Session | None = None
        self._seen: set[str] = set()

    def of(self, record: Record) -> _Session:
        """The session of a turn. Raises BadInput where it goes on after another has begun."""
        name = record.text("session")
        if self._now is not None and name == self._now.name:
            return self._now
        if name in self._seen:
            raise record.fail("session", f"{name} goes on after another one; put its turns together")
        self._seen.add(name)
        self._now = _Session(name, self.count, self._next_s)
        self.count += 1
        self._next_s += float(self.law.gaps_s(1, self._rng)[0])
        return self._now


def _when(record: Record, session: _Session, row: int) -> tuple[float, int, float]:
    """Arrival, `after` and `gap_s` of a turn; without an answered turn before it, by the clock."""
    agent, t = record.text("agent"), record.number("t")
    if t < session.last_t:
        raise record.fail(
            "t", f"goes back in time: {t:g} s after {session.last_t:g} s; sort the session's turns"
        )
    session.last_t = t
    think_s = record.number("think_time") if record.values.get("think_time") is not None else None
    own = session.answered.setdefault(agent, [])
    before = own[-1] if own else None
    if before is None and "/" in agent:
        before, think_s = _parent(session, agent, t), None
    if record.values.get("api_time") is not None:
        own.append((row, t + record.number("api_time")))
    if before is None:
        return session.start_s + t, -1, 0.0
    after, end = before
    return math.nan, after, max(0.0, round(t - end, 6)) if think_s is None else think_s


def _parent(session: _Session, agent: str, t: float) -> tuple[int, float] | None:
    """The last turn of the nearest agent above that had been answered by `t`."""
    while "/" in agent:
        agent = agent.rsplit("/", 1)[0]
        for row, end in reversed(session.answered.get(agent, [])):
            if end <= t:
                return row, end
    return None
