"""Links: what carries KV blocks between two memories, one transfer after another.

A link is a resource with one place and a queue. How long a transfer takes is known when it is submitted, so
its end is too, and no event is needed for it: whoever waits asks for the end.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
import xxhash
from pagecast.sim.machine.host_link import LinkSpec


class Makespan(NamedTuple):
    """From the first arrival to the end of the last request, in nanoseconds."""

    first_ns: int
    last_ns: int


class Link:
    """One direction of a link, and its queue. `busy_ns`: how long all transfers submitted so far take.

    Which transfers fail or are slow follows from `seed`, `name` and the transfer's number.
    """

    def __init__(self, spec: LinkSpec, name: str, seed: int = 0) -> None:
        self.spec = spec
        self.name = name
        self.free_ns = 0
        self.busy_ns = 0
        self._begins = array("q")  # when it began to carry something without a pause, in order ...
        self._ends = array("q")  # ... and when each of these times ended
        self.bytes = 0
        self.transfers = 0
        self.sizes: dict[int, int] = {}  # transfers by their bytes
        self.waited_ns = 0
        self._seed = seed

    def submit(self, now: int, size: int, number: int) -> tuple[int, bool]:
        """Queues a transfer of `size` bytes. Returns when it ends, and whether it fails then."""
        spec = self.spec
        begin = self.free_ns
        if begin < now:
            begin = now
        took = spec.latency_ns + round(size / spec.bytes_per_s * 1e9)
        if spec.slow and self._draw(number, "slow") < spec.slow:
            took = round(took * spec.slowness)
        if self._ends and self._ends[-1] == begin:
            self._ends[-1] += took
        else:
            self._begins.append(begin)
            self._ends.append(begin + took)
        self.free_ns = begin + took
        self.busy_ns += took
        self.waited_ns += begin - now
        self.bytes += size
        self.transfers += 1
        self.sizes[size] = self.sizes.get(size, 0) + 1
        return self.free_ns, bool(spec.failing) and self._draw(number, "failing") < spec.failing

    def busy_share(self, makespan: Makespan) -> float:
        """The share of the makespan in which it carried something. What it carried later does not count."""
        first, last = makespan
        if last <= first:
            return 0.0
        begins = np.frombuffer(self._begins, dtype=np.int64).clip(first, last)
        ends = np.frombuffer(self._ends, dtype=np.int64).clip(first, last)
        return int((ends - begins).sum()) / (last - first)

    def forget_times(self) -> None:
        """Forgets when it carried something, where nobody will ask for `busy_share`: memory stays bounded."""
        del self._begins[:]
        del self._ends[:]

    def figures(self, name: str, makespan: Makespan) -> dict[str, float]:
        """Totals: transfers, bytes, the share of the makespan that it was busy, seconds of waiting."""
        return {
            f"{name}s": self.transfers,
            f"{name}_bytes": self.bytes,
            f"{name}_busy": self.busy_share(makespan),
            f"{name}_wait_s": self.waited_ns / 1e9,
        }

    def _draw(self, number: int, what: str) -> float:
        """A number from 0 to 1 that is the same in every run."""
        digest: int = xxhash.xxh3_64_intdigest(f"{self._seed} {self.name} {number} {what}".encode())
        return digest / 2**64
