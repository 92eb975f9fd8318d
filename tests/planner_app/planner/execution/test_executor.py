"""The executor: the same answers wherever they are computed, errors as one line."""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
from pagecast.planner_app.planner.execution.executor import executor
from pagecast.planner_app.planner.execution.options import Many
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario


@pytest.mark.parametrize("workers", [1, 2])
def test_answers_come_in_the_order_of_the_items(workers):
    updates = []
    with executor(Many(workers=workers)) as run:
        assert run.map(partial(pow, 2), range(12), updates.append) == [2**n for n in range(12)]
        assert run.map(math.sqrt, [4.0, 9.0]) == [2.0, 3.0]
    assert updates == list(range(1, 13))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_a_user_can_mend_comes_through_as_it_is(workers):
    with executor(Many(workers=workers)) as run, pytest.raises(BadInput, match="block_size"):
        run.map(Scenario.make, [{}, {"block_size": 0}])


def test_a_killed_worker_process_is_told_in_one_line():
    with (
        executor(Many(workers=2)) as run,
        pytest.raises(Exception, match="a worker process was killed") as caught,
    ):
        run.map(os._exit, [1, 1, 1])
    assert caught.value.exit_code == 3


def test_workers_killed_amid_an_answer_leave_no_thread_waiting_for_its_rest():
    """Python's own end would wait for such a thread, for ever."""
    threads = threading.active_count()
    with suppress(KeyboardInterrupt), executor(Many(workers=2)) as run:
        next(run.stream(bytes, [50_000_000] * 40))  # long answers: most of the time one is on its way
        raise KeyboardInterrupt
    assert threading.active_count() == threads


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a signal at a given time")
def test_an_interrupt_at_any_time_leaves_no_thread_behind():
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def answer_all() -> None:
        with executor(Many(workers=2)) as run:
            for index, _ in run.stream(abs, range(5000)):
                if index == 100:
                    signal.setitimer(signal.ITIMER_REAL, 0.05)

    threads = threading.active_count()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            answer_all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert threading.active_count() == threads


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are spawned")
def test_workers_are_forked_unless_a_thread_may_hold_locks():
    program = """
import threading
from pagecast.planner_app.planner.execution.executor import executor
from pagecast.planner_app.planner.execution.options import Many

def kinds():
    with executor(Many(workers=2)) as run:
        return set(run.map(eval, ["type(__import__('multiprocessing').current_process()).__name__"] * 2))

if __name__ == "__main__":
    alone, end = kinds(), threading.Event()
    threading.Thread(target=end.wait).start()
    print(*alone, *kinds())
    end.set()
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert answer.stdout.split() == ["ForkProcess", "SpawnProcess"], answer.stderr


def test_workers_below_one_are_refused():
    with pytest.raises(BadInput, match="at least 1"), executor(Many(workers=0)):
        pass


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{port}", "127.0.0.1:{port}", "nowhere", "tcp://:x"])
def test_an_unreachable_scheduler_is_told_in_one_line_and_soon(address):
    pytest.importorskip("distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begun = time.monotonic()
    with (
        pytest.raises(BadInput, match="--cluster") as caught,
        executor(Many(cluster=address.format(port=port))),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 10


def test_something_that_is_no_scheduler_is_told_in_one_line():
    pytest.importorskip("distributed")
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        address = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        with (
            pytest.raises(BadInput, match="no Dask scheduler answers there"),
            executor(Many(cluster=address)),
        ):
            pass
