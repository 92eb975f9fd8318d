"""A disk in virtual time for vLLM's file-system tier, without files and threads.

vLLM's own code decides: `TieringOffloadingManager`, its primary tier, `FileSystemTierManager` and its
lookups. What is replaced is what takes real time: the pool of threads that read and write files, the thread
that looks for them, and the shared memory they copy from. `install()` does that, once; `Disk.use()` before a
scheduler is made says which disk its tier has.

Each direction takes one job after another. A store writes the blocks that have no file and are not being
written. A job is done, and its files are there, once all of its blocks are. A load that fails removes its
files, and one whose files are gone fails. Lookups see the files that are
there when the step that asked has been planned, and are answered by the next one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering import async_lookup
from vllm.v1.kv_offload.tiering import spec as tiering_spec
from vllm.v1.kv_offload.tiering.fs import manager as fs

Row = dict[str, Any]


class Disk:
    """The files of one engine, and the transfers to and from them. `now_us` is set by the driver.

    `submitted`: jobs not yet taken note of, as (number, kind, keys, host slots).
    """

    current: ClassVar[Disk]

    def __init__(self, links: Row) -> None:
        self.now_us = 0
        self.paths: list[str] = []  # of the job being submitted
        self.files: set[str] = set()
        self.looked_up = False  # something was asked in the plan just made
        self.ended: list[tuple[int, int]] = []  # (time, number) of each job that was seen to end
        self.submitted: list[tuple[int, str, list[OffloadKey], list[int]]] = []
        self.finished: list[tuple[int, bool]] = []
        self.lost: list[int] = []  # the jobs that failed so far, but for those whose files are gone
        self._links = links
        self._promised: set[str] = set()
        self._free_us = {"load": 0, "store": 0}
        self._jobs: list[tuple[int, int, bool, bool, list[str]]] = []  # end, number, success, load, files

    def use(self) -> None:
        """The tier made next has this disk."""
        Disk.current = self

    def submit(self, way: str, number: int, paths: list[str]) -> None:
        """Queues a job."""
        failing = self._links.get("disk_failing" if way == "store" else "disk_failing_reads", 0)
        success = not failing or number % failing != 0
        if not success:
            self.lost.append(number)
        if way == "store":
            moved = [path for path in paths if path not in self.files and path not in self._promised]
            self._promised.update(moved)
        else:
            moved = [path for path in paths if path in self.files]
        begin = max(self.now_us, self._free_us[way])
        end = begin + self._links["disk_latency_us"] + self._links[f"disk_{way}_us"] * len(moved)
        self._free_us[way] = end
        self._jobs.append((end, number, success, way == "load", moved if way == "store" else paths))

    def advance(self, now_us: int) -> None:
        """Ends what is done before a time."""
        self.now_us = now_us
        done = sorted(job for job in self._jobs if job[0] < now_us)
        self._jobs = [job for job in self._jobs if job[0] >= now_us]
        for end, number, success, is_load, paths in done:
            if is_load:
                success = self._read(paths, success)
            else:
                self._promised.difference_update(paths)
                if success:
                    self.files.update(paths)
            self.finished.append((number, success))
            self.ended.append((end, number))

    def _read(self, paths: list[str], success: bool) -> bool:
        """Whether all files could be read. What can't be is removed, as vLLM's tasks do it."""
        if not success:
            self.files.difference_update(paths)
        return self.files.issuperset(paths)

    @property
    def next_us(self) -> int | None:
        """When the next job ends; None where none is under way."""
        return min((job[0] for job in self._jobs), default=None)


# Since 0.28 the end of a job comes with the time that it took.
TIMED = "float" in str(inspect.signature(fs.DualQueueThreadPool.get_finished).return_annotation)


def paths_of(tasks: Iterable[Any]) -> list[str]:
    """The files of a job: its tasks name one each; since 0.28 they are noted when it is submitted."""
    firsts = [task.args[0] if getattr(task, "args", None) else None for task in tasks]
    return firsts if all(isinstance(one, str) for one in firsts) else Disk.current.paths


class VirtualPool:
    """The pool of threads, in virtual time."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self._disk = Disk.current

    def enqueue_load(self, job_id: int, n_tasks: int, tasks: Iterable[Any]) -> None:
        """Queues the loads of a job; each task names its file first."""
        self._disk.submit("load", job_id, paths_of(tasks))

    def enqueue_store(self, job_id: int, n_tasks: int, tasks: Iterable[Any]) -> None:
        """Queues the stores of a job."""
        self._disk.submit("store", job_id, paths_of(tasks))

    def get_finished(self) -> list[Any]:
        """What has ended since this was asked last."""
        finished = self._disk.finished
        self._disk.finished = []
        return [(*one, 0.0) for one in finished] if TIMED else finished


class VirtualLookups(fs.FsAsyncLookupManager):
    """vLLM's lookups, answered at once when a step's are posted."""

    def flush(self) -> None:
        disk = Disk.current
        disk.looked_up = bool(self._lookup_batch)
        super().flush()
        self._lookup_queue.put(None)
        self._worker()

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        files, path = Disk.current.files, self._tier.file_mapper.get_file_name
        return [path(key) in files for key in keys]


class NoThread:
    """A thread that never runs."""

    def __init__(self, **more: Any) -> None:
        pass

    def start(self) -> None:
        pass


class NoMemory:
    """Shared memory of no size."""

    def __init__(self, **more: Any) -> None:
        self._blocks = more.get("num_blocks") or more["num_chunks"]

    def create_kv_memoryview(self) -> memoryview:
        """A row of a byte for each block."""
        return memoryview(np.zeros((self._blocks, 1), dtype=np.uint8))


def _noting(kind: str, submit: Callable[..., None]) -> Callable[..., None]:
    def noted(self: Any, job: Any) -> None:
        slots = [int(slot) for slot in (job.block_ids if hasattr(job, "block_ids") else job.chunk_ids)]
        Disk.current.paths = [self.file_mapper.get_file_name(key) for key in job.keys]
        Disk.current.submitted.append((job.job_id, kind, list(job.keys), slots))
        submit(self, job)

    return noted


def install() -> None:
    """Puts virtual time in the place of threads and files."""
    async_lookup.threading.Thread = NoThread  # type: ignore[misc,assignment]
    tiering_spec.SharedOffloadRegion = NoMemory  # type: ignore[misc,assignment]
    fs.DualQueueThreadPool = VirtualPool  # type: ignore[misc,assignment]
    fs.FsAsyncLookupManager = VirtualLookups  # type: ignore[misc,assignment]
    tier = fs.FileSystemTierManager
    tier.submit_load = _noting("promotion", tier.submit_load)  # type: ignore[method-assign]
    tier.submit_store = _noting("cascade", tier.submit_store)  # type: ignore[method-assign]
