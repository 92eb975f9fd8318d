"""Check whether a recorded run was made with the kernels that a calibration was fitted to.

With other kernels its decisions can be compared, its times can't: kernels become faster.
"""

from __future__ import annotations

from typing import Any

from pagecast.sim.costs.calibration.file import Calibration
from pagecast.sim.note import Note


def other_kernels(calibration: Calibration, meta: dict[str, Any]) -> Note | None:
    """The kernels that were fitted and those of a run with this `meta.json`; None where they are the same.

    Our engine writes a digest of its kernels' code there (`kernels`). Other engines' kernels are known by the
    engine's version, as ours of earlier recordings.
    """
    fitted = fitted_kernels(calibration)
    recorded = _kernels(meta)
    if fitted == {recorded}:
        return None
    return Note("other_kernels", fitted=", ".join(sorted(fitted)), recorded=recorded)


def fitted_kernels(calibration: Calibration) -> set[str]:
    """The kernels of the runs that a calibration was fitted to."""
    return {_kernels(source) for source in calibration.provenance.get("runs", [])}


def _kernels(meta: dict[str, Any]) -> str:
    return str(meta.get("kernels") or meta.get("engine_version"))
