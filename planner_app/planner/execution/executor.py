"""One interface for many replays at once: in this process, in processes of this machine, or on Dask.

    with executor(Many(workers=2)) as run:
        results = run.map(partial(forecast, trace), scenarios)

Results come in the order of the items, whichever way they were computed. The function is shipped once to
each worker, with all that is bound to it (a trace, by `functools.partial` or as a bound method of a frozen
dataclass), the items one by one.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import xxhash
from pagecast.planner_app.garbage import collect_seldom
from pagecast.planner_app.planner.execution.interface import AnswerT, Executor, ItemT
from pagecast.planner_app.planner.execution.options import Many
from pagecast.sim.core.errors import CannotRunHere
from pagecast.sim.replay.cores import cores

_PATIENCE_S = 2.0
_BRIEFLY_S = 0.5


@contextmanager
def executor(many: Many | None = None) -> Iterator[Executor]:
    """An executor: `workers` processes (None: one per core; 1: this one), or the workers of a Dask cluster.

    Errors: BadInput for a scheduler that can't be reached at `cluster`
    (`tcp://host:8786`); CannotRunHere where Dask is not installed.
    """
    many = many or Many()
    instance: Executor
    if many.cluster is not None:
        from pagecast.planner_app.planner.execution.cluster import Cluster

        instance = Cluster(many.cluster)
    else:
        count = many.workers or cores()
        instance = Serial() if count == 1 else Processes(count)
    try:
        yield instance
    except BaseException:
        instance.abandon()
        raise
    finally:
        instance.close()


class Serial(Executor):
    """One after another, here."""

    def stream(
        self, function: Callable[[ItemT], AnswerT], items: Sequence[ItemT]
    ) -> Generator[tuple[int, AnswerT], None, None]:
        """In the order of the items."""
        for index, item in enumerate(items):
            yield index, function(item)


class Processes(Executor):
    """Processes of this machine.

    They are forked, which spares each of them the imports, where this process has no other thread; and at
    once, before a display of progress starts one. Otherwise they are spawned when the first replay needs
    them: a fork would copy the locks that other threads hold.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._folder = tempfile.TemporaryDirectory(prefix="pagecast-", ignore_cleanup_errors=True)
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # workers inherit it: a core each is enough
        forks = sys.platform == "linux" and threading.active_count() == 1
        self._pool = ProcessPoolExecutor(workers, get_context("fork" if forks else "spawn"), _begin)
        self._shipped: tuple[Any, str] = (None, "")
        self._abandoned = False
        if forks:
            with _uninterrupted():
                self._pool.submit(os.getpid)  # any first task starts them

    def stream(
        self, function: Callable[[ItemT], AnswerT], items: Sequence[ItemT]
    ) -> Generator[tuple[int, AnswerT], None, None]:
        """As answers come; a single item is computed here."""
        if len(items) == 1:
            yield 0, function(items[0])
            return
        path = self._ship(function)
        futures: dict[Future[AnswerT], int] = {}
        # Not `concurrent.futures.wait`: it locks all futures in turn, and an interrupt amid that leaves some
        # locked, for which the pool's thread then waits for ever.
        done: SimpleQueue[Future[AnswerT]] = SimpleQueue()
        try:
            with _uninterrupted():
                for index, item in enumerate(items):
                    future = self._pool.submit(_call, path, item)
                    futures[future] = index
                    future.add_done_callback(done.put)
            while futures:
                future = done.get()
                yield futures.pop(future), future.result()
        except BrokenProcessPool:
            raise CannotRunHere(
                "a worker process was killed (out of memory?); use fewer --workers, or a shorter trace"
            ) from None
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Waits for what is running: a replay, at most."""
        try:
            self._pool.shutdown(wait=not self._abandoned, cancel_futures=True)
        except BaseException:
            self.abandon()
            raise
        finally:
            self._folder.cleanup()

    def abandon(self) -> None:
        """Kills the workers: they ignore interrupts, and the pool's own end waits for what they compute."""
        self._abandoned = True
        workers = list((self._pool._processes or {}).values())
        thread: Any = self._pool._executor_manager_thread
        answers: Any = self._pool._result_queue
        pending: Any = self._pool._pending_work_items
        # Before the kill: the pool's thread then forgets what was cancelled, over which it would stumble.
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(_PATIENCE_S)
        if thread is None:
            return
        thread.join(_BRIEFLY_S)
        if thread.is_alive():
            # A worker died amid an answer. The pool's thread waits for the rest until no process can write
            # it any more, and Python's own end waits for the thread. It would stumble over what is cancelled.
            for number, item in list(pending.items()):
                if item.future.cancelled():
                    del pending[number]
            answers._writer.close()
            thread.join(_PATIENCE_S)

    def _ship(self, function: Callable[[Any], Any]) -> str:
        """A file of the pickled function, which each worker reads once."""
        last, path = self._shipped
        if last is not function:
            body = pickle.dumps(function, pickle.HIGHEST_PROTOCOL)
            path = str(Path(self._folder.name) / xxhash.xxh3_128_hexdigest(body))
            if not os.path.exists(path):
                Path(path).write_bytes(body)
            self._shipped = (function, path)
        return path


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Holds interrupts back while workers start: they inherit that, and so stay silent until `_begin`."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """A worker leaves interrupts to its parent, and ends when that is killed."""
    collect_seldom()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _call(path: str, item: Any) -> Any:
    return _load(path)(item)


@lru_cache(maxsize=4)
def _load(path: str) -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = pickle.loads(Path(path).read_bytes())
    return function
