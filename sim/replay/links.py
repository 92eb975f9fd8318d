"""Links: what carries KV blocks between two memories, one transfer after another.

A link is a resource with one place and a queue. How long a transfer takes is known when it is submitted, so
its end is too, and no event is needed for it: whoever waits asks for the end.
"""

from __future__ import annotations

import xxhash
from pagecast.sim.machine.host_link import LinkSpec


class Link:
    """One direction of a link, and its queue. `busy_ns`: for how long it has carried something so far.

    Which transfers fail or are slow follows from `seed`, `name` and the transfer's number.
    """

    def __init__(self, spec: LinkSpec, name: str, seed: int = 0) -> None:
        self.spec = spec
        self.name = name
        self.free_ns = 0
        self.busy_ns = 0
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
        self.free_ns = begin + took
        self.busy_ns += took
        self.waited_ns += begin - now
        self.bytes += size
        self.transfers += 1
        self.sizes[size] = self.sizes.get(size, 0) + 1
        return self.free_ns, bool(spec.failing) and self._draw(number, "failing") < spec.failing

    def figures(self, name: str, makespan_s: float) -> dict[str, float]:
        """Totals so far: transfers, bytes, the share of time that it was busy, seconds of waiting."""
        return {
            f"{name}s": self.transfers,
            f"{name}_bytes": self.bytes,
            f"{name}_busy": self.busy_ns / 1e9 / makespan_s if makespan_s > 0 else 0.0,
            f"{name}_wait_s": self.waited_ns / 1e9,
        }

    def _draw(self, number: int, what: str) -> float:
        """A number from 0 to 1 that is the same in every run."""
        digest: int = xxhash.xxh3_64_intdigest(f"{self._seed} {self.name} {number} {what}".encode())
        return digest / 2**64
