"""Device times of asynchronous runs: from the end of one step to the end of the next.

A step that is planned while the one before it runs begins on the device when that one ends. From one end to
the next is then what the device takes for it, and nothing of the host's: two recordings of one sweep agree in
these times to 0.1%, where those of synchronous steps lie up to 3% apart (H200, Qwen3-8B).

While the host launches kernels one by one, it does not see the end of the step before. It sees that end only
after the launch, so the ends of these steps are recorded late. Such steps form a group: the time of the group
is known, the time of each step in it is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.fitting.features import StepTable, launched_singly
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.traces.arrays import Flags, Floats, Ints

_SHORTEST = 5.0  # percentile of the waits for an end during a launch: taken as the time of a launch
_DEAF = 1.5  # times the launch: an end seen within this may have been recorded late
_FEW = 10  # steps, fewer of which do not show a launch
_CLEARLY = 1.2  # times the wait of other light steps: a launch must take longer than that to be seen


@dataclass(frozen=True)
class AheadSteps:
    """Steps planned ahead, in groups.

    `recording` numbers the recording as the fit's synchronous runs are numbered; those without one come last.
    `table` holds the steps, `group` the number of each one's group, `ns` every group's time from the end
    of the step before it to its own end. `launch_ns`: what launching a step kernel by kernel takes; 0 where
    too few show it.
    """

    recording: int
    table: StepTable
    group: Ints
    ns: Floats
    launch_ns: float

    def summed(self, values: Floats) -> Floats:
        """Rows of one value or more a step, summed over each group."""
        total = np.zeros((len(self.ns), *values.shape[1:]))
        np.add.at(total, self.group, values)
        return total

    def most(self, values: Ints) -> Ints:
        """The greatest of whole numbers, one per step, in each group."""
        greatest = np.zeros(len(self.ns), np.int64)
        np.maximum.at(greatest, self.group, values)
        return greatest

    def without(self, load: str) -> AheadSteps:
        """The groups of all segments but those of this load (see `load_of`)."""
        table = self.table
        in_load = np.array([load_of(name) == load for name in table.segments])
        return self._of(~self.most(in_load[table.segment].astype(np.int64)).astype(bool))

    def _of(self, selection: Flags) -> AheadSteps:
        steps = np.flatnonzero(selection[self.group])
        number = np.cumsum(selection) - 1
        return replace(
            self, table=self.table.take(steps), group=number[self.group[steps]], ns=self.ns[selection]
        )


def load_of(segment: str) -> str:
    """The load of a sweep's segment, which is recorded at both pipeline depths: `long` of `long-sync`."""
    return segment.rpartition("-")[0] or segment


def ahead_of(run: RecordedRun, table: StepTable, shape: TileShape, recording: int) -> AheadSteps:
    """The groups of an asynchronous run's steps whose times are known."""
    steps, size = run.steps, len(run.steps)
    in_table = np.zeros(size, bool)
    in_table[table.index] = True
    singly = np.zeros(size, bool)
    singly[table.index] = launched_singly(table, shape)
    early = steps.start_ns[1:] < steps.end_ns[:-1]
    ahead = np.append(False, early & (steps.section[1:] == steps.section[:-1]))
    light = ahead[1:] & in_table[:-1] & ~singly[:-1]
    launch_ns, late = _late(steps.end_ns[:-1] - steps.start_ns[1:], singly[1:] & ahead[1:], light)
    begins = np.append(True, ~late)
    first = np.flatnonzero(begins)
    last = np.append(first[1:] - 1, size - 1)
    sound = np.logical_and.reduceat(in_table & ahead, first) & (first > 0)
    ns = (steps.end_ns[last] - steps.end_ns[np.maximum(first - 1, 0)]).astype(np.float64)
    # A step with prompts that is not known may have kept the host from hearing of the end before it.
    prompts = np.diff(steps.prefill_start) > 0
    sound &= (ns > 0) & ~np.append((ahead & prompts & ~in_table)[1:], False)[last]
    whole = AheadSteps(recording, table, (np.cumsum(begins) - 1)[table.index], ns, launch_ns)
    return whole._of(sound)


def _late(waited_ns: Ints, launching: Flags, light: Flags) -> tuple[float, Flags]:
    """Nanoseconds of a launch (0: too few steps show it), and which steps' ends it made the host record late.

    `waited_ns`: from the start of the next step to the recorded end of a step. `launching`: the next step was
    launched kernel by kernel. `light` steps take less device time than a launch, so that their wait is the
    launch; the wait of other steps is device time.
    """
    visible, plain = launching & light, light & ~launching
    if visible.sum() < _FEW or plain.sum() < _FEW:
        return 0.0, launching
    least = float(np.percentile(waited_ns[visible], _SHORTEST))
    if least < _CLEARLY * float(np.median(waited_ns[plain])):
        return 0.0, launching
    late = launching & (waited_ns < _DEAF * least)
    return float(np.median(waited_ns[late & light])), late
