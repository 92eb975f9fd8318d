"""Pipeline: the plans in flight, oldest first.

    while work:
        if pipeline.has_room: plan, launch, `add` what was launched
        if pipeline.is_full: wait for the oldest, then `commit` it

Simulation, engine and the validation of recorded runs differ in what a launch is and how they wait. What
they share is here: how many plans may be in flight, and that they are committed in the order they were made.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from pagecast.sim.core.plan import DONE, Outcome, StepPlan
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler

FlightT = TypeVar("FlightT")


class Pipeline(Generic[FlightT]):
    """Plans under way on a backend, each with what the backend knows of it.

    `flights` holds them, oldest first; at most `depth` + 1 are under way.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.depth = scheduler.limits.pipeline_depth
        self.flights: deque[tuple[StepPlan, FlightT]] = deque()

    def __len__(self) -> int:
        return len(self.flights)

    @property
    def has_room(self) -> bool:
        """Whether another step may be planned before the oldest is committed."""
        return len(self.flights) <= self.depth

    @property
    def is_full(self) -> bool:
        """Whether the oldest step must be committed before another is planned."""
        return len(self.flights) > self.depth

    @property
    def oldest(self) -> tuple[StepPlan, FlightT]:
        """The plan to be committed next. Errors: IndexError where none is in flight."""
        return self.flights[0]

    @property
    def newest(self) -> tuple[StepPlan, FlightT]:
        """The plan made last. Errors: IndexError where none is in flight."""
        return self.flights[-1]

    def add(self, plan: StepPlan, flight: FlightT) -> None:
        """Adds a plan that was just launched."""
        self.flights.append((plan, flight))

    def replace_newest(self, plan: StepPlan, flight: FlightT) -> None:
        """Puts a shortened plan in the place of the one made last."""
        self.flights[-1] = (plan, flight)

    def commit(self, outcome: Outcome = DONE, now: int = 0) -> list[Request]:
        """Commits the oldest plan. Returns the requests that ended with it."""
        plan = self.flights.popleft()[0]
        return self.scheduler.commit(plan, outcome, now)
