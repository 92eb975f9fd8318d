"""Parallel samples (`n` > 1): one request asked for n answers is served as n requests, as in vLLM.

They come at once, in order, with one prompt. The first computes it, the others find what is cached of it by
then; each generates an answer of its own. A later turn follows the last of them, and quotes the first.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.content import own_output, own_prompt
from pagecast.traces.arrays import Ints
from pagecast.traces.arrivals import MAX_ARRIVALS
from pagecast.traces.schema import COLUMNS, Spans, Trace, starts, table

SAMPLES = "n"


def expand(trace: Trace) -> Trace:
    """The trace with a row per sample; itself where every request asks for one.

    The samples of each request are within `checks.find_problem`'s bounds. Errors: BadInput for more of all
    requests together than are served at once.
    """
    if SAMPLES not in trace.requests:
        return trace
    counts = trace.integers(SAMPLES)
    if counts.sum() > MAX_ARRIVALS:
        raise BadInput(
            f"trace {trace.name}, field n: {counts.sum():,} samples in all are more than the "
            f"{MAX_ARRIVALS:,} that are made at once; lower n, or read fewer requests (--limit)"
        )
    source = np.repeat(np.arange(len(trace)), counts)
    first = np.cumsum(counts) - counts
    number = np.arange(len(source)) - first[source]
    columns = {name: trace.requests[name].to_numpy()[source] for name in COLUMNS if name in trace.requests}
    del columns[SAMPLES]
    if "after" in columns:
        after = columns["after"]
        columns["after"] = np.where(after < 0, -1, (first + counts - 1)[after])
    if "output_content" in columns:
        columns["output_content"] = np.where(number > 0, -1, _moved(columns["output_content"], first))
        if "output_offset" in columns:
            columns["output_offset"] = np.where(number > 0, 0, columns["output_offset"])
    note = f"{int((counts > 1).sum()):,} requests ask for several samples: {len(source):,} are served in all"
    return replace(
        trace,
        requests=table(columns),
        spans=_spans(trace, counts, source, first),
        token_ids=None if trace.token_ids is None else [trace.token_ids[row] for row in source.tolist()],
        notes=(*trace.notes, note),
        recipe=None,
        measured=None,
    )


def _spans(trace: Trace, counts: Ints, source: Ints, first: Ints) -> Spans | None:
    """The prompts of all samples; where a prompt was unique, its samples share it now."""
    if trace.token_ids is not None:
        return None
    tokens = trace.integers("input_tokens")
    pieces: list[tuple[int, int, int]] = []
    lengths = []
    for row in source.tolist():
        spans = [] if trace.spans is None else trace.spans.row(row)
        if not spans and counts[row] > 1:
            spans = [(own_prompt(row), 0, int(tokens[row]))]
        lengths.append(len(spans))
        pieces += spans
    flat = np.array(pieces, dtype=np.int64).reshape(-1, 3)
    return Spans(starts(np.array(lengths)), _moved(flat[:, 0], first), flat[:, 1].copy(), flat[:, 2].copy())


def _moved(contents: Ints, first: Ints) -> Ints:
    """Content ids where those that belong to a row follow it to the row of its first sample."""
    new_contents = np.array(contents, dtype=np.int64)
    low, high = own_prompt(0), own_output(len(first) - 1)
    own = (new_contents >= low) & (new_contents <= high)
    row, kind = np.divmod(new_contents[own] - low, 2)
    new_contents[own] = low + 2 * first[row] + kind
    return new_contents
