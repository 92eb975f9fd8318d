"""Check whether a calibration was fitted to a recorded run: such a run tests the fit, not a forecast."""

from __future__ import annotations

from pagecast.sim.costs.calibration.file import Calibration
from pagecast.sim.note import Note
from pagecast.sim.runs.busy_steps import fitted_steps
from pagecast.sim.runs.recorded import RecordedRun

_SAME_S = 0.002  # a run's seconds are kept to the millisecond


def in_sample(calibration: Calibration, run: RecordedRun) -> Note | None:
    """The part of this run that the calibration was fitted to; None where it was not.

    A run is known by how many steps of it were used and how long they took, whatever its name is now.
    """
    for source in calibration.provenance.get("runs", []):
        steps, took_ns = fitted_steps(run, source["part"])
        seconds = float(took_ns.sum()) / 1e9
        if len(steps) == source["steps"] and abs(seconds - source["seconds"]) < _SAME_S:
            return Note("in_sample", calibration=calibration.name, run=source["run"], part=source["part"])
    return None
