"""Event log: what happened to blocks and requests, in order. Simulator and engine write equal lines.

An event names its step (the number of the plan being made, or of the next one between plans), so that
logs made on different clocks can be compared. Blocks come in lists: one event for all blocks of one act.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from pagecast.sim.core.kv_events import KvEventStream


class EventKind(Enum):
    """Kinds of events. The first eight are about blocks, those of jobs about transfers to and from host
    memory, the rest about requests."""

    ALLOCATED = "allocated"  # blocks given to a request to fill
    STORED = "stored"  # full blocks published: others may reuse them
    REUSED = "reused"  # cached blocks given to a request that found them
    COPIED = "copied"  # the first block over the second, so that a fork may go on in it
    EVICTED = "evicted"  # cached content given up for its space
    REVERTED = "reverted"  # free blocks whose retention priority has ended
    FREED = "freed"  # blocks no request holds any more
    LEFT = "left"  # blocks that a request gives back because no layer of their group reads them any more
    ADMITTED = "admitted"
    PREEMPTED = "preempted"
    SWAPPED_OUT = "swapped out"  # the KV of a preempted request goes to host memory
    SWAPPED_IN = "swapped in"
    LOADING = "loading"  # blocks to be filled from host memory by the job in `detail`
    LOADED = "loaded"  # that job has ended
    STORING = "storing"  # blocks to be copied to host memory by the job in `detail`
    OFFLOADED = "offloaded"  # that job has ended
    PROMOTING = "promoting"  # blocks to be brought from disk to host memory by the job in `detail`
    PROMOTED = "promoted"  # that job has ended
    CASCADING = "cascading"  # blocks to be copied from host memory to disk by the job in `detail`
    CASCADED = "cascaded"  # that job has ended
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class Event(NamedTuple):
    """One line of the log. `request` is empty for evictions; `detail` is a reason or a count of tokens.

    `group` is the number of the KV group whose blocks these are (0 for evictions: see what stored them).
    """

    step: int
    kind: EventKind
    request: str
    blocks: tuple[int, ...] = ()
    detail: str = ""
    group: int = 0

    def line(self) -> str:
        """The event as text, blocks run-length coded: `12 allocated r7 100-131,40`."""
        parts = [str(self.step), self.kind.value, self.request or "-"]
        if self.blocks:
            parts.append(run_length(self.blocks))
        if self.group:
            parts.append(f"group={self.group}")
        if self.detail:
            parts.append(self.detail)
        return " ".join(parts)


class EventLog:
    """The log of one replica. `events` is None where no log is kept; whoever reads the list empties it.

    `kv`: who is told which contents can be found (see `kv_events.py`). With it blocks are published step by
    step, as for a log; where no log is wanted as well, `events` stays empty.
    """

    def __init__(self, *, enabled: bool, kv: KvEventStream | None = None) -> None:
        self.events: list[Event] | None = [] if enabled else None
        if kv is not None and not enabled:
            self.events = []
        self._enabled = enabled
        self.kv = kv
        self.step = 0  # the number of the next plan, which new events carry
        if kv is not None:
            kv.counter = self

    def add(
        self,
        kind: EventKind,
        request: str,
        blocks: list[int] | None = None,
        detail: str = "",
        group: int = 0,
    ) -> None:
        """Adds one event, where a log is kept."""
        if self.events is not None and self._enabled:
            self.events.append(Event(self.step, kind, request, tuple(blocks or ()), detail, group))


def run_length(blocks: tuple[int, ...]) -> str:
    """Block numbers as ranges: ascending `a-b`, descending `a~b`, single `a`, joined by commas."""
    if len(blocks) == 1:
        return str(blocks[0])
    pieces: list[str] = []
    i, n = 0, len(blocks)
    while i < n:
        j = i + 1
        step = blocks[j] - blocks[i] if j < n and abs(blocks[j] - blocks[i]) == 1 else 0
        while step and j + 1 < n and blocks[j + 1] - blocks[j] == step:
            j += 1
        if step:
            pieces.append(f"{blocks[i]}{'-' if step > 0 else '~'}{blocks[j]}")
            i = j + 1
        else:
            pieces.append(str(blocks[i]))
            i += 1
    return ",".join(pieces)
