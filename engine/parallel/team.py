"""The processes of an engine on several GPUs: started, watched and ended by the one that schedules.

Process 0 is the caller's. It plans, and sends every step's packed numbers to the workers, which run the same
step on their shares of the model. A thread for each worker waits at its socket: when a worker ends, or says
that it failed, collective operations of this process are aborted, and the engine's next word is the reason.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from pagecast.engine.batch import StepLayout
from pagecast.engine.host_tier import HostOrders
from pagecast.engine.options import Options
from pagecast.engine.parallel.link import join
from pagecast.engine.parallel.ring import Ints, Ring, shared_file
from pagecast.engine.shard import Collectives, Shard
from pagecast.sim.core.errors import BadInput, CannotRunHere, PagecastError

JOINING, READY, FAILED, END = "joining", "ready", "failed", "end"
# After a failure, for the caller's thread to come back: from the GPU, and from reading weights.
_GRACE_S = 20.0
_LOADING_GRACE_S = 600.0
_LOOK_S = 0.5
_END_S = 5.0


class EngineFailed(CannotRunHere):
    """An engine on several GPUs has lost a worker; it must be made anew."""


_KINDS: dict[str, type[PagecastError]] = {"BadInput": BadInput, "CannotRunHere": CannotRunHere}


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Order that a worker gets at its start."""

    model: str
    options: dict[str, Any]
    rank: int
    port: int


@dataclass(slots=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    state: str = ""


class Team:
    """Starts the workers of `options.tensor_parallel_size` GPUs. `close` ends them, whatever they do."""

    def __init__(self, model: str, options: Options) -> None:
        self.size = options.tensor_parallel_size
        self.failure: PagecastError | None = None
        self._options = options
        self._file = shared_file()
        self._store = dist.TCPStore("127.0.0.1", 0, self.size, is_master=True, wait_for_workers=False)
        self._link: Collectives | None = None
        self._device: torch.device | None = None
        self._ring: Ring | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._entered = 0.0  # monotonic time at which the caller entered `guarded`; 0: outside
        self._grace_s = _GRACE_S
        self._workers: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        try:
            for rank in range(1, self.size):
                self._workers.append(self._start(StartOrder(model, asdict(options), rank, self._store.port)))
        except BaseException:
            self.close()
            raise

    def join(self, device: torch.device) -> Shard:
        """Makes a group with the workers once all of them are there. Errors: as `check`."""
        self._await(JOINING)
        self._device = device
        with self.guarded():
            self._link = join(self._store, 0, self.size, device)
        return Shard(0, self.size, self._link, self._options.enable_expert_parallel)

    def open(self, capacity: tuple[int, int]) -> None:
        """Makes the ring for steps of that size; waits until every worker reads. Errors: as `check`."""
        self._ring = Ring(self._file.fileno(), self.size - 1, capacity, check=self.check)
        self._await(READY)

    def publish(self, layout: StepLayout | None, numbers: Ints, orders: HostOrders | None) -> None:
        """Sends a step to every worker, or transfers alone. Errors: as `check`."""
        self.check()
        assert self._ring is not None
        self._ring.write(pickle.dumps((layout, orders), pickle.HIGHEST_PROTOCOL), numbers)

    def check(self) -> None:
        """Errors: EngineFailed once a worker has ended; while the engine starts also what a worker raised."""
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def guarded(self, *, shared_step: bool = False, loading: bool = False) -> Iterator[None]:
        """Context of what waits for the workers. An error raised inside ends the team, and is replaced by a
        worker's failure if one turns up within 2 s.

        `shared_step`: the workers take part in what is done inside. Then an interrupt ends the team too, for
        they may wait in a step that this process has left. `loading`: weights are read inside, which may take
        long after a worker has failed.
        """
        self._grace_s = _LOADING_GRACE_S if loading else _GRACE_S
        self._entered = time.monotonic()
        try:
            yield
            self.check()
        except PagecastError as error:
            self.fail(str(error), type(error))
            raise
        except KeyboardInterrupt:
            if shared_step:
                self.fail("interrupted in a step that the other GPUs take part in; make a new engine")
            raise
        except BaseException as error:
            self._await_failure()
            self.fail(f"step failed on GPU 0: {type(error).__name__}: {error}")
            assert self.failure is not None
            raise self.failure from error
        finally:
            self._entered = 0.0

    def fail(self, reason: str, kind: type[PagecastError] = EngineFailed) -> None:
        """Notes why the team is of no more use, and ends what waits for it. The first reason stays."""
        with self._changed:
            if self.failure is not None or self._closing:
                return
            self.failure = kind(reason)
            self._changed.notify_all()
        threading.Thread(target=self._end_if_stuck, daemon=True).start()
        if self._link is not None:
            with suppress(Exception):
                if self._device is not None and self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                self._link.abort()

    def close(self) -> None:
        """Ends the workers and lets go of the group."""
        self._closing = True
        for worker in self._workers:
            with suppress(OSError):
                worker.connection.send((END, "", ""))
        deadline = time.monotonic() + (_END_S if self.failure is None else 0.5)
        for worker in self._workers:
            try:
                worker.process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        for thread in self._threads:
            thread.join(_END_S)
        for worker in self._workers:
            worker.connection.close()
        if self._link is not None:
            self._link.close()
        self._link = self._ring = None
        self._file.close()

    # ---- the workers

    def _start(self, order: StartOrder) -> _Worker:
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), self._file.fileno())
        command = [sys.executable, "-m", "pagecast.engine.worker", *map(str, fds)]
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        threads = str(max(1, (os.cpu_count() or 1) // self.size))
        environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": paths}
        process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, env=environment)
        theirs.close()
        connection = Connection(ours.detach())
        with suppress(OSError):  # it has ended already: who watches it says how
            connection.send(order)
        worker = _Worker(order.rank, process, connection)
        thread = threading.Thread(
            target=self._watch, args=(worker,), name=f"worker {order.rank}", daemon=True
        )
        thread.start()
        self._threads.append(thread)
        return worker

    def _watch(self, worker: _Worker) -> None:
        """Hears what a worker says until it ends."""
        with suppress(EOFError, OSError):
            while True:
                state, reason, kind = worker.connection.recv()
                if state == FAILED:
                    self.fail(f"worker {worker.rank}: {reason}", _KINDS.get(kind, EngineFailed))
                with self._changed:
                    worker.state = state
                    self._changed.notify_all()
        try:
            code = worker.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            code = worker.process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self.fail(f"worker {worker.rank} ended with {how}; the engine can't go on without it")

    def _await(self, state: str) -> None:
        """Waits until every worker has got there."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure is not None or all(worker.state == state for worker in self._workers)
            )
        self.check()

    def _await_failure(self) -> None:
        """Gives a failure of this process the time to turn out as that of a worker."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, timeout=2.0)

    def _end_if_stuck(self) -> None:
        """Ends the process where its thread does not come back from a GPU that waits for a dead one."""
        failed = time.monotonic()
        while not self._closing:
            time.sleep(_LOOK_S)
            entered = self._entered
            if entered and time.monotonic() - max(entered, failed) >= self._grace_s:
                print(f"pagecast: {self.failure}", file=sys.stderr, flush=True)
                os._exit(EngineFailed.exit_code)
