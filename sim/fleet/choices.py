"""Choices of a router: a replica for each request, of those that there were to choose from."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagecast.sim.fleet.view import View


@dataclass(slots=True)
class Run:
    """Consecutive choices of the same replicas: their numbers, the rows, and the number chosen for each."""

    replicas: tuple[int, ...]
    rows: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)


class Choices:
    """The choices of one router, in order. A new run begins where other replicas can be chosen."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._views: list[View] = []

    def add(self, row: int, chosen: View, views: list[View]) -> None:
        """The router has sent a row to one of `views`."""
        if views != self._views:
            self._views = list(views)
            self.runs.append(Run(tuple(view.number for view in views)))
        run = self.runs[-1]
        run.rows.append(row)
        run.chosen.append(chosen.number)
