"""Observers of a replica: they are told what happens, and change nothing."""

from __future__ import annotations

from collections.abc import Callable

from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request
from pagecast.sim.replica.transfers import Ended


class Observer:
    """Observer of a replica. A subclass writes the methods for what it wants to hear of; the others cost
    nothing. Times are nanoseconds of the replica's host, which may be ahead of the environment's clock.
    """

    def changing(self, now: int) -> None:
        """The replica is about to change: to take in arrivals, to plan, or to commit."""

    def planned(self, plan: StepPlan | None, now: int) -> None:
        """A step or a stretch was planned, and is about to be launched. None: nothing can be done now."""

    def step(self, plan: StepPlan, outcome: Outcome, start_ns: int, end_ns: int) -> None:
        """A step or a stretch was committed; from its plan to the device's end. Its requests end next."""

    def ended(self, request: Request, now: int) -> None:
        """A request has ended, whichever way."""

    def transferred(self, ended: Ended, now: int, *, disk: bool) -> None:
        """The scheduler was told that transfers have ended: with the host tier, or its `disk`."""

    def stopped(self, used_blocks: int) -> None:
        """The replica was stopped while requests held so many blocks."""


class Observers:
    """The observers of a replica, as lists of the methods to call for each thing that happens."""

    def __init__(self) -> None:
        self.changing: list[Callable[[int], None]] = []
        self.planned: list[Callable[[StepPlan | None, int], None]] = []
        self.step: list[Callable[[StepPlan, Outcome, int, int], None]] = []
        self.ended: list[Callable[[Request, int], None]] = []
        self.transferred: list[Callable[..., None]] = []
        self.stopped: list[Callable[[int], None]] = []

    def add(self, observer: Observer) -> None:
        """Adds those methods that the observer's class has written itself."""
        for name, methods in vars(self).items():
            if getattr(type(observer), name) is not getattr(Observer, name):
                methods.append(getattr(observer, name))
