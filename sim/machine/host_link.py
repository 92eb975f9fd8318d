"""Link between a GPU and its host's memory: what a copy of KV blocks reaches of the PCIe link's rate.

PCIe 5: a plain copy from pinned memory reached 54.7 of 64 GB/s on an H200, one way; our engine's reloads
reached 46.6 GB/s in a run (docs/engine.md). Older links are assumed to reach about the same share, 25 of 32
GB/s over PCIe 4 and 12.5 of 16 GB/s over PCIe 3: they were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagecast.sim.machine.gpus import Gpu

_PCIE5_BYTES_PER_S = 64e9
_MEASURED_SHARE = 55 / 64
_ASSUMED_SHARE = 25 / 32


@dataclass(frozen=True)
class LinkSpec:
    """One direction of a link. A transfer takes `latency_ns`, and its bytes at `bytes_per_s`.

    `failing`: so large a share of the transfers fail. `slow`: so large a share take `slowness` times as long.
    """

    bytes_per_s: float
    latency_ns: int = 0
    failing: float = 0.0
    slow: float = 0.0
    slowness: float = 10.0


class DiskLinks(NamedTuple):
    """Link of a host tier to the disk behind it: bytes of an offloaded block, and the two directions."""

    block_bytes: int
    load: LinkSpec
    store: LinkSpec


class HostLinks(NamedTuple):
    """Link of a replica to its host tier: bytes of a device block, and the link's two directions.

    The engine's host takes `step_ns` more in every step, and `submit_ns` for each block of a transfer that it
    submits.
    """

    block_bytes: int
    load: LinkSpec
    store: LinkSpec
    seed: int = 0
    step_ns: int = 0
    submit_ns: int = 0
    disk: DiskLinks | None = None


def host_bytes_per_s(gpu: Gpu) -> float:
    """Bytes per second that a copy between host and device reaches, one way."""
    rate = gpu.host_link_bytes_per_s
    share = _MEASURED_SHARE if rate >= _PCIE5_BYTES_PER_S else _ASSUMED_SHARE
    return rate * share
