"""Flights: plans under way on a simulated device, and their times."""

from __future__ import annotations

from pagecast.sim.costs.step_costs import DecodeLine


class Flight:
    """A plan on the device. The host planned it at `start_ns` and launched it by `launched_ns`.

    `free_ns`: when the host may plan the next step. `end_ns`: when the device is done. All in nanoseconds.
    """

    __slots__ = ("end_ns", "free_ns", "launched_ns", "start_ns")

    def __init__(self, start_ns: int, launched_ns: int, end_ns: int) -> None:
        self.start_ns = start_ns
        self.launched_ns = launched_ns
        self.free_ns = launched_ns
        self.end_ns = end_ns


class Stretch(Flight):
    """A row of decode steps, which can be made shorter.

    `line` is the device time of a step by its context, `context` and `longest` that of the first step. The
    first step begins at `base_ns`, and each takes `gap_ns` more than its device time: the host's time (at
    depth 0), less what requests save one another by sharing blocks. At depth 1 (`ahead`) the first step is
    planned before `base_ns`, and each other one when the step before its predecessor ends.
    """

    __slots__ = ("ahead", "base_ns", "context", "gap_ns", "line", "longest")

    def __init__(
        self,
        start_ns: int,
        host_ns: int,
        base_ns: int,
        line: DecodeLine,
        context: int,
        longest: int,
        gap_ns: int,
        ahead: bool,
    ) -> None:
        super().__init__(start_ns, start_ns + host_ns, 0)
        self.base_ns = base_ns
        self.line = line
        self.context = context
        self.longest = longest
        self.gap_ns = gap_ns
        self.ahead = ahead

    def begun(self, until: int, most: int) -> int:
        """How many of `most` steps are planned before `until`; at least one."""
        within = until - self.base_ns
        if not self.ahead:
            return self.line.steps_begun(self.context, self.longest, within, most, self.gap_ns)
        if within <= 0 or most == 1:
            return 1
        return 1 + self.line.steps_begun(self.context, self.longest, within, most - 1, self.gap_ns)

    def set_steps(self, steps: int) -> None:
        """Sets the times of a stretch of `steps` steps."""
        line = self.line
        self.end_ns = self.base_ns + line.ns(self.context, self.longest, steps) + self.gap_ns * steps
        if self.ahead:
            before = steps - 1
            planned = self.base_ns + line.ns(self.context, self.longest, before) + self.gap_ns * before
            self.free_ns = max(self.launched_ns, planned)
