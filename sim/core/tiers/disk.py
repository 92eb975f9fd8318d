"""Disk behind the host tier: what has a file, what moves between host and disk, and what was asked for.

As in vLLM's file-system tier a disk has room for everything. Questions are answered by the next step, and the
answer to a request's question stands until the request has ended, whatever happens to the disk meanwhile.

Source: vllm/v1/kv_offload/tiering (0.24): async_lookup.py, fs/manager.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pagecast.sim.core.request import Request


class DiskJob(NamedTuple):
    """A job between host and disk. A promotion brings blocks to the host; a cascade copies them to disk.

    `names`: of the blocks; `slots`: theirs in the host. `moved`: how many of them are read or written: a
    promotion leaves out those whose file is gone, a cascade those that have a file, or get one.
    """

    number: int
    request: Request
    is_promotion: bool
    names: tuple[int, ...]
    slots: tuple[int, ...]
    moved: int


class DiskLookups:
    """Questions whether blocks have a file. `open` are those asked in this step, answered with its end."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self._answers: dict[int, bool | None] = {}
        self._askers: dict[int, set[Request]] = {}
        self._queries: dict[Request, set[int]] = {}

    def ask(self, name: int, request: Request) -> bool | None:
        """Whether a block has a file; None: that is known by the next step."""
        if name not in self._answers:
            self._answers[name] = None
            self._askers[name] = set()
            self.open.append(name)
        self._askers[name].add(request)
        self._queries.setdefault(request, set()).add(name)
        return self._answers[name]

    def answer(self, on_disk: set[int]) -> bool:
        """Answers what is open. False: nothing was."""
        if not self.open:
            return False
        for name in self.open:
            if name in self._answers:
                self._answers[name] = name in on_disk
        self.open = []
        return True

    def miss(self, names: Iterable[int]) -> None:
        """Blocks could not be read: whoever asked for them is told that they have no file."""
        for name in names:
            if self._answers.get(name) is not None:
                self._answers[name] = False

    def askers(self) -> set[Request]:
        """The requests whose questions, open or answered, are remembered."""
        return set(self._queries)

    def forget(self, request: Request) -> None:
        """A request asks no more: answers that only it had asked for are forgotten."""
        for name in self._queries.pop(request, ()):
            askers = self._askers[name]
            askers.discard(request)
            if not askers:
                del self._askers[name], self._answers[name]


class Disk:
    """The disk of one replica. `stored` are the blocks that have a file.

    `jobs` are those whose end the scheduler has not taken note of; `submitted` those that whoever runs them
    has not taken yet. `asked`: the last step asked for blocks, so the next one may decide otherwise.
    """

    def __init__(self) -> None:
        self.stored: set[int] = set()
        self.lookups = DiskLookups()
        self.jobs: dict[int, DiskJob] = {}
        self.submitted: list[DiskJob] = []
        self.asked = False
        self.promoted_blocks = 0
        self.cascaded_blocks = 0
        self.lost_stores = 0
        self.lost_promotions = 0
        self._coming: set[int] = set()  # blocks that cascades under way write
        self._endings: deque[tuple[int, bool]] = deque()
        self._numbers = 0

    @property
    def busy(self) -> bool:
        """Whether a job is under way or its end not taken note of, or a question open."""
        return bool(self.jobs or self.lookups.open or self.asked)

    @property
    def has_news(self) -> bool:
        """Whether the next step may learn something: an answer, or that a job has ended."""
        return self.asked or bool(self._endings)

    def names(self) -> Iterator[int]:
        """Every name that has a file, gets one, or is read."""
        yield from self.stored
        for job in self.jobs.values():
            yield from job.names

    def begin(
        self, request: Request, names: Iterable[int], slots: Iterable[int], *, promotion: bool
    ) -> DiskJob:
        """Makes a job, for whoever runs it to take."""
        names = tuple(names)
        if promotion:
            count = sum(name in self.stored for name in names)
        else:
            new = [name for name in names if name not in self.stored and name not in self._coming]
            self._coming.update(new)
            count = len(new)
        job = DiskJob(self._numbers, request, promotion, names, tuple(slots), count)
        self._numbers += 1
        self.jobs[job.number] = job
        self.submitted.append(job)
        if promotion:
            self.promoted_blocks += count
        else:
            self.cascaded_blocks += count
        return job

    def take_submitted(self) -> list[DiskJob]:
        """The jobs made since this was asked last, to be run in this order in each direction."""
        submitted = self.submitted
        self.submitted = []
        return submitted

    def end(self, number: int, *, lost: bool = False) -> None:
        """A job is done: what it wrote has a file. The scheduler takes note of it when it looks next.

        `lost`: nothing could be read, and the files are removed; or nothing was written. A promotion of a
        block without a file is lost too.
        """
        job = self.jobs[number]
        if job.is_promotion:
            if lost:
                self.stored.difference_update(job.names)
            lost = not self.stored.issuperset(job.names)
            self.lost_promotions += lost
        else:
            self._coming.difference_update(job.names)
            if lost:
                self.lost_stores += 1
            else:
                self.stored.update(job.names)
        self._endings.append((number, lost))

    def take_ended(self) -> list[tuple[DiskJob, bool]]:
        """The jobs that have ended since this was asked last, in order, and whether they were lost."""
        endings = [(self.jobs.pop(number), lost) for number, lost in self._endings]
        self._endings.clear()
        return endings

    def end_step(self) -> None:
        """Answers what was asked in a step."""
        self.asked = self.lookups.answer(self.stored)
