"""Recorded sweep as runs to fit: its segments, joined one after another on one clock.

A sweep is a folder of recorded runs, one per segment. One process recorded them within minutes, so they are
parts of one run: they share its scale factor, and a segment left out is predicted from the others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fitting.option_fit import has_options
from pagecast.sim.runs.recorded import RecordedRun, Steps

_APART_NS = 1_000_000_000  # between segments
_TIMES = ("arrival_s", "submitted_s", "first_token_s", "finish_s", "cancelled_s")


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds a sweep's segments rather than one run."""
    return folder.is_dir() and not (folder / "meta.json").is_file() and bool(_segments(folder))


def load_sweep(folder: Path) -> list[RecordedRun]:
    """The sweep's runs, joined: the synchronous one and, where recorded, the asynchronous one. Segments with
    n-grams or a host tier follow, each by itself.

    Errors: BadInput where a segment can't be read, or was made by another engine, model or GPU.
    """
    runs = [RecordedRun.load(path) for path in _segments(folder)]
    for run in runs[1:]:
        for key in ("engine", "engine_version", "gpu", "driver", "torch", "model"):
            if run.meta.get(key) != runs[0].meta.get(key):
                raise BadInput(f"{run.folder}/meta.json: {key} differs from {runs[0].folder}'s")
    plain = [run for run in runs if not has_options(run)]
    together = [
        joined([run for run in plain if run.pipeline_depth == depth], folder, name)
        for depth, name in ((0, "sweep"), (1, "sweep, asynchronous"))
        if any(run.pipeline_depth == depth for run in plain)
    ]
    return together + [run for run in runs if has_options(run)]


def _segments(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/meta.json") if path.parent.suffix != ".part")


def joined(runs: list[RecordedRun], folder: Path, name: str) -> RecordedRun:
    """One run of several; each becomes a section of its own, later than all before it."""
    parts, requests, begin = list[Steps](), list[pd.DataFrame](), 0
    for number, run in enumerate(runs):
        steps = run.steps
        parts.append(
            replace(
                steps,
                start_ns=steps.start_ns + begin,
                end_ns=steps.end_ns + begin,
                section=np.full(len(steps), number),
            )
        )
        table = run.requests.copy()
        for column in (key for key in _TIMES if key in table):
            table[column] = table[column].astype(float) + begin / 1e9
        requests.append(table)
        begin = int(parts[-1].end_ns[-1]) + _APART_NS
    names = tuple(str(run.meta.get("sweep", {}).get("segment", run.name)) for run in runs)
    steps = _joined_steps(parts, names)
    inputs = pd.concat([run.inputs for run in runs], ignore_index=True)
    meta = {**runs[0].meta, "name": name}
    together = pd.concat(requests, ignore_index=True)
    return RecordedRun(name, folder, meta, steps, together, inputs, parts=tuple(runs))


def _joined_steps(parts: list[Steps], names: tuple[str, ...]) -> Steps:
    columns = {
        key: np.concatenate([getattr(part, key) for part in parts])
        for key in vars(parts[0])
        if key not in ("prefill_start", "sections")
    }
    counts = np.concatenate([np.diff(part.prefill_start) for part in parts])
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Steps(prefill_start=starts, sections=names, **columns)
