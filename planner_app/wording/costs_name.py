"""The name of step costs, with a word where they are of other kernels than this version's."""

from __future__ import annotations

from pagecast.kernels.code_digest import code_digest
from pagecast.sim.costs.calibration.file import read_shipped, shipped
from pagecast.sim.runs.other_kernels import fitted_kernels

_OWN = "pagecast"


def costs_name(name: str) -> str:
    """Step costs by name; for a shipped calibration of our engine, the kernels where they have changed."""
    path = shipped().get(name)
    if path is None:
        return name
    calibration = read_shipped(path)
    if calibration.made_for["engine"] != _OWN:
        return name
    fitted, here = fitted_kernels(calibration), code_digest()
    if fitted == {here}:
        return name
    return f"{name} (of other kernels: {', '.join(sorted(fitted))}, here {here})"
