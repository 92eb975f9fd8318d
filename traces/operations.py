"""Cuts, orders, scales and mixes traces; links between turns and quoted texts stay right.

Every operation returns a new trace. Rows may move or go: `after` follows them, and private texts (a
unique prompt, a request's own output) are named anew, because their names hold row numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from pagecast.sim.core.content import own_output, own_prompt
from pagecast.traces.schema import Ints, Spans, Trace, nominal_arrival_s, starts, table

_FIRST_PRIVATE = own_prompt(0)
assert (own_output(0), own_prompt(1)) == (_FIRST_PRIVATE + 1, _FIRST_PRIVATE + 2)


def select(trace: Trace, rows: Ints) -> Trace:
    """The given rows, in the given order. A turn whose predecessor is left out gets an arrival time.

    That time is when it would arrive if serving took no time (`nominal_arrival_s`).
    """
    rows = np.asarray(rows, dtype=np.int64)
    moved = np.full(len(trace) + 1, -1, dtype=np.int64)  # the last entry is for `after` == -1
    moved[rows] = np.arange(len(rows))
    requests = trace.requests.iloc[rows].reset_index(drop=True)
    columns: dict[str, Any] = {str(name): requests[name] for name in requests}
    if "after" in columns:
        after = moved[trace.integers("after")[rows]]
        orphan = np.isnan(trace.seconds("arrival_s")[rows]) & (after < 0)
        columns["after"] = after
        columns["arrival_s"] = np.where(orphan, nominal_arrival_s(trace)[rows], columns["arrival_s"])
        columns["gap_s"] = np.where(orphan, 0.0, trace.seconds("gap_s")[rows])
    spans = None if trace.spans is None else _move_spans(trace, trace.spans, rows, moved)
    ids = None if trace.token_ids is None else [trace.token_ids[row] for row in rows.tolist()]
    return replace(trace, requests=table(columns), spans=spans, token_ids=ids)


def _move_spans(trace: Trace, spans: Spans, rows: Ints, moved: Ints) -> Spans:
    counts = np.diff(spans.start)[rows]
    start = starts(counts)
    pick = np.arange(start[-1]) + np.repeat(spans.start[rows] - start[:-1], counts)
    content = spans.content[pick]
    private = np.flatnonzero(content < 0)
    if len(private):
        code = content[private] - _FIRST_PRIVATE
        new = moved[code >> 1]
        public = max(int(spans.content.max()), int(trace.integers("output_content").max()), -1) + 1
        _, gone_at = np.unique(code[new < 0], return_inverse=True)
        named = _FIRST_PRIVATE + 2 * new + (code & 1)
        named[new < 0] = public + gone_at
        content[private] = named
    return Spans(start, content, spans.offset[pick], spans.length[pick])


def sort(trace: Trace) -> Trace:
    """Requests in order of arrival, as far as it is known before they are served; ties keep their order."""
    return select(trace, np.argsort(nominal_arrival_s(trace), kind="stable"))
