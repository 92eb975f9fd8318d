"""Recorder of the sweep, segment by segment, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pagecast.engine.engine import Engine
from pagecast.engine.serve import TraceServer, run_meta
from pagecast.engine.sweep_options import option_segments
from pagecast.engine.sweep_traces import VERSION, Segment, rehearsal, segments
from pagecast.sim.core.errors import BadInput
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.speculation.recorded import ACCEPTED, DRAFTS

_HOST_TIER, _NGRAM = 20, 21  # numbers of the segments with options
_TEMPERATURE = 0.0
# What a restart may differ in without its steps costing anything else.
_FREE = ("usable_blocks", "weights", "config.gpu_memory_utilization", "config.num_blocks")

Progress = Callable[[int, int], None]
"""Is told how many tokens of the sweep have been served, and of how many."""


def record_sweep(engine: Engine, folder: Path, progress: Progress = lambda done, total: None) -> list[Path]:
    """Records what is missing of the sweep into `folder`, one run a segment; returns all of them in order.

    An engine with n-grams or a host tier records what these take instead: a segment for each, beside those
    of a plain engine. The engine must have been made with `log_events=True`, as for any recorded run.
    After an error what was recorded is kept, and no request is live. Errors: BadInput where the folder holds
    segments of another model, GPU, version or option, or in a segment's place something that is none.
    """
    batches, drafts = engine.loop.runner.batches, engine.options.most_drafts
    if drafts or engine.limits.host is not None:
        parts = option_segments(engine.limits, drafts)
        first = _NGRAM if engine.limits.host is None else _HOST_TIER
    else:
        parts, first = segments(engine.limits, batches.graphs, batches.prompt_graphs), 0
    paths = [folder / f"{number:02d}-{part.name}" for number, part in enumerate(parts, first)]
    missing = [not _recorded(path, engine, part) for path, part in zip(paths, parts, strict=True)]
    if any(missing):
        TraceServer(engine, rehearsal(engine.limits)).run()
    done, total = 0, sum(map(_work, parts))
    with _depth_restored(engine):
        for path, part, wanted in zip(paths, parts, missing, strict=True):
            if wanted:
                _set_depth(engine, part.depth)
                _record(engine, part, path, partial(_tell, progress, done, total))
            done += _work(part)
            progress(done, total)
    return paths


@contextmanager
def _depth_restored(engine: Engine) -> Iterator[None]:
    """Gives the engine its pipeline depth back in the end, unless an error has closed it."""
    depth = engine.limits.pipeline_depth
    try:
        yield
    finally:
        if not engine.closed:
            _set_depth(engine, depth)


def _tell(progress: Progress, before: int, total: int, served: int) -> None:
    progress(before + served, total)


def _work(part: Segment) -> int:
    """How much there is to do in a segment; an output token counts as ten of a prompt."""
    requests = part.trace.requests
    return int(requests["input_tokens"].sum()) + 10 * int(requests["output_tokens"].sum())


def _set_depth(engine: Engine, depth: int) -> None:
    """Makes the engine plan that far ahead from now on; nothing may be live."""
    engine.limits = replace(engine.limits, pipeline_depth=depth)
    engine.loop.restart(engine.limits)


def _record(engine: Engine, part: Segment, path: Path, progress: Callable[[int], None]) -> None:
    """Serves one segment and writes its run; a run that was cut short leaves only a `.part` folder."""
    unfinished = path.with_name(f"{path.name}.part")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    served, each = 0, _work(part) / len(part.trace)

    def ended() -> None:
        nonlocal served
        served += 1
        progress(int(served * each))

    run = TraceServer(engine, part.trace, temperature=_TEMPERATURE, ended=ended).run()
    columns = ["arrival_s", "input_tokens", "output_tokens", DRAFTS, ACCEPTED]
    run = replace(
        run,
        meta={**run.meta, "sweep": {"version": VERSION, "segment": part.name}},
        requests=run.requests.drop(columns="output_ids"),
        inputs=run.inputs[[name for name in columns if name in run.inputs]],
        events=[],
    )
    run.write(unfinished)
    unfinished.rename(path)


def _recorded(path: Path, engine: Engine, part: Segment) -> bool:
    """Whether a segment is there already.

    Errors: BadInput where it was made by a different set-up, and where something else is in its place.
    """
    if not path.exists():
        return False
    if not (path / "meta.json").is_file():
        raise BadInput(
            f"{path}: is in the place of a segment, but has no meta.json: move it away, or give another --out"
        )
    expected: dict[str, Any] = json.loads(json.dumps(run_meta(engine, _TEMPERATURE)))
    expected["sweep"] = {"version": VERSION, "segment": part.name}
    expected["config"]["async_scheduling"] = bool(part.depth)
    was, now = _flat(RecordedRun.load(path).meta), _flat(expected)
    # `config` and `model` lack what an engine does without, so the fields of both sides count there. Beside
    # them a run has fields of its own.
    names = [*now, *(name for name in was if "." in name and name not in now)]
    for name in names:
        if was.get(name) != now.get(name) and name not in _FREE:
            raise BadInput(
                f"{path}/meta.json: recorded with {name} {was.get(name)!r}, not {now.get(name)!r}: give "
                f"another --out, or remove {path.parent}"
            )
    return True


def _flat(meta: dict[str, Any]) -> dict[str, Any]:
    """Fields by name, those of inner objects as `outer.inner`."""
    flat: dict[str, Any] = {}
    for key, value in meta.items():
        inner = value.items() if isinstance(value, dict) else ()
        flat |= {f"{key}.{field}": each for field, each in inner} or {key: value}
    return flat
