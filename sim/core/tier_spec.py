"""Tier specifications: memory below the device that KV blocks are offloaded to, in vLLM's terms."""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.core.errors import BadInput

EVICTION_POLICIES = ("lru", "arc")
LOAD_FAILURE_POLICIES = ("recompute", "fail")


@dataclass(frozen=True)
class HostTierSpec:
    """A host tier. `blocks`: how many offloaded blocks it has room for, each of `factor` device blocks.

    `eviction_policy`: `lru` or `arc`. `prompt_only`: what a request generates is not stored.
    `store_threshold`: a block is stored once it was looked up so often; below 2 every block is.
    `kv_load_failure_policy`: a request whose load fails is computed (`recompute`), or ended (`fail`).
    `disk`: there is a disk behind it, as vLLM's tiering with one tier of the type `fs`.
    """

    blocks: int
    factor: int = 1
    eviction_policy: str = "lru"
    prompt_only: bool = True
    store_threshold: int = 0
    disk: bool = False
    kv_load_failure_policy: str = "recompute"

    def check(self) -> None:
        """Errors: BadInput naming the field that cannot be."""
        if self.blocks < 1:
            raise BadInput(f"the host tier has {self.blocks} blocks; it must have at least 1")
        if self.factor < 1:
            raise BadInput(f"an offloaded block has {self.factor} device blocks; it must have at least 1")
        if self.disk and self.store_threshold > 1:
            raise BadInput("a disk behind the host tier takes no store threshold (as vLLM's)")
        if self.kv_load_failure_policy not in LOAD_FAILURE_POLICIES:
            raise BadInput(
                f"kv_load_failure_policy {self.kv_load_failure_policy!r} is not known; "
                f"choose {' or '.join(LOAD_FAILURE_POLICIES)}"
            )
        if self.eviction_policy not in EVICTION_POLICIES:
            raise BadInput(
                f"host eviction policy {self.eviction_policy!r} is not known; "
                f"choose {' or '.join(EVICTION_POLICIES)}"
            )
