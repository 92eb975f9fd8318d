"""The HBM budget: what a GPU's memory is spent on, and how many KV blocks remain.

`hbm_budget` adds up weights, activations at peak, CUDA graphs, libraries and communication buffers, applies
the limit the user chose (vLLM's fraction of the total, TensorRT-LLM's fraction of what is free, or a number
of tokens; the lesser wins), and cuts the rest into blocks. Three figures of bytes per token are kept
apart: theoretical (what the tensors need), allocated (with block rounding and metadata), admissible (with
every reserve: the only one that sizes admission).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from pagecast.sim.activations import LIBRARY_BYTES, MIB, activation_bytes, graph_bytes
from pagecast.sim.core.errors import BadInput
from pagecast.sim.gpus import GIB, Gpu
from pagecast.sim.model_facts import KvGroup, ModelFacts

DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
# The driver's context, made before an engine measures anything: it lies outside of vLLM's fraction.
CONTEXT_BYTES = 550 * MIB
# NCCL's channels and the custom all-reduce's buffers, per GPU (tensor parallelism only).
NCCL_BYTES = 900 * MIB
# Bytes the scheduler and the block tables keep for each block and layer group on the GPU.
_BLOCK_TABLE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the budget: `bytes` on one GPU, and what it is."""

    name: str
    bytes: int
    detail: str


@dataclass(frozen=True, slots=True)
class HbmBudget:
    """Where one GPU's memory goes. `items` add up to `total_bytes`; KV and the unused rest are among them.

    `num_gpu_blocks` counts the blocks that requests can use; vLLM's own figure has one more, the null
    block. `limit` says which option set the size of the KV cache.
    """

    model: str
    gpu: str
    tensor_parallel_size: int
    block_size: int
    total_bytes: int
    items: tuple[Item, ...]
    kv_bytes: int
    block_bytes: int
    num_gpu_blocks: int
    kv_groups: int
    limit: str
    theoretical_bytes_per_token: float
    allocated_bytes_per_token: float
    admissible_bytes_per_token: float
    notes: tuple[str, ...]

    @property
    def kv_tokens(self) -> int:
        """Tokens of one layer group that fit; for plain models, tokens of context."""
        return self.num_gpu_blocks * self.block_size // self.kv_groups


def hbm_budget(
    model: ModelFacts,
    gpu: Gpu,
    *,
    tensor_parallel_size: int = 1,
    gpu_memory_utilization: float | None = None,
    free_gpu_memory_fraction: float | None = None,
    kv_tokens: int | None = None,
    block_size: int = 16,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    max_model_len: int | None = None,
    kv_cache_dtype: str = "auto",
    enforce_eager: bool = False,
) -> HbmBudget:
    """The budget of one GPU of `tensor_parallel_size`.

    Of the three limits the lesser wins; with none given, `gpu_memory_utilization` is 0.9. Errors:
    `BadInput` for a limit out of range, sizes below 1, and a model that leaves no room for one block.
    """
    _check(gpu_memory_utilization, free_gpu_memory_fraction, kv_tokens, block_size, max_num_seqs)
    if gpu_memory_utilization is None and free_gpu_memory_fraction is None and kv_tokens is None:
        gpu_memory_utilization = DEFAULT_GPU_MEMORY_UTILIZATION
    tp = tensor_parallel_size
    model.check_tensor_parallel(tp)
    fixed = _fixed_items(model, tp, max_num_batched_tokens, max_num_seqs, enforce_eager)
    counted = sum(item.bytes for item in fixed)
    context = Item("CUDA context", CONTEXT_BYTES + (NCCL_BYTES if tp > 1 else 0), "driver, before measuring")
    layout = block_layout(model.kv_groups(tp))
    element = model.kv_element_bytes(kv_cache_dtype)
    block_bytes = layout.layers * layout.elements_per_token * block_size * element
    free = gpu.hbm_bytes - counted - context.bytes
    limits: dict[str, float] = {"what is free": free}
    if gpu_memory_utilization is not None:
        limits[f"gpu_memory_utilization {gpu_memory_utilization:g}"] = (
            ceil(gpu.hbm_bytes * gpu_memory_utilization) - counted
        )
    if free_gpu_memory_fraction is not None:
        limits[f"free_gpu_memory_fraction {free_gpu_memory_fraction:g}"] = free * free_gpu_memory_fraction
    if kv_tokens is not None:
        limits[f"kv_tokens {kv_tokens}"] = (ceil(kv_tokens / block_size) * layout.groups + 1) * block_bytes
    limit = min(limits, key=limits.__getitem__)
    blocks = int(limits[limit]) // block_bytes
    if blocks < 2:
        raise BadInput(
            f"{model.name} leaves no room for a KV cache on {gpu.name}: {limit} leaves "
            f"{limits[limit] / GIB:.2f} GiB after {counted / GIB:.2f} GiB of weights and workspace; "
            "raise the limit, tensor_parallel_size, or choose a larger GPU or a smaller weight format"
        )
    kv = blocks * block_bytes
    usable = blocks - 1
    rest = gpu.hbm_bytes - counted - context.bytes - kv
    items = (*fixed, context, Item("KV cache", kv, f"{usable} blocks of {block_size} tokens, 1 null block"),
             Item("margin", rest, "left to other processes and fragmentation"))  # fmt: skip
    theoretical = model.kv_bytes_per_token(kv_cache_dtype, tp)
    allocated = layout.groups * (block_bytes + _BLOCK_TABLE_BYTES) / block_size
    return HbmBudget(
        model=model.name,
        gpu=gpu.name,
        tensor_parallel_size=tp,
        block_size=block_size,
        total_bytes=gpu.hbm_bytes,
        items=items,
        kv_bytes=kv,
        block_bytes=block_bytes,
        num_gpu_blocks=usable,
        kv_groups=layout.groups,
        limit=limit,
        theoretical_bytes_per_token=theoretical,
        allocated_bytes_per_token=allocated,
        admissible_bytes_per_token=gpu.hbm_bytes / (usable * block_size / layout.groups),
        notes=model.notes,
    )


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How layers share blocks: `groups` block tables, each of `layers` layers with equal pages."""

    groups: int
    layers: int
    elements_per_token: int


def block_layout(kv_groups: tuple[KvGroup, ...]) -> BlockLayout:
    """vLLM's layout: layers of one kind in groups of equal size, the last padded; one block serves a group.

    The size is that of the least numerous kind, or of the most numerous if that is less than 1.5 times.
    """
    counts = [group.layers for group in kv_groups]
    size = min(counts)
    if max(counts) < 1.5 * size:
        size = max(counts)
    return BlockLayout(
        groups=sum(-(-count // size) for count in counts),
        layers=size,
        elements_per_token=kv_groups[0].elements_per_token,
    )


def _fixed_items(
    model: ModelFacts, tp: int, max_num_batched_tokens: int, max_num_seqs: int, eager: bool
) -> tuple[Item, ...]:
    graphs = 0 if eager else graph_bytes(model, max_num_seqs, tp)
    activations = activation_bytes(model, max_num_batched_tokens, max_num_seqs, tp)
    return (
        Item("weights", model.weight_bytes(tp), f"{model.params / 1e9:.2f} B in {model.weight_dtype}"),
        Item("activations", activations, f"peak of a step of {max_num_batched_tokens} tokens"),
        Item("CUDA graphs", graphs, "off (eager)" if eager else f"batches to {min(2 * max_num_seqs, 512)}"),
        Item("libraries", LIBRARY_BYTES, "kernels loaded on first use"),
    )


def _check(
    utilization: float | None, fraction: float | None, tokens: int | None, block_size: int, seqs: int
) -> None:
    for name, value in (("gpu_memory_utilization", utilization), ("free_gpu_memory_fraction", fraction)):
        if value is not None and not 0 < value <= 1:
            raise BadInput(f"{name} is {value}; it must lie above 0 and at most 1")
    if tokens is not None and tokens < 1:
        raise BadInput(f"kv_tokens is {tokens}; it must be at least 1")
    if block_size < 1:
        raise BadInput(f"block_size is {block_size}; it must be at least 1")
    if seqs < 1:
        raise BadInput(f"max_num_seqs is {seqs}; it must be at least 1")
