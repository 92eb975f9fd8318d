"""Operations on traces: cut, order, scale and mix. Links between turns and quoted texts stay valid.

Every operation returns a new trace. Rows may move or go: `after` follows them, and private texts (a
unique prompt, a request's own output) are named anew, because their names hold row numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.content import own_output, own_prompt
from pagecast.traces.arrays import Ints
from pagecast.traces.chains import Chains
from pagecast.traces.schema import COLUMNS, TEXTS, Recipe, Spans, Trace, nominal_arrival_s, starts, table

_FIRST_PRIVATE = own_prompt(0)
assert (own_output(0), own_prompt(1)) == (_FIRST_PRIVATE + 1, _FIRST_PRIVATE + 2)


def select(trace: Trace, rows: Ints) -> Trace:
    """The given rows, in the given order. A turn whose predecessor is left out gets an arrival time.

    That time is when it would arrive if serving took no time (`nominal_arrival_s`).
    """
    rows = np.asarray(rows, dtype=np.int64)
    new_rows = np.full(len(trace) + 1, -1, dtype=np.int64)  # the last entry is for `after` == -1
    new_rows[rows] = np.arange(len(rows))
    requests = trace.requests.iloc[rows].reset_index(drop=True)
    columns: dict[str, Any] = {str(name): requests[name] for name in requests}
    if "after" in columns:
        after = new_rows[trace.integers("after")[rows]]
        orphan = np.isnan(trace.seconds("arrival_s")[rows]) & (after < 0)
        columns["after"] = after
        columns["arrival_s"] = np.where(orphan, nominal_arrival_s(trace)[rows], columns["arrival_s"])
        columns["gap_s"] = np.where(orphan, 0.0, trace.seconds("gap_s")[rows])
    spans = None if trace.spans is None else _move_spans(trace, trace.spans, rows, new_rows)
    ids = None if trace.token_ids is None else [trace.token_ids[row] for row in rows.tolist()]
    measured = None if trace.measured is None else trace.measured.iloc[rows].reset_index(drop=True)
    return replace(trace, requests=table(columns), spans=spans, token_ids=ids, recipe=None, measured=measured)


def _move_spans(trace: Trace, spans: Spans, rows: Ints, new_rows: Ints) -> Spans:
    counts = np.diff(spans.start)[rows]
    start = starts(counts)
    pick = np.arange(start[-1]) + np.repeat(spans.start[rows] - start[:-1], counts)
    content = spans.content[pick]
    private = np.flatnonzero(content < 0)
    if len(private):
        code = content[private] - _FIRST_PRIVATE
        new = new_rows[code >> 1]
        public = max(int(spans.content.max()), int(trace.integers("output_content").max()), -1) + 1
        _, gone_at = np.unique(code[new < 0], return_inverse=True)
        renumbered = _FIRST_PRIVATE + 2 * new + (code & 1)
        renumbered[new < 0] = public + gone_at
        content[private] = renumbered
    return Spans(start, content, spans.offset[pick], spans.length[pick])


def sort(trace: Trace) -> Trace:
    """Requests in order of arrival, as far as it is known before they are served; ties keep their order."""
    order = np.argsort(nominal_arrival_s(trace), kind="stable")
    in_order = bool((order == np.arange(len(order))).all())
    return replace(trace, recipe=None) if in_order else select(trace, order)


def slice(
    trace: Trace,
    *,
    start_s: float | None = None,
    end_s: float | None = None,
    rows: tuple[int, int] | None = None,
    sessions: int | None = None,
) -> Trace:
    """The requests that satisfy every condition; arrivals then count from `start_s`.

    Args:
        start_s, end_s: arrival from `start_s` to before `end_s`. A later turn counts as arriving when it
            would if serving took no time; one whose predecessor is cut off arrives at that time.
        rows: from the first row number to before the second.
        sessions: the first so many sessions, by their first request; requests of no session are kept.

    Raises:
        BadInput: nothing is left.
    """
    nominal = nominal_arrival_s(trace)
    keep = np.ones(len(trace), dtype=bool)
    if start_s is not None:
        keep &= nominal >= start_s
    if end_s is not None:
        keep &= nominal < end_s
    if rows is not None:
        number = np.arange(len(trace))
        keep &= (number >= rows[0]) & (number < rows[1])
    if sessions is not None:
        keep &= pd.factorize(trace.column("session"))[0] < sessions
    if not keep.any():
        raise BadInput(f"trace {trace.name}: nothing is left of {len(trace):,} requests; widen the slice")
    cut = select(trace, np.flatnonzero(keep))
    if start_s is None:
        return cut
    shifted = cut.requests["arrival_s"] - start_s
    return replace(cut, requests=table({**columns_of(cut), "arrival_s": shifted}))


def scale(trace: Trace, rate: float, *, think_times: bool = False) -> Trace:
    """Makes requests come `rate` times as often: all arrival times are divided by it.

    Think times stay, for people don't think faster when there are more of them, so that traces of
    sessions gain sessions at a time, not speed within one; with `think_times` they are divided as well.
    Raises BadInput for a rate that is not positive.
    """
    if not (np.isfinite(rate) and rate > 0):
        raise BadInput(f"rate factor {rate:g}: give a positive number")
    columns = {**columns_of(trace), "arrival_s": trace.seconds("arrival_s") / rate}
    if think_times:
        columns["gap_s"] = trace.seconds("gap_s") / rate
    recipe = None if think_times else _faster(trace, rate)
    return replace(trace, requests=table(columns), recipe=recipe, measured=None)


def _faster(trace: Trace, rate: float) -> Recipe | None:
    """The recipe of a trace whose load was scaled."""
    if trace.recipe is None:
        return None
    return {**trace.recipe, "speedup": float(trace.recipe.get("speedup", 1.0)) * rate}


def mix(traces: Sequence[Trace], *, share_contents: bool = False, name: str = "mix") -> Trace:
    """Plays several traces at once, in order of arrival.

    Contents and sessions of different traces are kept apart: texts get new names, sessions the number of
    their trace before their own name, and prompts given as token ids a salt. With `share_contents`
    equal names mean equal texts, and no salt is added. Raises BadInput for none, or prompts as token ids
    mixed with prompts as spans.
    """
    if not traces:
        raise BadInput("nothing to mix; give at least one trace")
    if len({trace.token_ids is None for trace in traces}) > 1:
        raise BadInput("prompts as token ids don't mix with prompts as spans; convert one")
    if len(traces) == 1:
        return replace(traces[0], name=name)
    ids = [row for trace in traces for row in trace.token_ids or ()]
    shifts = _text_shifts(traces, share_contents)
    mixed = Trace(
        name,
        table(_mixed_columns(traces, shifts, share_contents)),
        _mixed_spans(traces, shifts),
        ids if traces[0].token_ids is not None else None,
        tuple(dict.fromkeys(note for trace in traces for note in trace.notes)),
        lengths_only=any(trace.lengths_only for trace in traces),
    )
    return sort(mixed)


def in_turn(trace: Trace) -> Trace:
    """The trace with each session's requests after one another, as one user sends them.

    Where a trace has times of its own for them, nothing tells how long the user paused: then nobody pauses.
    """
    after = trace.integers("after").copy()
    follower = Chains.of(trace).follower
    before = np.flatnonzero(follower >= 0)
    loose = before[after[follower[before]] < 0]
    if not len(loose):
        return trace
    after[follower[loose]] = loose
    arrival = np.where(after < 0, trace.seconds("arrival_s"), np.nan)
    columns = {**columns_of(trace), "after": after, "arrival_s": arrival}
    return replace(trace, requests=table(columns), recipe=None)


def repeat(trace: Trace, passes: int, warmup: int) -> Trace:
    """The trace so many times over, with equal prompts, the last to be measured (`warmup` in `COLUMNS`).

    Before all come `warmup` copies of the first request.
    """
    trace = _named(trace)
    layers = [_warm(trace, passes - 1 - number) for number in range(passes)]
    if warmup:
        first = select(trace, np.zeros(warmup, dtype=np.int64))
        columns = {name: column for name, column in columns_of(first).items() if name != "session"}
        columns["arrival_s"] = np.zeros(warmup)
        layers.insert(0, _warm(replace(first, requests=table(columns)), passes))
    return replace(mix(layers, share_contents=True, name=trace.name), concurrency=trace.concurrency)


def _warm(trace: Trace, number: int) -> Trace:
    """The trace as warm-up of this number; 0: to be measured."""
    return replace(trace, requests=table({**columns_of(trace), "warmup": np.full(len(trace), number)}))


def _named(trace: Trace) -> Trace:
    """The trace with names for texts that belong to its rows, so that copies of them are equal."""
    if trace.token_ids is not None:
        return trace
    none = np.zeros(len(trace), dtype=np.int64)
    spans = trace.spans or Spans(starts(none), *(np.empty(0, dtype=np.int64) for _ in range(3)))
    counts, used = np.diff(spans.start), _texts_used(trace)
    unique = np.flatnonzero(counts == 0)
    at = spans.start[unique]
    content = np.insert(spans.content, at, _FIRST_PRIVATE + 2 * unique)
    private = content < 0
    content[private] += used - _FIRST_PRIVATE
    offset = np.insert(spans.offset, at, 0)
    length = np.insert(spans.length, at, trace.integers("input_tokens")[unique])
    return replace(trace, spans=Spans(starts(np.maximum(counts, 1)), content, offset, length))


def columns_of(trace: Trace) -> dict[str, Any]:
    """The columns that a trace has, by name."""
    return {str(column): trace.requests[column] for column in trace.requests}


def _texts_used(trace: Trace) -> int:
    """One more than the greatest name of a text."""
    most = int(trace.integers("output_content").max(initial=-1))
    if trace.spans is not None:
        most = max(most, int(trace.spans.content.max(initial=-1)))
    return most + 1


def _text_shifts(traces: Sequence[Trace], share_contents: bool) -> list[int]:
    used = [0 if share_contents else _texts_used(trace) for trace in traces]
    return [int(shift) for shift in starts(np.array(used, dtype=np.int64))[:-1]]


def _mixed_columns(traces: Sequence[Trace], shifts: Sequence[int], share_contents: bool) -> dict[str, Any]:
    salted = traces[0].token_ids is not None and not share_contents
    names = [name for name in COLUMNS if any(name in trace.requests for trace in traces)]
    names += ["salt"] if salted and "salt" not in names else []
    before = starts(np.array([len(trace) for trace in traces], dtype=np.int64))[:-1].tolist()
    mixed: dict[str, Any] = {}
    for name in names:
        if name == "after":
            mixed[name] = _shifted(traces, name, before)
        elif name == "output_content":
            mixed[name] = _shifted(traces, name, shifts)
        elif name in TEXTS:
            numbered = name == "session" or (name == "salt" and salted)
            texts = [trace.column(name) for trace in traces]
            texts = [column.fillna("") for column in texts] if name == "salt" and salted else texts
            texts = [f"{number}/" + column for number, column in enumerate(texts)] if numbered else texts
            mixed[name] = pd.concat(texts, ignore_index=True)
        else:
            mixed[name] = np.concatenate([trace.column(name).to_numpy() for trace in traces])
    return mixed


def _shifted(traces: Sequence[Trace], name: str, shifts: Sequence[int]) -> Ints:
    """A column of numbers, -1 for none, with each trace's own shift added to its numbers."""
    columns = [trace.integers(name) for trace in traces]
    return np.concatenate(
        [np.where(column < 0, column, column + shift) for column, shift in zip(columns, shifts, strict=True)]
    )


def _mixed_spans(traces: Sequence[Trace], shifts: Sequence[int]) -> Spans | None:
    if all(trace.spans is None for trace in traces):
        return None
    before = 0
    counts, contents, offsets, lengths = [], [], [], []
    for trace, shift in zip(traces, shifts, strict=True):
        spans = trace.spans
        if spans is None:
            counts.append(np.zeros(len(trace), dtype=np.int64))
        else:
            counts.append(np.diff(spans.start))
            # Private names hold row numbers, two names per row.
            contents.append(spans.content + np.where(spans.content < 0, 2 * before, shift))
            offsets.append(spans.offset)
            lengths.append(spans.length)
        before += len(trace)
    flat = (np.concatenate(part) for part in (contents, offsets, lengths))
    return Spans(starts(np.concatenate(counts)), *flat)
