"""The load of each trial of a sweep, whose knobs may be fields of a load as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagecast.planner_app.planner.load_fields import load_fields, make_load
from pagecast.traces.load import Load
from pagecast.traces.schema import Trace


@dataclass(frozen=True)
class Loads:
    """`load` with the fields of a point; `trace` is what it sends, None where it makes requests."""

    load: Load
    trace: Trace | None
    seed: int

    def at(self, point: Mapping[str, Any]) -> Trace:
        """The requests of a trial. Errors: BadInput where the fields contradict each other."""
        fields = {name: value for name, value in point.items() if name in load_fields()}
        load = make_load({**self.load.given(), **fields}, "sweep")
        return load.trace(self.seed) if self.trace is None else load.sent(self.trace, self.seed)
