"""Proves that nothing is lost or shared by mistake: every block, count and index entry accounted for."""

from __future__ import annotations

from collections import Counter

from pagecast.sim.core.request import Request, State
from pagecast.sim.core.runs import Run
from pagecast.sim.core.scheduler import Scheduler


class Broken(AssertionError):
    """An invariant does not hold: a bug in the core, never in its input."""


class Checker:
    """Checks a scheduler as it runs: cheap invariants every step, all of them every `every` steps."""

    def __init__(self, scheduler: Scheduler, every: int = 1000) -> None:
        self.scheduler = scheduler
        self.every = every
        self.checks = 0
        self._steps = 0

    def after_step(self) -> None:
        """To be called after each commit."""
        self._steps += 1
        check_counts(self.scheduler)
        if self._steps % self.every == 0:
            check(self.scheduler)
            self.checks += 1


def check_counts(s: Scheduler) -> None:
    """O(1): the counts agree with each other."""
    limits, free = s.limits, s.pool.queue.count
    _hold(0 <= free <= limits.num_blocks, f"{free} free blocks of {limits.num_blocks}")
    live = len(s.running) + s.waiting.size + len(s.forks)
    _hold(live == len(s.requests), f"{live} requests running or waiting, {len(s.requests)} live")
    _hold(len(s.in_flight) <= limits.pipeline_depth + 1, f"{len(s.in_flight)} plans in flight")
    _hold(bool(s.requests) or free == limits.num_blocks, "blocks are held while no request lives")


def check(s: Scheduler) -> None:
    """Everything, in time linear in blocks and requests. Changes nothing. Errors: `Broken`.

    Each block is in one run; the free queue and the requests' tables cover each run exactly; holders are
    counted right; each published run is in the index under its key and nothing else is; decoding requests
    have the blocks that their position needs.
    """
    check_counts(s)
    free = _free_blocks(s)
    runs = _runs_held(s)
    _check_index(s)
    held: Counter[int] = Counter()
    for run in runs:
        for block in run.blocks[: run.owned()]:
            held[block] += 1
    twice = [block for block, count in held.items() if count > 1 or block in free]
    _hold(not twice, f"blocks {twice[:5]} are in two places")
    missing = set(range(s.limits.num_blocks)) - free - set(held)
    _hold(not missing, f"blocks {sorted(missing)[:5]} are lost")
    entries = sum(len(request.blocks()) for request in s.requests.values())
    shared = s.cache.shared_blocks
    _hold(shared == entries - s.cache.used_blocks, f"{shared} shared blocks, {entries} in all tables")
    for request in s.requests.values():
        _check_request(s, request)
    _hold(not (s.waiting.size and not s.running and s.blocked), "the queue is blocked and nothing runs")


def _free_blocks(s: Scheduler) -> set[int]:
    free: set[int] = set()
    total = 0
    seen: dict[int, list[tuple[int, int]]] = {}
    piece = s.pool.queue.ring.after
    while piece.run is not None:
        run = piece.run
        _hold(piece.after.before is piece, "the free queue's links are broken")
        _hold(0 <= piece.low < piece.high <= len(run.blocks), f"free piece {piece.low}..{piece.high}")
        _hold(run.owned() <= piece.low, "a free piece is held")
        _hold(run.free is not None and piece in run.free, "a run does not know its free piece")
        free.update(run.blocks[piece.low : piece.high])
        total += piece.high - piece.low
        seen.setdefault(id(run), []).append((piece.low, piece.high))
        if seen[id(run)][1:]:
            deeper, this = seen[id(run)][-2:]
            _hold(this[1] == deeper[0], "a run's free pieces are out of order")
        else:
            _hold(piece.high == len(run.blocks), "a run's deepest free piece is not at its end")
        piece = piece.after
    _hold(total == len(free) == s.pool.queue.count, f"{total} blocks queued, {s.pool.queue.count} counted")
    return free


def _runs_held(s: Scheduler) -> list[Run]:
    """The runs in the requests' tables; their holders are counted on the way."""
    readers: dict[int, Counter[int]] = {}
    writers: dict[int, int] = {}
    runs: dict[int, Run] = {}
    for request in s.requests.values():
        for run, length in request.table:
            part: Run | None = run
            end = run.start + length
            while part is not None and (part.writer is request if length < 0 else part.start < end):
                runs[id(part)] = part
                if length < 0:
                    writers[id(part)] = writers.get(id(part), 0) + 1
                else:
                    stop = end if part.rest is None else min(end, part.rest.start)
                    readers.setdefault(id(part), Counter())[stop - part.start] += 1
                part = part.rest
    for key, run in runs.items():
        _hold(dict(readers.get(key, {})) == (run.held or {}), f"readers of a run: {run.held}")
        _hold((run.writer is not None) == (writers.get(key, 0) == 1), "a run's writer is not its holder")
    return list(runs.values())


def _check_index(s: Scheduler) -> None:
    for key, first in s.pool.index.items():
        run: Run | None = first
        while run is not None:
            _hold(run.indexed and run.key == key, "an index entry points at another content")
            _hold(run.published <= len(run.blocks), "more published than there is")
            _hold(run.published > 0 or run.writer is not None, "an empty run is still in the index")
            run = run.next


def _check_request(s: Scheduler, request: Request) -> None:
    blocks = request.blocks()
    if request.state is State.DECODE and request not in s.parked:
        expected = s.cache.blocks_for(s.tick - request.lag)
    elif request.state in (State.DRAINING, State.DECODE) or (request.table and not s.profile.whole_prompt):
        expected = s.cache.blocks_for(request.computed)
    elif request.table:
        expected = s.cache.blocks_for(request.known)
    else:
        expected = 0
    _hold(len(blocks) == expected, f"{request!r} holds {len(blocks)} blocks, needs {expected}")
    _hold(len(set(blocks)) == len(blocks), f"{request!r} holds a block twice")
    for run, length in request.table:
        keys = request.keys
        if run.key is not None and length != 0 and not keys.explicit:
            _hold(run.key in keys.digests, f"{request!r} holds content that is not its own")


def _hold(condition: bool, message: str) -> None:
    if not condition:
        raise Broken(message)
