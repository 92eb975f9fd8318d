"""Whether a calibration was fitted to a recorded run, so that the run checks the fit and no forecast."""

from __future__ import annotations

from pagecast.sim.costs.calibration.file import Calibration
from pagecast.sim.runs.busy_steps import fitted_steps
from pagecast.sim.runs.recorded import RecordedRun

_SAME_S = 0.002  # a run's seconds are kept to the millisecond


def in_sample(calibration: Calibration, run: RecordedRun) -> str:
    """One sentence where the calibration was fitted to this run or a part of it, else "".

    A run is known by how many steps of it were used and how long they took, whatever its name is now.
    """
    for source in calibration.provenance.get("runs", []):
        steps, took_ns = fitted_steps(run, source["part"])
        seconds = float(took_ns.sum()) / 1e9
        if len(steps) == source["steps"] and abs(seconds - source["seconds"]) < _SAME_S:
            whole = source["part"] == 1
            part = "" if whole else f"the first {100 * source['part']:.0f}% of "
            return (
                f"{calibration.name} was fitted to {part}this run ({source['run']}): "
                f"{'this' if whole else 'that part'} checks the fit, forecasts nothing; judge it by others."
            )
    return ""
