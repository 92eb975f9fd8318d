"""Busy steps of a recorded run: those after which work was left. Their time ends at the next start."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.traces.arrays import Flags, Floats, Ints


class BusySteps(NamedTuple):
    """Numbers of the busy steps; and for all steps the next start, and the arrivals until then."""

    numbers: Ints
    following_ns: Ints
    arrivals: Floats
    arrived_tokens: Floats


def busy_steps(run: RecordedRun, upto: float = 1.0) -> BusySteps:
    """The busy steps in a run's first part; `upto` is a share of its steps."""
    steps = run.steps
    last = np.append(steps.section[1:] != steps.section[:-1], True)
    following = np.append(steps.start_ns[1:], steps.start_ns[-1])
    arrivals, arrived, busy = _requests_around(run, following)
    keep = np.flatnonzero(~last & busy & (np.arange(len(steps)) < upto * len(steps)))
    return BusySteps(keep, following, arrivals, arrived)


def fitted_steps(run: RecordedRun, upto: float = 1.0) -> tuple[Ints, Floats]:
    """The steps of a run that had work after them, of its first part `upto` (a share of the steps), and the
    nanoseconds from the start of each to the next start."""
    keep, following, _, _ = busy_steps(run, upto)
    return keep, (following - run.steps.start_ns).astype(np.float64)[keep]


def _requests_around(run: RecordedRun, following: Ints) -> tuple[Floats, Floats, Flags]:
    """Per step: arrivals before the next start, their tokens, and whether work was left at its end."""
    steps = run.steps
    size = len(steps)
    if not len(run.requests):
        return np.zeros(size), np.zeros(size), np.ones(size, dtype=bool)
    submitted = run.submitted_ns
    during = np.searchsorted(steps.start_ns, submitted, side="right") - 1
    within = during >= 0
    tokens = run.requests["input_tokens"].to_numpy(np.float64)
    arrivals = np.bincount(during[within], minlength=size).astype(np.float64)
    arrived = np.bincount(during[within], weights=tokens[within], minlength=size).astype(np.float64)
    finished = np.sort(run.requests["finish_s"].to_numpy(np.float64) * 1e9)
    live = np.searchsorted(np.sort(submitted), steps.end_ns) - np.searchsorted(finished, following)
    return arrivals, arrived, live > 0
