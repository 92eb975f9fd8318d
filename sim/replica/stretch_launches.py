"""Launch times of the steps of a stretch: each launch looks which transfers have ended."""

from __future__ import annotations

from bisect import bisect_left

from pagecast.sim.costs.decode_line import DecodeLine
from pagecast.sim.replica.arrivals import NEVER_NS
from pagecast.sim.replica.transfers import Ended, Transfers

_TRIED_FIRST = 3  # places: a transfer seldom takes longer


class StretchLaunches:
    """Launches of the decode steps of one stretch, whose first step has the number `step`.

    `depth` is the pipeline depth: step i of the stretch is planned when step i - 1 - depth ends. `times` are
    when the first step is launched, when a step is launched that is planned where the first one begins, and
    what each step takes beside its device time, all in nanoseconds.
    """

    def __init__(
        self,
        step: int,
        depth: int,
        line: DecodeLine,
        context: int,
        longest: int,
        times: tuple[int, int, int],
    ) -> None:
        self.step = step
        self._depth = depth
        self._line = line
        self._context = context
        self._longest = longest
        self._first, self._base, self._gap = times

    def launch_ns(self, place: int) -> int:
        """When a step is launched, by its place in the stretch, counted from 0."""
        if not place:
            return self._first
        before = place - self._depth
        return self._base + self._line.ns(self._context, self._longest, before) + self._gap * before

    def ends(self, transfers: Transfers, steps: int) -> list[tuple[int, Ended]]:
        """Takes the ends that the first `steps` steps report, each with the number of the step.

        A step reports what has ended by its launch.
        """
        taken: list[tuple[int, Ended]] = []
        while (end := transfers.next_ns) is not None:
            place, launched = self._first_after(end, steps)
            if place == steps:
                break
            done = transfers.ended(launched)
            assert done is not None
            taken.append((self.step + place, done))
        return taken

    def _first_after(self, end_ns: int, steps: int) -> tuple[int, int]:
        """The first place, of `steps`, whose step is launched at `end_ns` or later, and when it is launched.

        The place is `steps` where none is.
        """
        if self._first >= end_ns:
            return 0, self._first
        few = steps if steps < _TRIED_FIRST else _TRIED_FIRST
        for place in range(1, few):
            launched = self.launch_ns(place)
            if launched >= end_ns:
                return place, launched
        if few == steps:
            return steps, NEVER_NS
        place = bisect_left(range(steps), end_ns, few, key=self.launch_ns)
        return place, self.launch_ns(place) if place < steps else NEVER_NS
