"""Generators of traces: single requests, conversations over shared system prompts, retrieval.

The same arguments and seed give the same trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from pagecast.sim.core.errors import BadInput
from pagecast.traces.arrays import Flags, Floats, Ints
from pagecast.traces.arrivals import MAX_ARRIVALS, ArrivalProcess, Starts
from pagecast.traces.lengths import Law, tokens
from pagecast.traces.operations import select, sort
from pagecast.traces.schema import Spans, Trace, starts, table
from pagecast.traces.seeds import checked_seed


def requests(
    arrivals: ArrivalProcess,
    input_tokens: Law | None = None,
    output_tokens: Law | None = None,
    *,
    like: Trace | None = None,
    count: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    name: str = "generated",
) -> Trace:
    """Independent requests with prompts of their own: `count` of them, or those of `duration_s` seconds.

    Lengths follow the laws given, or both together those of requests drawn from the trace `like`. Raises
    BadInput where nothing arrives, or neither laws nor a trace are given.
    """
    rng = np.random.default_rng(checked_seed(seed))
    times = arrivals.times_s(rng, count=count, duration_s=duration_s)
    _need(times, arrivals, duration_s)
    if like is not None:
        rows = rng.integers(0, len(like), len(times))
        inputs, outputs = like.integers("input_tokens")[rows], like.integers("output_tokens")[rows]
    elif input_tokens is None or output_tokens is None:
        raise BadInput("lengths of what? give laws for input and output tokens, or a trace to draw them from")
    else:
        inputs, outputs = tokens(input_tokens, len(times), rng), tokens(output_tokens, len(times), rng)
    columns = {"arrival_s": times, "input_tokens": inputs, "output_tokens": outputs}
    return Trace(name, table(columns))


@dataclass(frozen=True)
class Conversations:
    """Sessions of several turns over shared system prompts.

    A session starts at `starts`; each begins with one of `system_prompts` (lengths in tokens; the k-th
    is picked in proportion to `1 / k ** skew`) and `opening` tokens of its own. The prompt of a later
    turn is all that was said, the generated answers included, and a `message`; it comes `think_s` seconds
    after the last answer has ended. A session ends before the turn that would pass `most_tokens`.
    """

    starts: Starts
    turns: Law
    message: Law
    output: Law
    think_s: Law
    system_prompts: tuple[int, ...] = ()
    opening: Law | None = None
    skew: float = 1.0
    most_tokens: int = 1 << 20


def conversations(
    shape: Conversations,
    *,
    sessions: int | None = None,
    duration_s: float | None = None,
    count: int | None = None,
    seed: int = 0,
    name: str = "conversations",
) -> Trace:
    """Plays `sessions` conversations, or those that start within `duration_s` seconds; `count` turns at most.

    Text k below the number of system prompts is the k-th of them; each session's words and answers are
    one more text, in the order they are said, so that answers are quoted by later turns. Raises BadInput
    for a system prompt of a negative length, and where nothing arrives or no turn fits.
    """
    rng = np.random.default_rng(checked_seed(seed))
    begin = shape.starts.times_s(rng, count=sessions, duration_s=duration_s)
    _need(begin, shape.starts, duration_s)
    system, system_tokens = _pick_systems(shape, len(begin), rng)
    turns = tokens(shape.turns, len(begin), rng)
    if turns.sum() > MAX_ARRIVALS:
        raise BadInput(f"{turns.sum():.3g} turns are more than the {MAX_ARRIVALS:,} that are made at once")
    session = np.repeat(np.arange(len(begin)), turns)
    first = starts(turns)[:-1]
    own, output = _say(shape, first, turns, rng)
    think = np.round(shape.think_s.sample(len(session), rng), 3)
    keep = _before_overflow(system_tokens[session] + own + output > shape.most_tokens, first, turns)
    if not keep.any():
        raise BadInput(f"most_tokens {shape.most_tokens}: no turn fits; raise it or shorten the prompts")
    opens = np.isin(np.arange(len(session)), first)[keep]
    session, own, output = session[keep], own[keep], output[keep]
    content = len(shape.system_prompts) + session
    columns = {
        "arrival_s": np.where(opens, np.round(begin, 6)[session], np.nan),
        "input_tokens": system_tokens[session] + own,
        "output_tokens": output,
        "session": pd.Series([f"s{k}" for k in session.tolist()], dtype="string"),
        "after": np.where(opens, -1, np.arange(len(session)) - 1),
        "gap_s": np.where(opens, 0.0, think[keep]),
        "output_content": content,
        "output_offset": own,
    }
    spans = two_spans(system[session], system_tokens[session], content, own)
    trace = sort(Trace(name, table(columns), spans))
    return trace if count is None else select(trace, np.arange(min(count, len(trace))))


def _need(times: Floats, arrivals: Starts, duration_s: float | None) -> None:
    if not len(times):
        raise BadInput(f"nothing arrives in {duration_s} s at {arrivals.rate:g} per second; make it longer")


def _say(shape: Conversations, first: Ints, turns: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """For each turn: tokens of the session's own text before its answer, and tokens of the answer."""
    lengths = tokens(shape.message, int(turns.sum()), rng)
    if shape.opening is not None:
        lengths[first] = tokens(shape.opening, len(first), rng)
    output = tokens(shape.output, len(lengths), rng)
    own = np.cumsum(lengths + output) - output
    return own - np.repeat((own - lengths)[first], turns), output


def _pick_systems(shape: Conversations, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """For each session the number of its system prompt and its length (0, 0 where there are none)."""
    if min(shape.system_prompts, default=0) < 0:
        raise BadInput(f"system_prompt is {min(shape.system_prompts)}; it must be at least 0 tokens")
    if not shape.system_prompts:
        return np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    weights = 1 / np.arange(1, len(shape.system_prompts) + 1) ** shape.skew
    picked = rng.choice(len(weights), count, p=weights / weights.sum())
    return picked, np.asarray(shape.system_prompts, dtype=np.int64)[picked]


def _before_overflow(over: Flags, first: Ints, turns: Ints) -> Flags:
    """Which turns come before the first one of their session that is `over`."""
    upto = np.cumsum(over)
    return np.asarray(upto - np.repeat((upto - over)[first], turns) == 0)


def two_spans(system: Ints, system_tokens: Ints, content: Ints, own: Ints) -> Spans:
    """Prompts of a system prompt (left out where it is empty) and the beginning of a text."""
    both = np.stack([system, content], axis=1).ravel()
    length = np.stack([system_tokens, own], axis=1).ravel()
    keep = length > 0
    start = starts(keep.reshape(-1, 2).sum(axis=1))
    return Spans(start, both[keep], np.zeros(int(start[-1]), dtype=np.int64), length[keep])


@dataclass(frozen=True)
class Retrieval:
    """Questions about documents that a search found: one system prompt, passages, a question.

    Each prompt has `passages` documents out of `documents` (lengths from `document`), the k-th most
    popular picked in proportion to `1 / k ** skew`, in the order found: prompts share their beginning as
    far as the same documents come first.
    """

    arrivals: ArrivalProcess
    documents: int
    document: Law
    passages: Law
    question: Law
    output: Law
    system_tokens: int = 400
    skew: float = 1.0


def retrieval(
    shape: Retrieval,
    *,
    count: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    name: str = "retrieval",
) -> Trace:
    """Retrieval requests: text 0 is the system prompt, text k the k-th document, questions are unique."""
    rng = np.random.default_rng(checked_seed(seed))
    times = np.round(shape.arrivals.times_s(rng, count=count, duration_s=duration_s), 6)
    _need(times, shape.arrivals, duration_s)
    sizes = tokens(shape.document, shape.documents, rng)
    weights = 1 / np.arange(1, shape.documents + 1) ** shape.skew
    weights /= weights.sum()
    passages = np.minimum(tokens(shape.passages, len(times), rng), shape.documents)
    picks = [rng.choice(shape.documents, k, replace=False, p=weights) for k in passages.tolist()]
    question = tokens(shape.question, len(times), rng)
    outputs = tokens(shape.output, len(times), rng)
    content, length = [], []
    for row, picked in enumerate(picks):
        content += [0, *(picked + 1).tolist(), shape.documents + 1 + row]
        length += [shape.system_tokens, *sizes[picked].tolist(), int(question[row])]
    start = starts(passages + 2)
    lengths = np.asarray(length, dtype=np.int64)
    columns = {
        "arrival_s": times,
        "input_tokens": np.add.reduceat(lengths, start[:-1]),
        "output_tokens": outputs,
    }
    offset = np.zeros(len(lengths), dtype=np.int64)
    return Trace(name, table(columns), Spans(start, np.asarray(content, dtype=np.int64), offset, lengths))
