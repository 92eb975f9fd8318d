"""One block at one moment: who holds it, since when, what it contains, and the chain of keys behind that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from pagecast.planner_app.dashboard.blocks.frames import Frames, Look
from pagecast.planner_app.dashboard.blocks.log import CODES, NOBODY, WITHDRAWN, BlockLog
from pagecast.sim.core.events import EventKind
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.identity.scope import Scope
from pagecast.traces.arrays import Ints

_ENDS = (
    CODES[EventKind.FREED],
    CODES[EventKind.PREEMPTED],
    CODES[EventKind.FINISHED],
    CODES[EventKind.CANCELLED],
)
_ENDS_OF_HYBRID = (CODES[EventKind.PREEMPTED], CODES[EventKind.FINISHED], CODES[EventKind.CANCELLED])
_GAINS = (CODES[EventKind.ALLOCATED], CODES[EventKind.REUSED])
_LOSSES = (CODES[EventKind.ALLOCATED], CODES[EventKind.EVICTED], WITHDRAWN)


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One block of a chain: its number in the sequence, its key, the pool's block, and whether that still
    has this content."""

    position: int
    key: str
    block: int
    there: bool


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """A block after frame `frame`. Times in steps and, where a clock ran, seconds.

    `writer` filled it (-1: nobody yet), as its block number `position`; `chain` begins at the root. `events`
    are indices into the log. With several KV groups `group` describes the block's own, and there is neither
    position (-1) nor chain: block tables of windows have gaps that the log does not tell.
    """

    block: int
    look: Look
    owners: tuple[int, ...]
    writer: int
    position: int
    age_steps: int
    age_s: float | None
    idle_steps: int
    scope: str
    scope_digest: str
    chain: tuple[ChainLink, ...]
    events: tuple[int, ...]
    group: str = ""


def facts(
    frames: Frames, frame: int, block: int, keys: Callable[[int], BlockKeys], scope: Callable[[int], Scope]
) -> BlockFacts:
    """The facts of a block. `keys` and `scope` give those of a request by its number."""
    log, until = frames.log, int(frames.first[frame + 1])
    events = _events_of(log, block, until)
    look = Look(int(frames.picture(frame)[block]) & 7)
    written = [index for index in events if log.kind[index] == CODES[EventKind.ALLOCATED]]
    step = int(frames.step[frame])
    if not written:
        return BlockFacts(block, look, (), NOBODY, -1, 0, None, 0, "", "", (), ())
    last = written[-1]
    writer = int(log.request[last])
    own = scope(writer)
    times = log.time_s
    position = -1
    links: tuple[ChainLink, ...] = ()
    group = ""
    if log.group is None or len(log.groups) < 2:
        table, gained = _table(log, writer, last, until)
        position = int(np.flatnonzero(table == block)[0])
        if look is not Look.FREE:
            links = _links(log, keys(writer), table, gained, position, until)
    else:
        number = int(log.group[last])
        group = f"group {number}: {log.groups[number]}"
    return BlockFacts(
        block,
        look,
        _owners(log, events, until),
        writer,
        position,
        step - int(log.step[last]),
        None if times is None else float(times[until - 1] - times[last]),
        step - int(log.step[events[-1]]),
        _words(own),
        own.digest.hex(),
        links,
        tuple(events),
        group,
    )


def _events_of(log: BlockLog, block: int, until: int) -> list[int]:
    places = np.flatnonzero(log.blocks[: log.start[until]] == block)
    events: list[int] = (np.searchsorted(log.start, places, "right") - 1).tolist()
    return events


def _owners(log: BlockLog, events: list[int], until: int) -> tuple[int, ...]:
    """Who was given the block and has not let go of it."""
    owners: dict[int, None] = {}
    for index in events:
        request = int(log.request[index])
        if log.kind[index] in _GAINS and not _ended(log, request, index, until):
            owners[request] = None
        elif log.kind[index] == CODES[EventKind.LEFT]:
            owners.pop(request, None)
    return tuple(owners)


def _ended(log: BlockLog, request: int, after: int, until: int) -> bool:
    between = slice(after + 1, until)
    ends = _ENDS if len(log.groups) < 2 else _ENDS_OF_HYBRID
    return bool(np.any((log.request[between] == request) & np.isin(log.kind[between], ends)))


def _table(log: BlockLog, request: int, index: int, until: int) -> tuple[Ints, Ints]:
    """A request's blocks in order, as far as it got with the admission that event `index` belongs to, and
    the event that gave it each."""
    own = np.flatnonzero(log.request[:until] == request)
    admitted = own[(own <= index) & (log.kind[own] == CODES[EventKind.ADMITTED])][-1]
    ends = own[(own > index) & np.isin(log.kind[own], _ENDS)]
    last = int(ends[0]) if len(ends) else until
    gains = own[(own > admitted) & (own < last) & np.isin(log.kind[own], _GAINS)]
    blocks = [log.of(int(gain)) for gain in gains]
    return np.concatenate(blocks), np.repeat(gains, [len(part) for part in blocks])


def _links(
    log: BlockLog, keys: BlockKeys, table: Ints, gained: Ints, position: int, until: int
) -> tuple[ChainLink, ...]:
    chain, since = table[: position + 1], gained[: position + 1]
    begin = int(since.min()) + 1
    losses = np.flatnonzero(np.isin(log.kind[begin:until], _LOSSES)) + begin
    counts = log.start[losses + 1] - log.start[losses]
    losers = np.concatenate([log.of(int(loss)) for loss in losses]) if len(losses) else np.empty(0, np.int64)
    when = np.repeat(losses, counts)
    latest = np.full(log.num_blocks, -1, np.int64)
    latest[losers] = when  # ascending: the last one stays
    links = []
    for number, (block, event) in enumerate(zip(chain.tolist(), since.tolist(), strict=True)):
        links.append(ChainLink(number, _key(keys, number), block, int(latest[block]) <= event))
    return tuple(links)


def _key(keys: BlockKeys, number: int) -> str:
    try:
        return keys.block_key(number).hex()
    except IndexError:
        return ""


def _words(scope: Scope) -> str:
    parts = [f"{name} {value}" for name in scope.__dataclass_fields__ if (value := getattr(scope, name))]
    return ", ".join(parts) or "the default one"
