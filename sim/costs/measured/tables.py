"""Tables of measured operations: one file per GPU and engine, read family by family when asked.

An `OperationTimes` is a dense grid: kernel configurations by swept sizes, with NaN where a shape was not
measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from pagecast.sim.costs.measured.packing import unpack
from pagecast.traces.arrays import Floats


@dataclass(frozen=True)
class OperationTimes:
    """Times in seconds of one kind of operation, `times[configuration, size, ...]`."""

    version: str
    keys: dict[tuple[Any, ...], int]
    axes: dict[str, Floats]
    times: Floats

    def of(self, *key: Any) -> Floats | None:
        """The times of one configuration; None where it was not measured."""
        at = self.keys.get(key)
        return None if at is None else np.asarray(self.times[at])


class MeasuredTable:
    """The measured operations of one GPU and engine."""

    def __init__(self, path: Path) -> None:
        self._file = np.load(path)
        self.facts: dict[str, Any] = json.loads(bytes(self._file["meta"]))
        self._families: dict[str, OperationTimes] = {}

    @property
    def engine(self) -> str:
        """Name of the engine that was measured."""
        return str(self.facts["engine"])

    @cached_property
    def version(self) -> str:
        """The engine's version that the operations were measured with."""
        return str(self.facts["version"])

    @property
    def gpu(self) -> str:
        """Name of the GPU that was measured on."""
        return str(self.facts["gpu"])

    def __contains__(self, name: str) -> bool:
        return name in self.facts["families"]

    def family(self, name: str) -> OperationTimes:
        """The operations called `name`; KeyError where there are none."""
        if name not in self._families:
            facts = self.facts["families"][name]
            self._families[name] = OperationTimes(
                version=facts["version"],
                keys={tuple(key): at for at, key in enumerate(facts["keys"])},
                axes={axis: np.array(values, np.float64) for axis, values in facts["axes"].items()},
                times=unpack(self._file[name]),
            )
        return self._families[name]


@cache
def paths() -> dict[tuple[str, str], Path]:
    """The tables there are, by GPU (as in a file's name) and engine."""
    folder = Path(str(files("pagecast.sim.costs.measured").joinpath("tables")))
    by_lane = {}
    for path in sorted(folder.glob("*.npz")):
        gpu, _, engine = path.stem.rpartition(".")
        by_lane[gpu, engine] = path
    return by_lane


@cache
def table(gpu: str, engine: str) -> MeasuredTable | None:
    """The table of a GPU (its full name) and an engine's lane; None where nothing was measured."""
    path = paths().get((gpu.lower().replace(" ", "-"), engine))
    return MeasuredTable(path) if path else None
