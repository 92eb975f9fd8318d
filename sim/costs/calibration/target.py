"""The set-up that step costs are for: model, GPU, engine and its options."""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.costs.roofline import Roofline
from pagecast.sim.machine.gpus import Gpu
from pagecast.sim.machine.model_facts import ModelFacts


@dataclass(frozen=True, slots=True)
class Target:
    """A model on a GPU, as one replica runs it. `engine` names the engine whose calibrations apply."""

    model: ModelFacts
    gpu: Gpu
    tensor_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    pipeline_depth: int = 0
    engine: str = "vllm"

    def roofline(
        self, misfits: tuple[tuple[str, str], ...] | None = None, *, transferable: bool = False
    ) -> Roofline:
        """Its costs from first principles; for `misfits` and `transferable` see `Roofline`."""
        return Roofline(
            self.model,
            self.gpu,
            tensor_parallel_size=self.tensor_parallel_size,
            kv_cache_dtype=self.kv_cache_dtype,
            misfits=misfits,
            transferable=transferable,
        )

    @property
    def kv_read_s(self) -> float:
        """Seconds to read one token of the KV cache at the published bandwidth."""
        stored = self.model.kv_bytes_per_token(self.kv_cache_dtype, self.tensor_parallel_size)
        return stored / self.gpu.hbm_bytes_per_s
