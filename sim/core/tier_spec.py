"""Tier specifications: memory below the device that KV blocks are offloaded to, in vLLM's terms."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.option import option

EvictionPolicy = Literal["lru", "arc"]
LoadFailurePolicy = Literal["fail", "recompute"]


@dataclass(frozen=True)
class OffloadingPolicy:
    """Which blocks are offloaded and which give way, by the names of vLLM's connector.

    `store_threshold`: a block is stored once it was looked up so often; below 2 every block is.
    `kv_load_failure_policy`: a request whose load fails is computed (`recompute`), or ended (`fail`).
    """

    eviction_policy: EvictionPolicy = option(
        "order in which offloaded blocks give way (vLLM: lru)", "lru", flat="kv_offloading_eviction_policy"
    )
    offload_prompt_only: bool = option("offload prompts, not what is generated (vLLM: on)", True)
    store_threshold: int = option(
        "offload a block once it was looked up so often (vLLM: 0, at once)",
        0,
        flat="kv_offloading_store_threshold",
        ge=0,
    )
    kv_load_failure_policy: LoadFailurePolicy = option(
        "what becomes of a request whose load fails (vLLM: fail)", "fail"
    )

    def of_connector(self) -> dict[str, Any]:
        """The options of vLLM's connector by their names: all but what becomes of failed loads."""
        options = asdict(self)
        del options["kv_load_failure_policy"]
        return options

    def check(self) -> None:
        """Errors: BadInput naming the option that cannot be."""
        known = {"eviction_policy": EvictionPolicy, "kv_load_failure_policy": LoadFailurePolicy}
        for name, kind in known.items():
            if (value := getattr(self, name)) not in get_args(kind):
                raise BadInput(f"{name} {value!r} is not known; choose {' or '.join(get_args(kind))}")


@dataclass(frozen=True)
class HostTierSpec:
    """A host tier. `blocks`: how many offloaded blocks it has room for, each of `factor` device blocks.

    `disk`: there is a disk behind it, as vLLM's tiering with one tier of the type `fs`.
    """

    blocks: int
    factor: int = 1
    policy: OffloadingPolicy = OffloadingPolicy()
    disk: bool = False

    def check(self) -> None:
        """Errors: BadInput naming the field that cannot be."""
        if self.blocks < 1:
            raise BadInput(f"the host tier has {self.blocks} blocks; it must have at least 1")
        if self.factor < 1:
            raise BadInput(f"an offloaded block has {self.factor} device blocks; it must have at least 1")
        if self.disk and self.policy.store_threshold > 1:
            raise BadInput("a disk behind the host tier takes no store threshold (as vLLM's)")
        self.policy.check()

    def recorded(self) -> dict[str, Any]:
        """The tier as `kv_offloading` in the `meta.json` of a run: options of vLLM's connector, and room."""
        sizes = {"cpu_blocks": self.blocks, "block_size_factor": self.factor}
        tiers = {"secondary_tiers": [{"type": "fs"}]} if self.disk else {}
        return {**sizes, **self.policy.of_connector(), **tiers}
