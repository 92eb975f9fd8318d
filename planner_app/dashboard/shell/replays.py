"""Replays for the pages: short ones at once, longer ones and intervals as jobs, each only once.

Results are kept by what was replayed, for whoever asks next; nobody changes them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from pagecast.planner_app.dashboard.shell.jobs import Results
from pagecast.planner_app.dashboard.shell.problems import NothingToShow
from pagecast.planner_app.dashboard.shell.state import Session
from pagecast.planner_app.dashboard.shell.view import UPLOAD, PageView
from pagecast.planner_app.dashboard.shell.workload import keep, read_upload, trace_of, traces
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import Kept, Result, replay
from pagecast.sim.replay.replicates import LEAST, Spread, Study
from pagecast.sim.replay.resample import resample
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

REPLICATES = LEAST
_replays = Results(most=24)
_reads = Results(most=6)


def trace_for(own: Session, view: PageView) -> Trace | None:
    """The trace of a view; None while a job reads it. Errors: BadInput for one that can't be had."""
    if view["trace"] != UPLOAD:
        return trace_of(view)
    upload = own.uploads.get(view["upload"])
    if upload is None:
        if view["upload"]:
            raise NothingToShow(
                "This link shows a trace that only its sender has: choose the file in the side bar"
            )
        raise NothingToShow("Choose a trace file in the side bar")
    trace: Trace | None = traces.get(view.trace_key())
    if trace is not None:
        return trace
    key = ("read", view["upload"], view["requests"], view["sort"], view["seed"])
    arguments = (str(upload.path), upload.name, view["requests"], view["sort"], view["seed"])
    read = own.ask("read", key, read_upload, *arguments, store=_reads, first=True)
    if read is None:
        _raise_error(own, "read")
        return None
    return keep(view, read)


def result_for(own: Session, view: PageView, trace: Trace, slot: str = "replay") -> Result | None:
    """The replay of a view; None while a job makes it. Errors: BadInput."""
    result: Result | None = _replays.get(view.key())
    if result is None and len(trace) <= view.most_at_once:
        result = at_once(view, trace)
    if result is None:
        result = own.ask(slot, view.key(), replay_job, trace, view.scenario(), store=_replays, first=True)
        if result is None:
            _raise_error(own, slot)
    return result


def at_once(view: PageView, trace: Trace) -> Result:
    """The replay of a view, made here unless it is kept. Errors: BadInput."""
    result: Result = _replays.make(view.key(), lambda: replay(trace, view.scenario(), kept=Kept(room=True)))
    return result


def _raise_error(own: Session, slot: str) -> None:
    job = own.jobs[slot]
    if job.error and not job.running:
        raise BadInput(job.error)


def replay_job(trace: Trace, scenario: Scenario, *, progress: Any) -> Result:
    """A replay; `progress` gets the number of requests that have ended, and of all."""

    def tell(done: int) -> None:
        progress((done, len(trace), "requests replayed"))

    return replay(trace, scenario, progress=tell, kept=Kept(room=True))


def spread_for(own: Session, view: PageView, trace: Trace) -> Spread | None:
    """The 90% intervals of a view's figures; None until the job in slot `spread` has them."""
    spread: Spread | None = own.ask("spread", spread_key(view), spread_job, trace, view.scenario())
    return spread


def spread_key(view: PageView) -> Hashable:
    """The key of a view's intervals among the results."""
    return ("spread", *view.key())


def spread_job(trace: Trace, scenario: Scenario, *, progress: Any) -> Spread:
    """Intervals as `pagecast replay --replicates` makes them."""
    study = Study(trace, scenario, scenario.seed, resample)
    return study.spread(
        REPLICATES,
        workers=1,
        progress=lambda done: progress((done, REPLICATES, "replays for the intervals")),
    )
