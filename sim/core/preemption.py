"""Preemption: what becomes of the KV of a request that gives way."""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.core.option import option


@dataclass(frozen=True)
class Recompute:
    """It is computed again."""

    def swap_blocks(self, block_bytes: int) -> int:
        """Blocks of host memory for it: none."""
        return 0


@dataclass(frozen=True)
class Swap:
    """It goes to host memory: `gib` of each GPU's, at `gb_per_s` over each GPU's link."""

    gib: float = option("with swap, host memory per GPU in GiB", 4.0, flat="swap_space_gib", gt=0)
    gb_per_s: float = option("with swap, rate of each GPU's link in GB/s", 25.0, flat="swap_gb_per_s", gt=0)

    def swap_blocks(self, block_bytes: int) -> int:
        """Blocks of host memory for it, on each GPU."""
        return int(self.gib * 2**30 / block_bytes)


Preemption = Recompute | Swap
PREEMPTIONS: dict[str, type[Preemption]] = {"recompute": Recompute, "swap": Swap}
