"""A log of block events as pictures of the pool: a frame per step, of which only what changed is kept.

A block's picture is one whole number: what it is (`Look`) in the low three bits, and above them whose:
the request that holds it, the request that wrote it (cached), or how many hold it (shared).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from pagecast.planner_app.dashboard.blocks.log import NOBODY, BlockLog
from pagecast.sim.core.events import EventKind
from pagecast.traces.arrays import Floats, Ints

Int32s = npt.NDArray[np.int32]
WHOSE = 3  # bits below the request's number
MOST_EVENTS = 60_000  # of a part: what a browser is sent at once


class Look(IntEnum):
    """The state of a block at one moment, as the grid shows it."""

    FREE = 0  # holds nothing that anybody could find
    CACHED = 1  # nobody's, its content still to be found
    REQUEST = 2  # one request's, full
    TAIL = 3  # one request's last, not yet full: the rest of it is wasted for now
    SHARED = 4  # several requests'
    LOADING = 5  # one request's, being filled from host memory


@dataclass(frozen=True)
class Frames:
    """Frame `f` is the pool after all events of step `step[f]`: events `first[f]` to `first[f + 1]`.

    From one frame to the next, blocks `changes[i, 0]` to `changes[i, 0] + changes[i, 1]` become
    `changes[i, 2]`, for `i` from `change[f]` to `change[f + 1]`. Parts begin at frames `parts`, with the
    pictures `before` (one per part, int32 of `num_blocks`).
    """

    log: BlockLog
    step: Ints
    first: Ints
    changes: Int32s
    change: Ints
    parts: tuple[int, ...]
    before: tuple[Int32s, ...]

    def __len__(self) -> int:
        return len(self.step)

    @property
    def time_s(self) -> Floats | None:
        """When the step of each frame was planned."""
        return None if self.log.time_s is None else self.log.time_s[self.first[:-1]]

    def part_of(self, frame: int) -> int:
        """The part in which a frame lies."""
        return max(int(np.searchsorted(self.parts, frame, "right")) - 1, 0)

    def span(self, part: int) -> tuple[int, int]:
        """First frame of a part, and the one after its last."""
        end = self.parts[part + 1] if part + 1 < len(self.parts) else len(self)
        return self.parts[part], end

    def picture(self, frame: int) -> Int32s:
        """The whole pool at a frame."""
        part = self.part_of(frame)
        begin = self.parts[part]
        cells = self.before[part].copy()
        for at, length, value in self.changes[self.change[begin] : self.change[frame + 1]].tolist():
            cells[at : at + length] = value
        return cells


class _Pool:
    """Who holds what, brought forward event by event.

    `tables` has what each request was given in each group. With several groups a request gives blocks back
    before it ends (`LEFT`); then `FREED` tells nothing new.
    """

    def __init__(self, num_blocks: int, *, hybrid: bool) -> None:
        self.hybrid = hybrid
        self.holders = np.zeros(num_blocks, np.int64)
        self.whose = np.zeros(num_blocks, np.int64)  # sum of the holders' numbers, each plus one
        self.writer = np.full(num_blocks, NOBODY, np.int64)
        self.indexed = np.zeros(num_blocks, bool)
        self.tail = np.zeros(num_blocks, bool)
        self.loading = np.zeros(num_blocks, bool)
        self.tables: dict[int, dict[int, list[Ints]]] = {}

    def apply(self, kind: EventKind | None, request: int, blocks: Ints, group: int) -> Ints:
        """Takes an event in; `kind` None: a withdrawal. Returns the blocks that may look different now."""
        if kind is EventKind.ALLOCATED:
            return self._allocate(request, blocks, group)
        if kind is EventKind.STORED:
            self.indexed[blocks] = True
            self.tail[blocks] = False
        elif kind is EventKind.REUSED:
            self._hold(request, blocks, group)
        elif kind is EventKind.LOADING:
            self.loading[blocks] = True
        elif kind is EventKind.LOADED:
            return self._loaded(request)
        elif kind is EventKind.LEFT:
            self._leave(request, blocks, group)
        elif kind is EventKind.FREED and self.hybrid:
            return blocks
        elif kind in (EventKind.EVICTED, None):
            self.indexed[blocks] = False
        elif kind in (
            EventKind.FREED,
            EventKind.PREEMPTED,
            EventKind.FINISHED,
            EventKind.CANCELLED,
        ):
            return self._drop(request)
        return blocks

    def _hold(self, request: int, blocks: Ints, group: int) -> None:
        self.holders[blocks] += 1
        self.whose[blocks] += request + 1
        self.tables.setdefault(request, {}).setdefault(group, []).append(blocks)

    def _leave(self, request: int, blocks: Ints, group: int) -> None:
        """Takes blocks from a request that goes on."""
        self.holders[blocks] -= 1
        self.whose[blocks] -= request + 1
        self.tail[blocks] = False
        table = self.tables[request][group]
        self.tables[request][group] = [part[~np.isin(part, blocks)] for part in table]

    def _loaded(self, request: int) -> Ints:
        blocks = self._all(request)
        self.loading[blocks] = False
        return blocks

    def _all(self, request: int) -> Ints:
        """Every block of a request, group by group."""
        parts = [part for table in self.tables.get(request, {}).values() for part in table]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _allocate(self, request: int, blocks: Ints, group: int) -> Ints:
        before = [part for part in self.tables.get(request, {}).get(group, []) if len(part)]
        touched = blocks if not before else np.append(blocks, before[-1][-1])
        self._hold(request, blocks, group)
        self.tail[touched] = False
        self.tail[blocks[-1]] = True
        self.writer[blocks] = request
        self.indexed[blocks] = False
        return touched

    def _drop(self, request: int) -> Ints:
        blocks = self._all(request)
        self.tables.pop(request, None)
        self.holders[blocks] -= 1
        self.whose[blocks] -= request + 1
        self.tail[blocks] = False
        self.loading[blocks] = False
        return blocks

    def picture(self, blocks: Ints) -> Ints:
        """The look of these blocks: its kind, with the request or the number of holders."""
        holders = self.holders[blocks]
        look = np.where(self.tail[blocks], Look.TAIL, Look.REQUEST)
        look = np.where(self.loading[blocks], Look.LOADING, look)
        one_holder = look | (self.whose[blocks] - 1) << WHOSE
        idle = np.where(self.indexed[blocks], Look.CACHED | self.writer[blocks] << WHOSE, Look.FREE)
        return np.where(
            holders == 0, idle, np.where(holders == 1, one_holder, Look.SHARED | holders << WHOSE)
        )


def frames(log: BlockLog, progress: Callable[[tuple[int, int, str]], None] | None = None) -> Frames:
    """The pictures that a log tells."""
    pool = _Pool(log.num_blocks, hybrid=len(log.groups) > 1)
    begins = np.flatnonzero(np.diff(log.step, prepend=-1)) if len(log) else np.empty(0, np.int64)
    first = np.append(begins, len(log))
    states = np.zeros(log.num_blocks, np.int32)
    changes: list[Int32s] = []
    change = np.zeros(len(begins) + 1, np.int64)
    parts, before, until = [0], [states.copy()], MOST_EVENTS
    requests = log.request.tolist()
    groups = [0] * len(log) if log.group is None else log.group.tolist()
    for frame in range(len(begins)):
        if first[frame + 1] > until and frame > parts[-1]:
            parts.append(frame)
            before.append(states.copy())
            until = int(first[frame]) + MOST_EVENTS
            if progress is not None:
                progress((int(first[frame]), len(log), "events drawn"))
        events = range(first[frame], first[frame + 1])
        touched = [
            pool.apply(log.kind_of(event), requests[event], log.of(event), groups[event]) for event in events
        ]
        difference = _changes(pool, states, np.unique(np.concatenate(touched)))
        changes.append(difference)
        change[frame + 1] = change[frame] + len(difference)
    flat = np.concatenate(changes) if changes else np.empty((0, 3), np.int32)
    return Frames(log, log.step[begins], first, flat, change, tuple(parts), tuple(before))


def _changes(pool: _Pool, states: Int32s, blocks: Ints) -> Int32s:
    """Rows (first block, how many, picture) of what differs from `states`, which is brought up to date."""
    now = pool.picture(blocks).astype(np.int32)
    differs = now != states[blocks]
    blocks, now = blocks[differs], now[differs]
    if not len(blocks):
        return np.empty((0, 3), np.int32)
    states[blocks] = now
    breaks = np.flatnonzero((np.diff(blocks) != 1) | (np.diff(now) != 0)) + 1
    at = np.concatenate([[0], breaks])
    lengths = np.diff(np.append(at, len(blocks)))
    return np.stack([blocks[at], lengths, now[at]], axis=1).astype(np.int32)
