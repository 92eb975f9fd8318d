"""Conditions that every trace meets before a replay, checked one column at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.content import own_prompt
from pagecast.sim.core.retention import Retention
from pagecast.traces.arrays import Flags, Ints
from pagecast.traces.schema import NAMES, SECONDS, Spans, Trace
from pagecast.traces.texts import draft_numbers, multimodal_items

MAX_TOKENS = 1 << 40
MAX_SAMPLES = 16_384  # of one request: each is a request of its own
MAX_SECONDS = 1e11
MAX_NAME = 1024  # characters
_FIRST_PRIVATE = own_prompt(0)


class Problem(NamedTuple):
    """The first thing wrong with a trace: in which row, in which field, and what."""

    row: int
    field: str
    text: str


def validate(trace: Trace) -> None:
    """Raises BadInput, naming row and field, where a trace breaks the schema's rules."""
    if not len(trace):
        raise BadInput(f"trace {trace.name}: no requests; a trace needs at least one")
    if problem := find_problem(trace) or find_disorder(trace):
        raise BadInput(f"trace {trace.name}, row {problem.row}, field {problem.field}: {problem.text}")


def find_disorder(trace: Trace) -> Problem | None:
    """The first row whose arrival lies before that of the row above."""
    arrival = trace.seconds("arrival_s")
    timed = np.flatnonzero(~np.isnan(arrival))
    back = np.flatnonzero(np.diff(arrival[timed]) < 0)
    if not len(back):
        return None
    a, b = timed[back[0]], timed[back[0] + 1]
    text = (
        f"goes back in time: {arrival[b]:.9g} s comes after {arrival[a]:.9g} s; "
        "add --sort (in Python: sort=True), or put the file in order"
    )
    return Problem(int(b), "arrival_s", text)


def find_problem(trace: Trace) -> Problem | None:
    """The first breach of the schema's rules, order of arrivals aside."""
    return (
        _range(trace, "input_tokens", 1, MAX_TOKENS)
        or _range(trace, "output_tokens", 1, MAX_TOKENS)
        or _range(trace, "output_content", -1)
        or _range(trace, "output_offset", 0)
        or _max_tokens(trace)
        or _range(trace, "warmup", 0)
        or _range(trace, "n", 1, MAX_SAMPLES)
        or _range(trace, "public_tokens", 0)
        or _public_tokens(trace)
        or _range(trace, "retry", 0, 1)
        or _links(trace)
        or _seconds(trace)
        or (None if trace.spans is None else _spans(trace, trace.spans))
        or _token_ids(trace)
        or _names(trace)
        or _texts(trace)
        or _accepted_drafts(trace)
    )


def _first(bad: Flags, field: str, text: str) -> Problem | None:
    rows = np.flatnonzero(bad)
    return Problem(int(rows[0]), field, text) if len(rows) else None


def _range(trace: Trace, field: str, least: int, most: int = 1 << 62) -> Problem | None:
    values = trace.integers(field)
    bad = np.flatnonzero((values < least) | (values > most))
    if not len(bad):
        return None
    value = values[bad[0]]
    wrong = f"less than {least}" if value < least else f"more than {most:,}"
    return Problem(int(bad[0]), field, f"{value} is {wrong}; correct or remove the row")


def _max_tokens(trace: Trace) -> Problem | None:
    if "max_tokens" not in trace.requests:
        return None
    most, output = trace.integers("max_tokens"), trace.integers("output_tokens")
    less = (most != 0) & (most < output)
    row = int(np.argmax(less))
    text = f"{most[row]} are less than the {output[row]} output_tokens; give at least as many, or 0"
    return _range(trace, "max_tokens", 0, MAX_TOKENS) or _first(less, "max_tokens", text)


def _public_tokens(trace: Trace) -> Problem | None:
    public, prompt = trace.integers("public_tokens"), trace.integers("input_tokens")
    beyond = public > prompt
    row = int(np.argmax(beyond))
    return _first(
        beyond, "public_tokens", f"{public[row]} are more than the prompt's {prompt[row]}; correct the row"
    )


def _links(trace: Trace) -> Problem | None:
    after, arrival = trace.integers("after"), trace.seconds("arrival_s")
    follows = after >= 0
    own = np.arange(len(trace))
    return (
        _first((after < -1) | (after >= own), "after", "must be -1 or the number of an earlier row (from 0)")
        or _first((trace.integers("retry") > 0) & ~follows, "retry", "needs `after`: the request it repeats")
        or _first(np.isnan(arrival) & ~follows, "arrival_s", "missing; every row needs it, or `after`")
        or _first(~np.isnan(arrival) & follows, "arrival_s", "stands beside `after`: drop one")
    )


def _seconds(trace: Trace) -> Problem | None:
    for field in SECONDS:
        values = trace.seconds(field)
        empty = np.isnan(values)
        if field == "gap_s" and empty.any():
            return _first(empty, field, "missing; give the think time in seconds")
        bad = ~empty & ~((values >= 0) & (values <= MAX_SECONDS))
        if problem := _first(bad, field, f"must be seconds from 0 to {MAX_SECONDS:g}"):
            return problem
    return None


def _spans(trace: Trace, spans: Spans) -> Problem | None:
    rows = len(trace)
    if len(spans.start) != rows + 1 or spans.start[0] != 0 or spans.start[-1] != len(spans.content):
        return Problem(0, "spans", f"the boundaries of {rows} rows don't fit the spans")
    owner = np.repeat(np.arange(rows), np.diff(spans.start))
    private = (spans.content - _FIRST_PRIVATE) >> 1
    for bad, text in (
        ((spans.length < 1) | (spans.length > MAX_TOKENS), "a span needs at least one token"),
        ((spans.offset < 0) | (spans.offset >= 1 << 62), "a span's offset must be 0 or more"),
        ((spans.content < 0) & ((private < 0) | (private >= rows)), "a text's name must be 0 or more"),
    ):
        if len(at := np.flatnonzero(bad)):
            return Problem(int(owner[at[0]]), "spans", text)
    total = np.bincount(owner, weights=spans.length, minlength=rows).astype(np.int64)
    tokens = trace.integers("input_tokens")
    bad = (total != tokens) & (np.diff(spans.start) > 0)
    row = int(np.argmax(bad))
    return _first(bad, "spans", f"{total[row]} tokens, but input_tokens says {tokens[row]}")


def _token_ids(trace: Trace) -> Problem | None:
    if trace.token_ids is None:
        return None
    lengths: Ints = np.array([len(ids) for ids in trace.token_ids], dtype=np.int64)
    if len(lengths) != len(trace):
        return Problem(0, "token_ids", f"{len(lengths)} prompts for {len(trace)} rows")
    tokens = trace.integers("input_tokens")
    row = int(np.argmax(lengths != tokens))
    text = f"{lengths[row]} tokens, but input_tokens says {tokens[row]}"
    if not lengths[row]:
        text = "missing; give the token ids of every prompt or of none"
    return _first(lengths != tokens, "token_ids", text)


def _names(trace: Trace) -> Problem | None:
    """The first name that no name is as long as: each request's keys are made with it."""
    for field in NAMES:
        if field in trace.requests:
            length = trace.requests[field].str.len().fillna(0).to_numpy(np.int64)
            if problem := _first(
                length > MAX_NAME, field, f"a name of more than {MAX_NAME:,} characters; shorten it"
            ):
                return problem
    return None


_FORMS: dict[str, Callable[[str], object]] = {
    "retention": Retention.parse,
    "drafts": draft_numbers,
    "accepted_drafts": draft_numbers,
}


def _texts(trace: Trace) -> Problem | None:
    """The first text that has not the form of its column."""
    for field, parse in _FORMS.items():
        if field in trace.requests:
            texts = trace.requests[field]
            for text in texts.dropna().unique().tolist():
                if problem := _refusal(parse, text):
                    return Problem(int((texts == text).fillna(False).to_numpy(bool).argmax()), field, problem)
    if "multimodal" in trace.requests:
        texts, tokens = trace.requests["multimodal"], trace.integers("input_tokens")
        for row in np.flatnonzero(texts.notna()).tolist():
            if problem := _refusal(multimodal_items, texts.iloc[row], int(tokens[row])):
                return Problem(row, "multimodal", problem)
    return None


def _accepted_drafts(trace: Trace) -> Problem | None:
    """The first row that accepts more draft tokens than it makes; the texts have their columns' forms."""
    if not {"drafts", "accepted_drafts"} <= set(trace.requests):
        return None
    made, accepted = trace.requests["drafts"], trace.requests["accepted_drafts"]
    for row in np.flatnonzero(made.notna() & accepted.notna()).tolist():
        most, count = sum(draft_numbers(made.iloc[row])), sum(draft_numbers(accepted.iloc[row]))
        if count > most:
            return Problem(row, "accepted_drafts", f"{count} accepted of {most} in drafts; correct the line")
    return None


def _refusal(parse: Callable[..., object], *values: Any) -> str:
    """Why `parse` refuses these values; empty where it takes them."""
    try:
        parse(*values)
    except BadInput as error:
        return str(error)
    except (OverflowError, ValueError):
        return "holds a number beyond 64 bits; correct or remove it"
    return ""
