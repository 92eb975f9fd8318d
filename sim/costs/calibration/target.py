"""The set-up that step costs are for: model, GPU, engine and its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.roofline import Roofline
from pagecast.sim.machine.gpus import Gpu
from pagecast.sim.machine.graphs import capture_sizes
from pagecast.sim.machine.model_facts import ModelFacts

if TYPE_CHECKING:
    from pagecast.sim.costs.measured.corrections import Corrections
    from pagecast.sim.costs.measured.costs import MeasuredCosts


@dataclass(frozen=True, slots=True)
class Target:
    """A model on a GPU, as one replica runs it. `engine` names the engine whose calibrations apply.

    `expert_parallel`: whole experts are spread over the GPUs, instead of slices of all of them.
    `moe_data_parallel_size`: ranks like this one that the experts are spread over.
    `gpu_link_gb_per_s`: what a GPU sends to its peers (None: what is usual). `host_time_factor`: the host's
    time of synchronous steps, against the one that measured operations count with (None: not known). A
    calibration holds for the link and the host that it was recorded on.
    """

    model: ModelFacts
    gpu: Gpu
    tensor_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    pipeline_depth: int = 0
    engine: str = "vllm"
    max_num_seqs: int = 256
    expert_parallel: bool = False
    moe_data_parallel_size: int = 1
    gpu_link_gb_per_s: float | None = None
    host_time_factor: float | None = None

    def roofline(
        self,
        misfits: tuple[tuple[str, str], ...] | None = None,
        *,
        unmeasured: str | None = None,
    ) -> Roofline:
        """Its costs from first principles; for the arguments see `Roofline`.

        Errors: BadInput for data-parallel ranks, which it does not know.
        """
        if self.moe_data_parallel_size > 1:
            raise BadInput(
                f"moe_data_parallel_size needs measured operations: {unmeasured or 'give --costs measured'}"
            )
        link = self._link_bytes_per_s
        return Roofline(
            self.model,
            self.gpu if link is None else replace(self.gpu, link_bytes_per_s=link),
            tensor_parallel_size=self.tensor_parallel_size,
            kv_cache_dtype=self.kv_cache_dtype,
            misfits=misfits,
            unmeasured=unmeasured,
        )

    def measured(
        self,
        misfits: tuple[tuple[str, str], ...] | None = None,
        corrections: Corrections | None = None,
    ) -> MeasuredCosts:
        """Its costs composed of measured operations. Errors: NotMeasured with what is missing."""
        from pagecast.sim.costs.measured.compose import compose
        from pagecast.sim.costs.measured.costs import MeasuredCosts
        from pagecast.sim.costs.measured.host import HOST

        operations = compose(
            self.model,
            self.gpu,
            self.engine,
            tensor_parallel_size=self.tensor_parallel_size,
            expert_parallel=self.expert_parallel,
            moe_data_parallel_size=self.moe_data_parallel_size,
            kv_cache_dtype=self.kv_cache_dtype,
            link_bytes_per_s=self._link_bytes_per_s,
        )
        vllm = self.engine == "vllm"
        return MeasuredCosts(
            operations,
            host=HOST if self.host_time_factor is None else HOST.slower(self.host_time_factor),
            host_known=self.host_time_factor is not None,
            pipeline_depth=self.pipeline_depth,
            graph_sizes=tuple(capture_sizes(self.max_num_seqs, self.model.model_type if vllm else "")),
            misfits=misfits,
            corrections=corrections,
        )

    @property
    def _link_bytes_per_s(self) -> float | None:
        return None if self.gpu_link_gb_per_s is None else self.gpu_link_gb_per_s * 1e9

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that corrections must have been fitted for to apply."""
        given: dict[str, Any] = {}
        if self.moe_data_parallel_size > 1:
            given["moe_data_parallel_size"] = self.moe_data_parallel_size
        if self.gpu_link_gb_per_s is not None:
            given["gpu_link_gb_per_s"] = self.gpu_link_gb_per_s
        if self.host_time_factor is not None:
            given["host_time_factor"] = self.host_time_factor
        return {
            **given,
            "model": self.model.name,
            "gpu": self.gpu.name,
            "engine": self.engine,
            "tensor_parallel_size": self.tensor_parallel_size,
            "expert_parallel": self.expert_parallel,
            "kv_cache_dtype": self.kv_cache_dtype,
        }
