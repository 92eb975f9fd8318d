"""Host memory that KV is offloaded to, and the disk behind it, as a scenario says them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.option import option, section
from pagecast.sim.core.tier_spec import HostTierSpec, OffloadingPolicy

if TYPE_CHECKING:
    from pagecast.sim.costs.calibration.option_costs import OptionCosts
    from pagecast.sim.machine.gpus import Gpu
    from pagecast.sim.machine.host_link import DiskLinks, HostLinks, LinkSpec

GIB = 2**30
PAGE = 4096  # bytes: with a disk, offloaded blocks are whole pages of shared memory (as vLLM's)


def _read_tiers(text: str) -> tuple[dict[str, Any], ...]:
    from pagecast.sim.machine.secondary_tiers import read_secondary_tiers

    return read_secondary_tiers(text)


def _read_faults(text: str) -> Mapping[str, Mapping[str, float]]:
    from pagecast.sim.machine.link_faults import read_link_faults

    return read_link_faults(text)


def _faults_text(faults: Mapping[str, Mapping[str, float]]) -> str:
    from pagecast.sim.machine.link_faults import link_faults_text

    return link_faults_text(faults)


@dataclass(frozen=True)
class DiskTier:
    """A disk behind host memory: `tiers`, as vLLM's list, and how fast it is.

    By default it is one NVMe drive on PCIe 4: 6 GB/s read, 3 GB/s written for long, 0.2 ms per job. This was
    not measured.
    """

    tiers: tuple[dict[str, Any], ...] = option(
        "what is behind the host tier: fs, or vLLM's JSON list with one tier of the type fs "
        "(vLLM: secondary_tiers; default: nothing)",
        flat="secondary_tiers",
        read=_read_tiers,
        write=json.dumps,
        form=list,
    )
    load_gb_per_s: float = option(
        "GB/s that reading offloaded blocks from disk reaches", 6.0, flat="disk_load_gb_per_s", gt=0
    )
    store_gb_per_s: float = option(
        "GB/s that writing offloaded blocks to disk reaches", 3.0, flat="disk_store_gb_per_s", gt=0
    )
    latency_ms: float = option(
        "milliseconds that each job of the disk takes beside", 0.2, flat="disk_latency_ms", ge=0
    )

    def links(self, faults: TransferFaults, block_bytes: int) -> DiskLinks:
        """How fast blocks of so many bytes move between host memory and the disk."""
        from pagecast.sim.machine.host_link import DiskLinks

        load = faults.link("disk-load", self.load_gb_per_s * 1e9, self.latency_ms)
        return DiskLinks(
            block_bytes, load, faults.link("disk-store", self.store_gb_per_s * 1e9, self.latency_ms)
        )


@dataclass(frozen=True)
class HostTransfers:
    """Speed of transfers between a GPU and its host's memory, and time of the engine's host for them.

    None: as calibrated, or by the GPU.
    """

    load_gb_per_s: float | None = option(
        "GB/s that loads from host memory reach (default: as calibrated, or by the GPU's PCIe generation)",
        None,
        flat="host_load_gb_per_s",
        gt=0,
    )
    store_gb_per_s: float | None = option(
        "GB/s that stores to host memory reach (default: as calibrated, or by the GPU's PCIe generation)",
        None,
        flat="host_store_gb_per_s",
        gt=0,
    )
    latency_ms: float = option(
        "milliseconds that each transfer takes beside", 0.05, flat="host_latency_ms", ge=0
    )
    step_ms: float | None = option(
        "milliseconds of host time that offloading adds to every step (default: as calibrated, or none)",
        None,
        flat="offloading_step_ms",
        ge=0,
    )
    block_us: float | None = option(
        "microseconds of host time to submit a block's transfer (default: as calibrated, or none)",
        None,
        flat="offloading_block_us",
        ge=0,
    )

    def step_ns(self, calibrated: OptionCosts) -> int:
        """Host time that offloading adds to every step."""
        known = calibrated.offloading_step_ns or 0.0
        return round(known if self.step_ms is None else self.step_ms * 1e6)

    def submit_ns(self, calibrated: OptionCosts) -> int:
        """Host time to submit a block's transfer."""
        known = calibrated.offloading_block_ns or 0.0
        return round(known if self.block_us is None else self.block_us * 1e3)


@dataclass(frozen=True)
class TransferFaults:
    """Shares of transfers that fail or are slow; `by_link`: what is otherwise on some links."""

    failing: float = option("share of transfers that fail", 0.0, flat="failing_transfers", ge=0, le=1)
    slow: float = option(
        "share of transfers that take ten times as long", 0.0, flat="slow_transfers", ge=0, le=1
    )
    by_link: Mapping[str, Mapping[str, float]] | None = option(
        "failing and slow transfers link by link, as "
        "host-load:failing=0.1;disk-store:slow=0.2,factor=5 (default: as the two shares say)",
        None,
        flat="link_faults",
        read=_read_faults,
        write=_faults_text,
    )

    def link(self, name: str, bytes_per_s: float, latency_ms: float) -> LinkSpec:
        """A link with its faults."""
        from pagecast.sim.machine.host_link import LinkSpec

        faults = {"failing": self.failing, "slow": self.slow, **(self.by_link or {}).get(name, {})}
        return LinkSpec(bytes_per_s, round(latency_ms * 1e6), **faults)


@dataclass(frozen=True)
class HostTier:
    """Host memory of `size_gib`, in blocks of `block_size` tokens (None: of a device block's)."""

    size_gib: float = option(
        "GiB of host memory that KV is offloaded to (vLLM; default: none)", flat="kv_offloading_size", gt=0
    )
    backend: Literal["native"] = option(
        "who offloads: native, vLLM's OffloadingConnector", "native", flat="kv_offloading_backend"
    )
    policy: OffloadingPolicy = section(OffloadingPolicy)
    block_size: int | None = option(
        "tokens of an offloaded block, a multiple of block_size (vLLM: block_size)",
        None,
        flat="kv_offloading_block_size",
        ge=1,
    )
    disk: DiskTier | None = section(DiskTier)
    transfers: HostTransfers = section(HostTransfers)
    faults: TransferFaults = section(TransferFaults)

    @classmethod
    def of(cls, spec: HostTierSpec, block_size: int, block_bytes: int) -> HostTier:
        """A tier with room for a specification's blocks, of `factor` blocks of `block_bytes`."""
        return cls(
            (spec.blocks + 0.5) * block_bytes * spec.factor / GIB,
            policy=spec.policy,
            block_size=block_size * spec.factor,
            disk=DiskTier(_read_tiers("fs")) if spec.disk else None,
        )

    def factor(self, block_size: int) -> int:
        """Device blocks in an offloaded one. Errors: BadInput where it is not a whole number."""
        wanted = self.block_size or block_size
        if wanted % block_size:
            raise BadInput(f"kv_offloading_block_size {wanted} is no multiple of block_size {block_size}")
        return wanted // block_size

    def spec(self, block_size: int, block_bytes: int) -> HostTierSpec:
        """The tier in blocks; a device block has `block_bytes` on all GPUs. Errors: BadInput for no room."""
        factor = self.factor(block_size)
        block_bytes *= factor
        if self.disk is not None:
            block_bytes = -(-block_bytes // PAGE) * PAGE
        room = int(self.size_gib * GIB) // block_bytes
        if not room:
            raise BadInput(f"kv_offloading_size {self.size_gib} GiB has no room for a single block")
        return HostTierSpec(room, factor, self.policy, disk=self.disk is not None)

    def links(
        self, gpu: Gpu, calibrated: OptionCosts, *, block_bytes: int, offloaded_bytes: int, seed: int
    ) -> HostLinks:
        """How fast blocks move between a GPU and its host, and to the disk.

        `block_bytes`: of a device block on one GPU; `offloaded_bytes`: of an offloaded block on all of them.
        """
        from pagecast.sim.machine.host_link import HostLinks, host_bytes_per_s

        own, usual = self.transfers, host_bytes_per_s(gpu)
        rates = {
            "host-load": (own.load_gb_per_s, calibrated.load_bytes_per_s),
            "host-store": (own.store_gb_per_s, calibrated.store_bytes_per_s),
        }
        load, store = (
            self.faults.link(name, known or usual if given is None else given * 1e9, own.latency_ms)
            for name, (given, known) in rates.items()
        )
        return HostLinks(
            block_bytes,
            load,
            store,
            seed,
            step_ns=own.step_ns(calibrated),
            submit_ns=own.submit_ns(calibrated),
            disk=None if self.disk is None else self.disk.links(self.faults, offloaded_bytes),
        )
