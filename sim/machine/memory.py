"""The HBM budget: what a GPU's memory is spent on, and how many KV blocks remain.

`hbm_budget` adds up weights, activations at peak, libraries, CUDA graphs and communication buffers, applies
the limit the user chose (vLLM's fraction of the total, TensorRT-LLM's fraction of what is free, or a number
of tokens; the lesser wins) and cuts the rest into blocks. It follows what vLLM 0.24 counts inside its
fraction, and what it leaves to the margin.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any, NamedTuple

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import KvKind
from pagecast.sim.machine import activations
from pagecast.sim.machine.block_layout import BlockLayout, model_layout
from pagecast.sim.machine.gpus import GIB, Gpu
from pagecast.sim.machine.graphs import capture_sizes
from pagecast.sim.machine.loaded_weights import MIB, loaded_weight_bytes
from pagecast.sim.machine.model_facts import ModelFacts
from pagecast.sim.note import CautionNote, Note

DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
# The driver's context on one GPU, made before an engine measures anything. Measured: H200, CUDA 13.
CONTEXT_BYTES = 619 * MIB
# NCCL's channels on each GPU of several, likewise made before: 1.50 GiB in logs of vLLM 0.19 (H100, TP 2).
NCCL_BYTES = 1536 * MIB
# Buffers of the all-reduce and of NCCL that an engine's profile finds outside torch: 2.07 GiB (TP 2) to
# 2.13 GiB (TP 4) in those logs, where one GPU alone has 0.25 GiB. A start on two H200s without NVLink
# multicast (vLLM 0.24) had next to none: `uncertain_blocks` says so.
ALL_REDUCE_BYTES = 1894 * MIB
# Kernels loaded on first use: cuBLAS's take 66 MiB (measured, H200), attention's, Triton's and the engine's
# about as much. Logs of warm starts leave 0.1 GiB (RTX 4090) to 0.3 GiB (H200) by subtraction.
LIBRARY_BYTES = 128 * MIB
# What compiling holds while an engine profiles. A start that finds its compile cache has none, a first start
# of the same configuration had 0.5 GiB (H200) to 0.9 GiB (RTX 4090) more: the middle.
COMPILE_BYTES = 400 * MIB
# How far the KV cache of a real start has been from this budget, either way: see
# tests/sim/machine/test_memory.py.
UNCERTAIN_BYTES = 768 * MIB
_TABLE_ENTRY_BYTES = 4  # one block in a request's block table on the GPU
_LEAST_BLOCKS = 2  # a usable one and the null block
# Where a cache has no room but would have with these, they are named as what takes it.
_USUAL_BLOCK_SIZE, _USUAL_BATCHED_TOKENS = 16, 8192
_BEFORE_LOADING = ("CUDA context", "NCCL")  # items that are there before an engine loads weights
_FP8_BY_ITSELF = ("glm_moe_dsa", "glm5_next_text")  # their KV, on data centre Blackwell
_STATIC = ("weights", "libraries")  # items that SGLang's fraction is for, beside KV
_MARGIN = "margin"  # the item that is left


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the budget on one GPU. `counted`: inside the fraction that the engine may use."""

    name: str
    bytes: int
    detail: str
    counted: bool = True


@dataclass(frozen=True, slots=True)
class BytesPerToken:
    """Three figures, kept apart. Only `admissible` sizes admission.

    `theoretical`: the tensors of one token. `allocated`: with the rounding to blocks (half a block for each
    group on average) and block tables. `admissible`: the whole KV item and its tables, null block included,
    divided by the tokens of as many whole sequences as it admits. All are for sequences of `sequence_tokens`.
    """

    sequence_tokens: int
    theoretical: float
    allocated: float
    admissible: float


@dataclass(frozen=True, slots=True)
class HbmBudget:
    """Where one GPU's memory goes: `items` add up to `total_bytes`, the KV cache and the margin among them.

    `num_gpu_blocks` counts the blocks that requests can use; vLLM's own figure has one more, the null
    block. `limit` says which option set the size of the KV cache.
    """

    model: str
    gpu: str
    tensor_parallel_size: int
    total_bytes: int
    items: tuple[Item, ...]
    limit: str
    kv_bytes: int
    num_gpu_blocks: int
    layout: BlockLayout
    kv_tokens: int
    bytes_per_token: BytesPerToken
    notes: tuple[str, ...]

    @property
    def kv_groups(self) -> int:
        """Block tables of a sequence: 1 for plain models, more where layers keep different windows."""
        return self.layout.groups

    @property
    def uncertain_blocks(self) -> int:
        """Blocks by which a real start may differ: compile caches, drivers, what else uses the GPU."""
        if self.limit.startswith("kv_tokens"):
            return 0
        uncertain = UNCERTAIN_BYTES if self.tensor_parallel_size == 1 else ALL_REDUCE_BYTES
        return -(-uncertain // self.layout.block_bytes)

    @property
    def out_of_memory(self) -> Note | None:
        """A note where the items do not fit, so the engine runs out of memory at its start; else None."""
        margin_bytes = next(item.bytes for item in self.items if item.name == _MARGIN)
        if margin_bytes >= 0:
            return None
        return CautionNote("out_of_memory", gpu=self.gpu, limit=self.limit, missing_gib=-margin_bytes / GIB)

    def shortage(self, longest: int, held_tokens: int) -> str:
        """Why the KV cache holds no sequence of `longest` tokens, as vLLM says it; empty where it does.

        `held_tokens`: those of steps, which layers with a window hold beside it.
        """
        blocks = self.num_gpu_blocks + 1  # vLLM counts its null block

        def needed(tokens: int) -> int:
            return _blocks_of_longest(self.layout, held_tokens, tokens)

        if needed(longest) <= blocks:
            return ""
        fits = bisect_right(range(longest), blocks, key=needed) - 1
        gib = needed(longest) * self.layout.block_bytes / GIB
        return (
            f"to serve at least one request with the model's max seq len ({longest}), {gib:.2f} GiB KV cache "
            f"is needed, which is larger than the available KV cache memory ({self.kv_bytes / GIB:.2f} GiB, "
            f"give or take {self.uncertain_blocks * self.layout.block_bytes / GIB:.2f} on a real start); the "
            f"estimated maximum model length is {fits}: lower max_model_len, or raise gpu_memory_utilization"
        )

    def sequences(self, tokens: int) -> int:
        """How many sequences of `tokens` each the KV cache holds at once."""
        return self.num_gpu_blocks // self.layout.blocks_of(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOptions:
    """The engine's options that its memory depends on.

    `moe_data_parallel_size`: ranks of `tensor_parallel_size` GPUs that share experts. `context_ranks`: the
    GPUs among those that share a sequence's tokens. Of the three limits the
    lesser wins; with none given, `gpu_memory_utilization` is 0.9. `static_fraction`: that is a fraction of
    what is free before loading, for weights and KV alone (SGLang's `mem_fraction_static`). `held_batches`:
    layers with a window hold the tokens of so many steps beside it. `sequence_tokens`: the length of the
    sequences that bytes per token are told for.
    """

    tensor_parallel_size: int = 1
    moe_data_parallel_size: int = 1
    context_ranks: int = 1
    gpu_memory_utilization: float | None = None
    free_gpu_memory_fraction: float | None = None
    kv_tokens: int | None = None
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    held_batches: int = 1
    max_model_len: int | None = None
    kv_cache_dtype: str = "auto"
    disable_hybrid_kv_cache_manager: bool = False
    static_fraction: bool = False
    enforce_eager: bool = False
    model_runner: str = "auto"
    sequence_tokens: int = 2048

    @property
    def held_tokens(self) -> int:
        """Tokens of steps that layers with a window hold beside it."""
        return self.held_batches * self.max_num_batched_tokens

    @classmethod
    def of(cls, source: object, **more: Any) -> BudgetOptions:
        """Those among the attributes of a scenario, or of a replica's limits; `more`: those that it lacks."""
        names = [field.name for field in fields(cls) if hasattr(source, field.name)]
        return cls(**{**{name: getattr(source, name) for name in names}, **more})

    def check(self) -> None:
        """Errors: BadInput for a limit out of range, and sizes below 1."""
        for name in ("gpu_memory_utilization", "free_gpu_memory_fraction"):
            fraction = getattr(self, name)
            if fraction is not None and not 0 < fraction <= 1:
                raise BadInput(f"{name} is {fraction}; it must lie above 0 and at most 1")
        for name in _SIZES:
            size = getattr(self, name)
            if size is not None and size < 1:
                raise BadInput(f"{name} is {size}; it must be at least 1")

    def layout(self, model: ModelFacts, block_size: int) -> BlockLayout:
        """How blocks of `block_size` tokens lie on one GPU."""
        return model_layout(
            model,
            block_size,
            tensor_parallel_size=self.tensor_parallel_size,
            kv_cache_dtype=self.kv_cache_dtype,
            disable_hybrid_kv_cache_manager=self.disable_hybrid_kv_cache_manager,
            context_ranks=self.context_ranks,
        )


_SIZES = (
    "moe_data_parallel_size",
    "kv_tokens",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "held_batches",
    "max_model_len",
    "sequence_tokens",
)


def hbm_budget(model: ModelFacts, gpu: Gpu, options: BudgetOptions | None = None) -> HbmBudget:
    """The budget of one GPU. Errors: BadInput for options out of range, and no room for a block."""
    options = options or BudgetOptions()
    options.check()
    model.check_tensor_parallel(options.tensor_parallel_size)
    layout = options.layout(model, options.block_size)
    fixed = _fixed_items(model, gpu, options)
    limits = _limits(gpu, fixed, layout, options)
    limit = min(limits, key=limits.__getitem__)
    blocks = int(limits[limit] // layout.block_bytes)
    if blocks < _LEAST_BLOCKS:
        usual = options.layout(model, min(options.block_size, _USUAL_BLOCK_SIZE))
        shortage = _Shortage(limit, limits[limit], layout, usual)
        raise BadInput(_no_room(model, gpu, fixed, options.max_num_batched_tokens, shortage))
    kv_bytes, usable = blocks * layout.block_bytes, blocks - 1
    rest = gpu.hbm_bytes - kv_bytes - sum(item.bytes for item in fixed)
    detail = f"{usable:,} blocks of {layout.block_size} tokens and the null block"
    notes = [*model.notes, *_latent_dtype_notes(model, gpu, options.kv_cache_dtype)]
    if layout.groups > 1:
        notes.append(f"layers keep different windows: {layout.groups} block tables per sequence")
    return HbmBudget(
        model=model.name,
        gpu=gpu.name,
        tensor_parallel_size=options.tensor_parallel_size,
        total_bytes=gpu.hbm_bytes,
        items=(
            *fixed,
            Item("KV cache", kv_bytes, detail),
            Item(_MARGIN, rest, "unused: fragmentation, other processes", counted=False),
        ),
        limit=limit,
        kv_bytes=kv_bytes,
        num_gpu_blocks=usable,
        layout=layout,
        kv_tokens=_tokens(usable, layout, options.held_tokens, options.max_model_len or model.max_position),
        bytes_per_token=_bytes_per_token(model, layout, blocks, options),
        notes=tuple(notes),
    )


def _latent_dtype_notes(model: ModelFacts, gpu: Gpu, kv_cache_dtype: str) -> list[str]:
    """The KV dtype that vLLM 0.33 chooses by itself for sparse latent attention, by this GPU's kernels."""
    fp8_here = model.model_type in _FP8_BY_ITSELF and gpu.data_center_blackwell
    if fp8_here and kv_cache_dtype == "auto" and model.kv_element_bytes(kv_cache_dtype) == 2:
        return ["on this GPU vLLM keeps this model's KV in fp8 unless told otherwise: give kv_cache_dtype"]
    return []


def _bytes_per_token(
    model: ModelFacts, layout: BlockLayout, blocks: int, options: BudgetOptions
) -> BytesPerToken:
    """The figures for a cache of `blocks`, the null block included."""
    tokens, usable = options.sequence_tokens, blocks - 1
    blocks_each = 0.0
    for spec in layout.specs:
        if spec.kind in (KvKind.STATE, KvKind.RING, KvKind.CHECKPOINT):
            blocks_each += spec.states
            continue
        window_tokens = min(spec.window, tokens) if spec.window else tokens
        blocks_each += (window_tokens + (spec.block_size - 1) / 2) / spec.block_size
    whole = int(usable / blocks_each) * tokens
    theoretical = model.kv_bytes_of_sequence(tokens, options.kv_cache_dtype, options.tensor_parallel_size)
    reserved = blocks * layout.block_bytes + usable * _TABLE_ENTRY_BYTES
    return BytesPerToken(
        sequence_tokens=tokens,
        theoretical=theoretical / tokens / options.context_ranks,
        allocated=blocks_each * (layout.block_bytes + _TABLE_ENTRY_BYTES) / tokens,
        admissible=reserved / whole if whole else float("inf"),
    )


def _tokens(blocks: int, layout: BlockLayout, held_tokens: int, max_model_len: int) -> int:
    """Tokens that fit: those of sequences of `max_model_len` where layers keep different windows.

    Each of these counts, as in vLLM's log, the blocks that it holds at most: a window and the steps'.
    """
    if layout.plain:
        return blocks * layout.block_size
    return blocks * max_model_len // _blocks_of_longest(layout, held_tokens, max_model_len)


def _blocks_of_longest(layout: BlockLayout, held_tokens: int, max_model_len: int) -> int:
    """The blocks that a sequence of `max_model_len` tokens holds at most."""
    return sum(
        spec.most_blocks(held_tokens, max_model_len) if spec.window else spec.blocks_of(max_model_len)
        for spec in layout.specs
    )


def _limits(
    gpu: Gpu, fixed: tuple[Item, ...], layout: BlockLayout, options: BudgetOptions
) -> dict[str, float]:
    """Bytes that each limit leaves for the KV cache."""
    counted = sum(item.bytes for item in fixed if item.counted)
    graphs = sum(item.bytes for item in fixed if item.name == "CUDA graphs")
    free = gpu.hbm_bytes - sum(item.bytes for item in fixed)
    limits: dict[str, float] = {"free memory": free}
    utilization, fraction = options.gpu_memory_utilization, options.free_gpu_memory_fraction
    kv_tokens = options.kv_tokens
    if utilization is None and fraction is None and kv_tokens is None:
        utilization = DEFAULT_GPU_MEMORY_UTILIZATION
    if utilization is not None:
        before = sum(item.bytes for item in fixed if item.name in _BEFORE_LOADING)
        whole = gpu.hbm_bytes - before if options.static_fraction else gpu.hbm_bytes
        budget = ceil(whole * utilization)
        limits[f"gpu_memory_utilization {utilization:g}"] = budget - counted
        del limits["free memory"]  # vLLM counts only what lies inside its fraction
    if fraction is not None:
        # TensorRT-LLM takes its fraction of what is free before graphs are captured.
        limits[f"free_gpu_memory_fraction {fraction:g}"] = (free + graphs) * fraction
    if kv_tokens is not None:
        limits[f"kv_tokens {kv_tokens}"] = (layout.blocks_of(kv_tokens) + 1) * layout.block_bytes
    return limits


def _fixed_items(model: ModelFacts, gpu: Gpu, options: BudgetOptions) -> tuple[Item, ...]:
    tp, dp, eager = options.tensor_parallel_size, options.moe_data_parallel_size, options.enforce_eager
    tokens, seqs = options.max_num_batched_tokens, options.max_num_seqs
    lean = activations.lean_runner(model, options.model_runner)
    graphs = 0 if eager else activations.graph_bytes(model, gpu, seqs, tp)
    state = activations.sampler_state_bytes(model, seqs) if lean else 0
    items = [
        Item(
            "weights",
            loaded_weight_bytes(model, tp, options.max_model_len, dp),
            f"{model.params / 1e9:.2f} B parameters in {model.weight_dtype}",
        ),
        Item(
            "activations",
            activations.activation_bytes(model, gpu, tokens, seqs, tp, lean),
            f"peak of a step of {tokens} tokens",
        ),
        Item(
            "sparse attention",
            activations.sparse_workspace_bytes(
                model, options.max_model_len or model.max_position, options.kv_cache_dtype
            ),
            "gathered keys of prompts",
        ),
        Item("libraries", LIBRARY_BYTES, "kernels loaded on first use"),
        Item("compilation", 0 if eager else COMPILE_BYTES, "none to 0.9 GiB; most on a first start"),
        Item("CUDA graphs", graphs, f"{len(capture_sizes(seqs))} batch sizes", counted=not lean),
        Item("sampler", state, "token counts for penalties", counted=False),
        Item("CUDA context", CONTEXT_BYTES, "the driver's", counted=False),
        Item("communication", ALL_REDUCE_BYTES if tp * dp > 1 else 0, "all-reduce and NCCL buffers"),
        Item("NCCL", NCCL_BYTES if tp * dp > 1 else 0, "its channels", counted=False),
    ]
    if options.static_fraction:
        items = [replace(item, counted=item.name in _STATIC) for item in items]
    return tuple(item for item in items if item.bytes)


class _Shortage(NamedTuple):
    """A limit that leaves too few bytes for blocks of `layout`; `usual` has blocks of the usual size."""

    limit: str
    left: float
    layout: BlockLayout
    usual: BlockLayout


def _no_room(
    model: ModelFacts, gpu: Gpu, fixed: tuple[Item, ...], step_tokens: int, shortage: _Shortage
) -> str:
    """What takes the room, and what to change; `step_tokens`: the most tokens of a step."""
    limit, left, layout, usual = shortage
    weights, activation = (
        sum(item.bytes for item in fixed if item.name == name) for name in ("weights", "activations")
    )
    needed = _LEAST_BLOCKS * usual.block_bytes
    spared = activation * max(1 - _USUAL_BATCHED_TOKENS / step_tokens, 0)
    text = f"{model.name} leaves no room for a KV cache on {gpu.name}: "
    if weights > gpu.hbm_bytes:
        return text + (
            f"its weights take {weights / GIB:.2f} GiB on each GPU, which has {gpu.hbm_bytes / GIB:.2f} GiB; "
            "raise tensor_parallel_size, or choose a larger GPU or a smaller weight format"
        )
    if left < needed <= left + spared:
        return text + (
            f"activations of a step of {step_tokens:,} tokens take {activation / GIB:.2f} GiB; lower "
            "max_num_batched_tokens"
        )
    if needed <= left:
        return text + (
            f"a block of {layout.block_size:,} tokens takes {layout.block_bytes / GIB:.2f} GiB, and {limit} "
            f"leaves {left / GIB:.2f} GiB for {_LEAST_BLOCKS} of them or more (one is the null block); lower "
            "block_size"
        )
    counted = sum(item.bytes for item in fixed if item.counted)
    return text + (
        f"{limit} leaves {left / GIB:.2f} GiB after {counted / GIB:.2f} GiB of weights and workspace; raise "
        "the limit or tensor_parallel_size, or choose a larger GPU or a smaller weight format"
    )
