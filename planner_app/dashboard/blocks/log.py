"""Log of a pool's block events as columns, from a replay or from any scheduler.

The core's event log says all but one thing: which blocks a cancellation withdraws, because the step that
was to fill them never ended. These are looked up in the core when it happens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from pagecast.planner_app.wording.kv_groups import group_and_blocks
from pagecast.sim.core.engines.sglang.memory import RadixMemory
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.events import Event, EventKind, run_length
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.replay.held_clients import clients_of
from pagecast.sim.replay.recorder import Recorder
from pagecast.sim.replay.served import alone
from pagecast.sim.replica.observer import Observer
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.replica.workload import TraceWorkload
from pagecast.sim.scenario import Scenario
from pagecast.traces.arrays import Floats, Ints
from pagecast.traces.schema import Trace

NOBODY = -1
_COLUMNS = 5  # of a row: step, kind, request, first block, group
_TOLD_EVERY = 20  # requests, of the progress
_SHOWN_BLOCKS, _MOST_BLOCKS = 60, 2048  # of a line of the log: characters for block numbers, blocks looked at


CODES = {kind: code for code, kind in enumerate(EventKind)}
"""The core's kinds of events as numbers, as `BlockLog.kind` holds them."""
WITHDRAWN = len(CODES)
"""Code of one more kind: published blocks that a cancellation took back. Their content was never computed."""
_KINDS: tuple[EventKind | None, ...] = (*EventKind, None)
_WORDS = [kind.name.lower().replace("_", " ") for kind in CODES] + ["withdrawn"]


@dataclass(frozen=True)
class BlockLog:
    """Event `i` came with step `step[i]`, to request number `request[i]`, on `blocks[start[i]:start[i + 1]]`.

    `group` is the KV group whose blocks these are, and `groups` describes each; empty where there is one.
    `kind` holds `CODES`, or `WITHDRAWN`; `detail` the words of the few events that have any. `time_s` is when
    each step was planned; None where no clock ran.
    """

    num_blocks: int
    block_size: int
    step: Ints
    kind: Ints
    request: Ints
    start: Ints
    blocks: Ints
    detail: dict[int, str]
    time_s: Floats | None = None
    group: Ints | None = None
    groups: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.step)

    def kind_of(self, index: int) -> EventKind | None:
        """The kind of an event; None for a withdrawal."""
        return _KINDS[int(self.kind[index])]

    def of(self, index: int) -> Ints:
        """The blocks of an event."""
        return self.blocks[self.start[index] : self.start[index + 1]]

    def line(self, index: int, name: Callable[[int], str], *, with_blocks: bool = True) -> str:
        """An event as text: `12 allocated r7 100-131 (32 blocks)`; `name` names request numbers."""
        blocks = self.of(index) if with_blocks else self.blocks[:0]
        request = int(self.request[index])
        words = [str(self.step[index]), _WORDS[self.kind[index]]]
        if request != NOBODY:
            words.append(name(request))
        if self.group is not None and self.group[index]:
            words.append(f"group {self.group[index]}")
        if len(blocks):
            words.append(_blocks(blocks))
        if index in self.detail:
            words.append(self.detail[index])
        return " ".join(words)


def _blocks(blocks: Ints) -> str:
    text = run_length(tuple(blocks[:_MOST_BLOCKS].tolist()))
    if len(text) > _SHOWN_BLOCKS or len(blocks) > _MOST_BLOCKS:
        text = text[:_SHOWN_BLOCKS].rpartition(",")[0] or text[:_SHOWN_BLOCKS]
        text += ",…"
    return f"{text} ({len(blocks):,} blocks)" if len(blocks) > 1 else text


@dataclass
class Collector(Observer):
    """Empties a scheduler's log into columns. `number` gives a request's number from its id.

    `take` must be called before blocks that a cancellation freed are given out again, to know which of
    them were withdrawn; what is given out again needs no such knowledge.
    """

    scheduler: Scheduler
    number: Callable[[str], int]
    _rows: array[int] = field(default_factory=lambda: array("q"))
    _blocks: array[int] = field(default_factory=lambda: array("i"))
    _detail: dict[int, str] = field(default_factory=dict)
    _findable: set[int] = field(default_factory=set)  # what the log so far says can be found

    def step(self, plan: StepPlan, outcome: Outcome, start_ns: int, end_ns: int) -> None:
        """Notes what has happened up to the end of a step."""
        self.take()

    def take(self) -> None:
        """Notes what has happened since the last call."""
        events = self.scheduler.events
        assert events is not None
        if not events:
            return
        cancelled = False
        for event in events:
            self._note(event)
            cancelled |= event.kind is EventKind.CANCELLED
        if cancelled:
            self._note_withdrawn(events)
        events.clear()

    def _note(self, event: Event) -> None:
        request = self.number(event.request) if event.request else NOBODY
        self._append(event.step, CODES[event.kind], request, event.blocks, event.detail, event.group)
        if event.kind is EventKind.STORED:
            self._findable.update(event.blocks)
        elif event.kind in (EventKind.EVICTED, EventKind.ALLOCATED):
            self._findable.difference_update(event.blocks)

    def _append(
        self, step: int, kind: int, request: int, blocks: tuple[int, ...], detail: str, group: int = 0
    ) -> None:
        if detail:
            self._detail[len(self._rows) // _COLUMNS] = detail
        self._rows.extend((step, kind, request, len(self._blocks), group))
        self._blocks.extend(blocks)

    def _note_withdrawn(self, events: list[Event]) -> None:
        """Notes the blocks that the log has as findable and that the core no longer finds."""
        withdrawals = self._findable - findable(self.scheduler)
        if withdrawals:
            self._findable -= withdrawals
            self._append(events[-1].step, WITHDRAWN, NOBODY, tuple(sorted(withdrawals)), "")

    def log(self, time_s: Callable[[Ints], Floats] | None = None) -> BlockLog:
        """All that was taken. `time_s` gives the seconds at which steps were planned."""
        rows = np.array(self._rows, np.int64).reshape(-1, _COLUMNS)
        limits = self.scheduler.limits
        start = np.append(rows[:, 3], len(self._blocks))
        steps = rows[:, 0].copy()
        return BlockLog(
            limits.num_blocks,
            limits.block_size,
            steps,
            rows[:, 1].copy(),
            rows[:, 2].copy(),
            start,
            np.array(self._blocks, np.int64),
            dict(self._detail),
            time_s(steps) if time_s else None,
            rows[:, 4].copy() if limits.groups else None,
            tuple(group_and_blocks(group) for group in limits.groups),
        )


def findable(scheduler: Scheduler) -> set[int]:
    """The blocks whose content the prefix index knows."""
    return scheduler.memory.findable_blocks()


def record(
    trace: Trace, scenario: Scenario, progress: Callable[[tuple[int, int, str]], None] | None = None
) -> BlockLog:
    """Replays `trace` as `replay` does, and keeps what happened to every block.

    Errors: BadInput for a scenario that can't be used.
    """
    spec = ReplicaSpec.of(scenario, TraceWorkload(trace))
    scheduler = spec.scheduler(log=True)
    if isinstance(scheduler.memory, RadixMemory):
        raise BadInput(
            f"{scenario.profile.label} keeps a radix tree, whose pages have no numbers, so there is "
            "no map of blocks; choose another engine"
        )
    collector, recorder = Collector(scheduler, int), Recorder(keep_steps=True)
    served = alone(trace, spec, clients_of(trace), recorder, scheduler)
    served.replica.observe(collector)
    if progress is not None:
        served.replica.observe(_Progress(len(trace), progress))
    served.replica.env.run()
    collector.take()
    return collector.log(_clock(recorder))


class _Progress(Observer):
    """Tells now and then how many of `most` requests have ended."""

    def __init__(self, most: int, tell: Callable[[tuple[int, int, str]], None]) -> None:
        self._ended = 0
        self._most = most
        self._tell = tell

    def ended(self, request: Request, now: int) -> None:
        """Counts a request."""
        self._ended += 1
        if not self._ended % _TOLD_EVERY:
            self._tell((self._ended, self._most, "requests replayed"))


def _clock(recorder: Recorder) -> Callable[[Ints], Floats]:
    """When a step was planned, in seconds; within steps that were made as one, in proportion."""
    table = recorder.steps()
    first, count, start, end = (table[name].to_numpy() for name in ("step", "steps", "start_ns", "end_ns"))

    def time_s(steps: Ints) -> Floats:
        if not len(first):
            return np.zeros(len(steps))
        row = np.clip(np.searchsorted(first, steps, "right") - 1, 0, None)
        share = np.clip((steps - first[row]) / count[row], 0.0, 1.0)
        return np.asarray((start[row] + share * (end[row] - start[row])) / 1e9, np.float64)

    return time_s
