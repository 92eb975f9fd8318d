"""Broadcast of packed steps through shared memory: one process writes, all others read every message.

The memory is an unlinked file that all of them have mapped: it goes with the last of them. Its head counts,
in 64-bit words: messages written, and for each reader those that it is done with. Messages take turns in
`_SLOTS` slots; a writer waits for the slowest reader.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
_SLOTS = 4
_HEAD_BYTES = 4096
_SPIN_S = 0.02
_NAPS_S = (1e-4, 1e-3)  # after spinning: for a second, and from then on


def shared_file() -> IO[bytes]:
    """An empty file in memory that has no name; children may inherit it."""
    folder = Path("/dev/shm")
    return tempfile.TemporaryFile(dir=folder if folder.is_dir() else None)


class Ring:
    """One side of the broadcast. Every side must name the same `capacity`: bytes and numbers of a message.

    `reader` None: the writer. `check` is called while waiting; what it raises ends the wait.
    """

    def __init__(
        self,
        fd: int,
        readers: int,
        capacity: tuple[int, int],
        *,
        reader: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._bytes, numbers = capacity[0], capacity[1]
        first = _whole_lines(16 + self._bytes)  # of a slot's numbers, behind the sizes and the text
        slot = _whole_lines(first + 4 * numbers)
        size = _HEAD_BYTES + _SLOTS * slot
        os.ftruncate(fd, size)
        self._memory = mmap.mmap(fd, size)
        head = np.frombuffer(self._memory, np.int64, 1 + readers)
        self._written, self._done = head[:1], head[1:]
        starts = [_HEAD_BYTES + i * slot for i in range(_SLOTS)]
        self._sizes = [np.frombuffer(self._memory, np.int64, 2, start) for start in starts]
        self._texts = [memoryview(self._memory)[start + 16 : start + 16 + self._bytes] for start in starts]
        self._numbers = [np.frombuffer(self._memory, np.int32, numbers, start + first) for start in starts]
        self._reader = reader
        self._check = check
        self._count = 0
        self._fence = threading.Lock()

    def write(self, text: bytes, numbers: Ints) -> None:
        """Sends a message to every reader."""
        if len(text) > self._bytes:
            raise ValueError(f"a step's layout has {len(text)} bytes; there is room for {self._bytes}")
        self._wait(lambda: self._count - int(self._done.min()) < _SLOTS)
        slot = self._count % _SLOTS
        self._texts[slot][: len(text)] = text
        self._numbers[slot][: len(numbers)] = numbers
        self._sizes[slot][:] = len(text), len(numbers)
        self._order()
        self._count += 1
        self._written[0] = self._count

    def read(self) -> tuple[bytes, Ints]:
        """Waits for the next message. The numbers are valid until `done`."""
        self._wait(lambda: int(self._written[0]) > self._count)
        self._order()
        slot = self._count % _SLOTS
        text, numbers = self._sizes[slot].tolist()
        return bytes(self._texts[slot][:text]), self._numbers[slot][:numbers]

    def done(self) -> None:
        """Lets the slot of the message that was read go."""
        assert self._reader is not None
        self._order()
        self._count += 1
        self._done[self._reader] = self._count

    def _wait(self, holds: Callable[[], bool]) -> None:
        poll_start = 0.0
        while not holds():
            self._check()
            now = time.perf_counter()
            poll_start = poll_start or now
            waiting_s = now - poll_start
            time.sleep(0 if waiting_s < _SPIN_S else _NAPS_S[waiting_s > 1])

    def _order(self) -> None:
        """Keeps memory accesses before and after apart, on processors that would reorder them."""
        with self._fence:
            pass


def _whole_lines(size: int) -> int:
    """`size` bytes rounded up to whole cache lines."""
    return -(-size // 64) * 64
