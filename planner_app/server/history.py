"""History of a live replica: what happened, in the order in which it happened, for those who keep it.

Every act gets a time of its own. Where the replica does two things at the same nanosecond, the later one is
one nanosecond later here, so that times alone tell the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from pagecast.planner_app.server.generation import Generation
from pagecast.planner_app.stderr import complain
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request
from pagecast.sim.runs.transfers import RecordedTransfer


class Keeper(Protocol):
    """Keeps what happens. Times are nanoseconds of the replica's clock, no two of them equal."""

    def submitted(self, request: Request, generation: Generation, at_ns: int) -> None:
        """The scheduler was given a request."""

    def idle(self, at_ns: int) -> None:
        """A plan was tried that preempted requests and found nothing to compute."""

    def committed(self, plan: StepPlan, start_ns: int, end_ns: int) -> None:
        """A step that was planned at `start_ns` ended."""

    def verified(self, plan: StepPlan, outcome: Outcome) -> None:
        """A step of requests that speculate ended; `committed` tells of it next."""

    def transferred(self, transfers: list[RecordedTransfer]) -> None:
        """The scheduler was told that transfers have ended."""

    def ended(self, request: Request, generation: Generation, at_ns: int) -> None:
        """A request ended, whichever way."""

    def flush(self) -> None:
        """Called several times a second."""

    def close(self) -> None:
        """Ends the history: nothing more will happen."""


class History:
    """Gives every act its time and passes it on to all keepers.

    A keeper that can't write is told nothing more: `failed` says why, and so does a line in the log.
    """

    def __init__(self) -> None:
        self._keepers: list[Keeper] = []
        self.failed = ""
        self._last = -1
        self._planned: deque[int] = deque()  # when the plans in flight were made
        self._live: dict[int, tuple[Request, Generation]] = {}

    @property
    def kept(self) -> bool:
        """Whether it has a keeper."""
        return bool(self._keepers)

    def add(self, keeper: Keeper) -> None:
        """Adds a keeper, before anything has happened."""
        self._keepers.append(keeper)

    def flush(self) -> None:
        self._tell(lambda keeper: keeper.flush())

    def close(self) -> None:
        self._tell(lambda keeper: keeper.close())

    def _tell(self, act: Callable[[Keeper], None]) -> None:
        for keeper in list(self._keepers):
            try:
                act(keeper)
            except OSError as error:
                self._keepers.remove(keeper)
                self.failed = f"the recording has failed, and ends here: {error.strerror or error}"
                complain(self.failed)

    def note_coming(self, request: Request, generation: Generation) -> None:
        """A request is on its way to the scheduler."""
        if self._keepers:
            self._live[request.index] = (request, generation)

    def note_outside(self, now: int, row: int, *, cancelled: bool) -> None:
        """A client hands a request in, or takes it back."""
        if not self._keepers:
            return
        at = self._stamp(now)
        if not cancelled:
            self._tell(lambda keeper: keeper.submitted(*self._live[row], at))

    def note_planned(self, now: int) -> None:
        """A plan was made."""
        if self._keepers:
            self._planned.append(self._stamp(now))

    def note_idle(self, now: int) -> None:
        """A plan was tried that only preempted."""
        if self._keepers:
            at = self._stamp(now)
            self._tell(lambda keeper: keeper.idle(at))

    def note_committed(self, plan: StepPlan, now: int) -> None:
        """The oldest plan in flight was committed."""
        if self._keepers:
            end = self._stamp(now)
            start = self._planned.popleft()
            self._tell(lambda keeper: keeper.committed(plan, start, end))

    def note_verified(self, plan: StepPlan, outcome: Outcome) -> None:
        """A step of requests that speculate ended; to be called before `note_committed`."""
        self._tell(lambda keeper: keeper.verified(plan, outcome))

    def note_transferred(self, transfers: list[RecordedTransfer], now: int) -> None:
        """The scheduler was told that transfers have ended."""
        if self._keepers:
            at = self._stamp(now)
            timed_transfers = [transfer._replace(told_ns=at) for transfer in transfers]
            self._tell(lambda keeper: keeper.transferred(timed_transfers))

    def note_ended(self, request: Request, at_ns: int | None = None) -> None:
        """A request ended: with what was noted last, where no time is given."""
        if self._keepers:
            generation = self._live.pop(request.index)[1]
            at = self._last if at_ns is None else at_ns
            self._tell(lambda keeper: keeper.ended(request, generation, at))

    def _stamp(self, now: int) -> int:
        self._last = max(now, self._last + 1)
        return self._last
