"""Measured costs of a set-up: which table, which kernels, which of the engine's habits."""

from __future__ import annotations

from pagecast.sim.costs.measured.missing import NotMeasured
from pagecast.sim.costs.measured.operations import Operations
from pagecast.sim.costs.measured.products import BF16
from pagecast.sim.costs.measured.tables import MeasuredTable, paths, table
from pagecast.sim.machine.gpus import Gpu
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.machine.model_facts import ModelFacts

# The lane of each engine that an answer may be asked for; nano-vllm runs on the same libraries as vLLM.
LANES = {"vllm": "vllm", "nano-vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm"}


def compose(
    model: ModelFacts,
    gpu: Gpu,
    engine: str,
    *,
    tensor_parallel_size: int = 1,
    expert_parallel: bool = False,
    moe_data_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    link_bytes_per_s: float | None = None,
) -> Operations:
    """The operations of a model on an engine and GPU, whose peers are reached at `link_bytes_per_s` at most.

    Experts are spread over the GPUs of `moe_data_parallel_size` ranks: whole ones with `expert_parallel`, or
    else slices of all. Errors: NotMeasured with what is missing.
    """
    tp, dp = tensor_parallel_size, moe_data_parallel_size
    formats = {bits for _, bits in model.weight_bits if bits < 8 * model.dtype_bytes}
    for has, layers in (
        (model.attention.indexer and model.attention.mla is None, "sparse attention"),
        (model.untimed, model.untimed),
        (model.more_attention, "attention with heads of several shapes"),
        (model.moe and model.moe.latent, "experts on a latent"),
        (len(formats) > 1, "matrices of several formats"),
    ):
        if has:
            raise NotMeasured(f"operations of {layers} were not measured")
    return Operations(
        lane(gpu.name, engine),
        model,
        gpu,
        tp=tp,
        ep=tp * dp if expert_parallel else 1,
        dp=dp,
        kv_dtype=_kv_dtype(model, kv_cache_dtype),
        link_bytes_per_s=link_bytes_per_s,
    )


def lane(gpu: str, engine: str) -> MeasuredTable:
    """The table of an engine on a GPU. Errors: NotMeasured."""
    name = LANES.get(engine) or ("trtllm" if engine.startswith("trtllm") else None)
    if name is None:
        raise NotMeasured(f"operations of the engine {engine} were not measured")
    measured_table = table(gpu, name)
    if measured_table is None:
        measured = ", ".join(find_gpu(key).name for key, engine in paths() if engine == name)
        raise NotMeasured(f"operations of {name} were not measured on {gpu}, but on {measured}")
    return measured_table


def _kv_dtype(model: ModelFacts, kv_cache_dtype: str) -> str:
    size = model.kv_element_bytes(kv_cache_dtype)
    if size == 2:
        return BF16
    if size == 1:
        return "fp8"
    raise NotMeasured(f"a KV cache in {kv_cache_dtype} was not measured")
