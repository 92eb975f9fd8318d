"""The trace of a view: a bundled one, one from the generator's or a load's fields, or an uploaded file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pagecast.planner_app.dashboard.shell.jobs import Results
from pagecast.planner_app.dashboard.shell.view import (
    GENERATED,
    LOAD_TOOL,
    UPLOAD,
    PageView,
    generator_options,
)
from pagecast.sim.core.errors import BadInput
from pagecast.traces.arrivals import ArrivalProcess
from pagecast.traces.generate import Conversations, conversations, requests
from pagecast.traces.hits import Hits, hits
from pagecast.traces.lengths import parse
from pagecast.traces.operations import scale
from pagecast.traces.read import read
from pagecast.traces.schema import Trace

# Decompressed; an upload itself is at most 200 MB. The reader stops here, with a line that says so.
UPLOAD_BYTES = 1 << 30
_MESSAGE, _THINK = "lognormal:p50=60,sigma=1", "lognormal:p50=8,sigma=0.7"
_MOST_TOKENS = 32_768

traces = Results(most=32)
_curves = Results(most=16)


def trace_of(view: PageView) -> Trace:
    """The trace of a view that needs no upload, or whose upload has been read (`keep`). Errors: BadInput."""
    trace: Trace = traces.make(view.trace_key(), lambda: _build(view))
    return trace


def _build(view: PageView) -> Trace:
    if view["trace"] == UPLOAD:
        raise BadInput("upload: give a trace file (this link shows one that only its sender has)")
    if view["trace"] == LOAD_TOOL:
        return view.load().trace(view["seed"])
    return _sent(view, generated(view) if view["trace"] == GENERATED else _sample(view))


def _sample(view: PageView) -> Trace:
    """A bundled trace as its file has it, which is read once for all rates."""
    name, limit, seed = f"sample:{view['trace']}", view["requests"], view["seed"]
    trace: Trace = traces.make((name, limit, seed), lambda: read(name, limit=limit, seed=seed))
    return trace


def keep(view: PageView, trace: Trace) -> Trace:
    """Notes the trace that was read for a view, sent as the view says."""
    trace = _sent(view, trace)
    traces.put(view.trace_key(), trace)
    return trace


def _sent(view: PageView, trace: Trace) -> Trace:
    """The trace at the view's rate, sent as its load says."""
    faster = trace if view["rate"] == 1 else scale(trace, view["rate"])
    return view.load().sent(faster, view["seed"])


def generated(view: PageView) -> Trace:
    """The trace that `pagecast trace generate` makes with `generator_options(view)`."""
    options, count, seed = generator_options(view), view["requests"], view["seed"]
    arrivals = ArrivalProcess(options["--arrivals"], view["g_rate"], view["g_cv"])
    prompt, output = parse(options["--input"]), parse(options["--output"])
    if "--turns" not in options:
        return requests(arrivals, prompt, output, count=count, seed=seed)
    systems = (view["g_system"],) if view["g_system"] else ()
    shape = Conversations(
        arrivals,
        parse(options["--turns"]),
        parse(_MESSAGE),
        output,
        parse(_THINK),
        systems,
        prompt,
        most_tokens=_MOST_TOKENS,
    )
    return replace(conversations(shape, sessions=count, count=count, seed=seed), name=GENERATED)


def hits_of(view: PageView, trace: Trace) -> Hits:
    """The hit-ratio curve of the trace at the view's block size."""
    size = view.scenario().block_size
    curve: Hits = _curves.make((*view.trace_key(), size), lambda: hits(trace, (), size))
    return curve


def read_upload(path: str, name: str, limit: int, sort: bool, seed: int, *, progress: Any = None) -> Trace:
    """Reads an uploaded file (in a process of its own). Errors: BadInput, with the file's own name."""
    try:
        trace = read(path, limit=limit, sort=sort, seed=seed, max_bytes=UPLOAD_BYTES, progress=progress)
    except BadInput as error:
        told = str(error).replace(path, name)
        remedy = 'switch on "Put requests in order of arrival"'
        raise BadInput(told.replace("add --sort (in Python: sort=True)", remedy)) from None
    return replace(trace, name=Path(name).name)
