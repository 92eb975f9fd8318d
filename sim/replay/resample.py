"""Resampled workloads: another trace of the same kind, for replicates.

A trace is one draw of what its users might have sent. If a generator made it, another seed gives another
draw. Any other trace is resampled with replacement: its sessions, each at the start time of one of them, or,
without sessions, windows of its time. Each is drawn from its neighbours in time, so that a rush hour stays a
rush hour, and sessions that the trace's end cuts off stay at the end. Where one is drawn twice, contents of
the second copy are renamed, so that it does not hit the first one's prompts in the cache: in a session those
that occur in it alone (system prompts keep their names), in a window all.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pagecast.sim.note import Note
from pagecast.traces.arrays import Floats, Ints
from pagecast.traces.chains import session_numbers
from pagecast.traces.operations import mix, select
from pagecast.traces.recipe import another
from pagecast.traces.schema import Trace, nominal_arrival_s
from pagecast.traces.seeds import checked_seed

WINDOWS = 60
_NEIGHBOURS = 6  # sessions or windows that one is drawn from, at least, where there are so many
_STRATA = 20
GENERATOR, SESSIONS, WINDOWS_OF_TIME = "generator", "sessions", "windows"  # where other workloads come from


def resample(trace: Trace, seed: int) -> Trace:
    """A trace of the same kind, drawn with `seed`: by its generator where it has one, else from itself.

    Errors: BadInput for a seed below 0.
    """
    return another(trace, checked_seed(seed)) or _resampled(trace, seed)


def _resampled(trace: Trace, seed: int) -> Trace:
    at_once = (
        trace.concurrency is not None and not _has_sessions(trace) and not trace.seconds("arrival_s").any()
    )
    if at_once:  # clients send them one after another: then their order is their time
        trace = replace(trace, requests=trace.requests.assign(arrival_s=np.arange(float(len(trace)))))
    units, begins = _units(trace)
    count = len(begins)
    random = np.random.default_rng(seed)
    draws = _draw(begins, random)
    copy = _copy_numbers(draws)
    own = _own_texts(trace, units)
    used = _texts_used(trace)
    layers = []
    for number in range(int(copy.max()) + 1):
        slots = np.flatnonzero(copy == number)
        slot_of_unit = np.full(count, -1)
        slot_of_unit[draws[slots]] = slots
        rows = np.flatnonzero(slot_of_unit[units] >= 0)
        layer = select(trace, rows)
        shift = begins[slot_of_unit[units[rows]]] - begins[units[rows]]
        moved = np.maximum(layer.seconds("arrival_s") + shift, 0.0)
        requests = layer.requests.assign(arrival_s=moved)
        layers.append(_renamed(replace(layer, requests=requests), own, number * used, number))
    drawn = mix(layers, share_contents=True, name=trace.name)
    if at_once:
        drawn = replace(drawn, requests=drawn.requests.assign(arrival_s=0.0))
    return replace(drawn, notes=trace.notes, concurrency=trace.concurrency)


def _draw(begins: Floats, random: np.random.Generator) -> Ints:
    """For each unit one of those near it in time, which may be itself."""
    count = len(begins)
    order = np.argsort(begins, kind="stable")
    size = max(_NEIGHBOURS, -(-count // _STRATA))
    last = max(count // size - 1, 0) * size  # where the last stratum begins, which has the remainder too
    first = np.minimum(np.arange(count) // size * size, last)
    wide = np.where(first == last, count - last, size)
    draws = np.empty(count, np.int64)
    draws[order] = order[first + (random.random(count) * wide).astype(np.int64)]
    return draws


def redrawn(trace: Trace, seed: int, reused: float | None = None, drawn: float | None = None) -> Note:
    """Where other workloads come from, and what that does to sharing.

    `reused` and `drawn` are the shares of prompt tokens that the cache held for the trace and in the draws.
    """
    if another(trace, seed) is not None:
        return Note("workload_redrawn", source=GENERATOR)
    source = SESSIONS if _has_sessions(trace) else WINDOWS_OF_TIME
    return Note("workload_redrawn", source=source, reused=reused, reused_in_draws=drawn)


def _has_sessions(trace: Trace) -> bool:
    return "session" in trace.requests and bool(trace.requests["session"].notna().any())


def _units(trace: Trace) -> tuple[Ints, Floats]:
    """The unit of each row, numbered from 0, and when each unit begins (seconds)."""
    nominal = nominal_arrival_s(trace)
    if _has_sessions(trace):
        units = session_numbers(trace, np.arange(len(trace)))
        begins = np.full(int(units.max()) + 1, np.inf)
        np.minimum.at(begins, units, nominal)
        return units, begins
    span = float(nominal.max()) or 1.0
    count = max(1, min(WINDOWS, len(trace) // 4))
    units = np.minimum((nominal / span * count).astype(np.int64), count - 1)
    return units, np.arange(count) * span / count


def _copy_numbers(draws: Ints) -> Ints:
    """How often each draw's unit has been drawn before it."""
    order = np.argsort(draws, kind="stable")
    ordered = draws[order]
    first = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1])
    size = np.diff(np.append(first, len(ordered)))
    numbers = np.empty(len(draws), np.int64)
    numbers[order] = np.arange(len(draws)) - np.repeat(first, size)
    return numbers


def _own_texts(trace: Trace, units: Ints) -> Ints:
    """Names of the texts that a second copy of a unit has as its own."""
    if trace.spans is None:
        return np.empty(0, np.int64)
    if not _has_sessions(trace):
        names = np.unique(trace.spans.content)
        return np.asarray(names[names >= 0], np.int64)
    owner = np.repeat(units, np.diff(trace.spans.start))
    pairs = np.unique(np.stack([trace.spans.content, owner]), axis=1)
    names, counts = np.unique(pairs[0], return_counts=True)
    return np.asarray(names[(counts == 1) & (names >= 0)], np.int64)


def _texts_used(trace: Trace) -> int:
    """One more than the greatest name of a text."""
    most = int(trace.integers("output_content").max(initial=-1))
    return max(most, int(trace.spans.content.max(initial=-1)) if trace.spans is not None else -1) + 1


def _renamed(trace: Trace, own: Ints, shift: int, copy: int) -> Trace:
    """Copy number `copy`, with the names of `own` moved by `shift`; the first copy keeps its names.

    Prompts given as token ids have no names: the whole copy gets a salt, and shares with no other.
    """
    if copy == 0:
        return trace
    requests = trace.requests
    if trace.token_ids is not None:
        salt = trace.column("salt").fillna("").astype("string") + f" copy {copy}"
        return replace(trace, requests=requests.assign(salt=salt))

    def rename(names: Ints) -> Ints:
        return np.where(np.isin(names, own), names + shift, names)

    if "output_content" in requests:
        requests = requests.assign(output_content=rename(trace.integers("output_content")))
    spans = None if trace.spans is None else replace(trace.spans, content=rename(trace.spans.content))
    return replace(trace, spans=spans, requests=requests)
