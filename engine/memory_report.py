"""Measured memory of the engine beside the prediction, and the KV blocks that fit in the rest.

The items are those of `pagecast.sim.machine.memory`, so that a start of the engine checks the budget line
by line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from pagecast.engine.options import Options
from pagecast.engine.prompt_graphs import engine_prompt_graphs
from pagecast.engine.spec import ModelSpec
from pagecast.sim.core.errors import BadInput, CannotRunHere
from pagecast.sim.machine.gpus import GIB, gpu
from pagecast.sim.machine.graphs import engine_graphs
from pagecast.sim.machine.graphs import graph_reserve as reserve_of
from pagecast.sim.machine.memory import BudgetOptions, hbm_budget

# Left free beside everything that was measured: the allocator's rounding, and what loads late.
_SLACK_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One item: bytes as predicted (None: not predicted here) and as measured."""

    name: str
    predicted: int | None
    measured: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Where the memory is. `predicted_blocks` is None where the GPU is not one pagecast knows."""

    lines: tuple[Line, ...]
    num_blocks: int
    predicted_blocks: int | None

    def corrected(self, name: str, measured: int) -> MemoryReport:
        """The same with another measurement of one item."""
        lines = [replace(line, measured=measured) if line.name == name else line for line in self.lines]
        return replace(self, lines=tuple(lines))


def graph_sizes(options: Options) -> list[int]:
    """Batch sizes of the decode steps that are captured, up to `max_num_seqs` itself."""
    if options.enforce_eager:
        return []
    return engine_graphs(options.max_num_seqs)


def prompt_graph_sizes(options: Options, spec: ModelSpec) -> list[int]:
    """Token counts of the steps with prompts that are captured."""
    if options.enforce_eager:
        return []
    return engine_prompt_graphs(
        options.max_num_batched_tokens, spec.facts.matmul_flops_per_token() // options.tensor_parallel_size
    )


def graph_reserve(options: Options, spec: ModelSpec) -> int:
    """Bytes kept for the graphs, which are captured when the KV tensor is there."""
    return reserve_of(len(graph_sizes(options)) + len(prompt_graph_sizes(options, spec)))


def fit_blocks(
    total: int, free: int, used: dict[str, int], block_bytes: int, max_model_len: int, options: Options
) -> int:
    """Blocks in what `gpu_memory_utilization` of `total` leaves after `used`, and in what is free.

    `free` is what is free now, with the weights loaded. Errors: CannotRunHere where one request of
    `max_model_len` tokens doesn't fit, with what would.
    """
    size = options.block_size
    needed = -(-max_model_len // size) * block_bytes
    later = used.get("activations", 0) + used.get("CUDA graphs", 0)
    allowed = int(total * options.gpu_memory_utilization) - sum(used.values())
    room = min(allowed, free - later - _SLACK_BYTES)
    if room >= needed:
        return room // block_bytes
    spent = ", ".join(f"{name} {value / GIB:.2f}" for name, value in used.items())
    tokens = max(room, 0) // block_bytes * size
    remedies = [f"max_model_len of at most {tokens}"] if tokens else []
    share = (sum(used.values()) + needed) / total
    if allowed < needed and free - later - _SLACK_BYTES >= needed and share <= 1:
        remedies.append(f"gpu_memory_utilization of {share + 0.005:.2f}")
    remedies.append("a smaller max_num_batched_tokens, or a GPU with more memory")
    raise CannotRunHere(
        f"no room for the KV of one request of {max_model_len} tokens ({needed / GIB:.2f} GiB): "
        f"{max(room, 0) / GIB:.2f} GiB of {total / GIB:.2f} are left after {spent} GiB; "
        f"what would fit: {'; '.join(remedies)}"
    )


class Meter:
    """Reads a GPU's memory as the engine starts."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        self.device = device
        self.free, self.total = torch.cuda.mem_get_info(device)
        self.used: dict[str, int] = {}
        self.context = self._outside()

    def _outside(self) -> int:
        """Bytes in use that the allocator doesn't know: the context, libraries, other processes."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def weights_loaded(self) -> None:
        """To be called when the weights are on the device."""
        self.used["weights"] = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def rehearsed(self) -> None:
        """To be called after a step as large as any."""
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        self.used["activations"] = peak - sum(self.used.values())
        torch.cuda.empty_cache()
        self.used["libraries"] = max(self._outside() - self.context, 0)
        self.free, _ = torch.cuda.mem_get_info(self.device)


def predicted_items(spec: ModelSpec, gpu_name: str, options: Options) -> tuple[dict[str, int], int | None]:
    """The budget's bytes by item and its blocks; empty and None for a GPU that pagecast doesn't know."""
    try:
        budget = hbm_budget(
            spec.facts,
            gpu(gpu_name),
            replace(BudgetOptions.of(options), enforce_eager=True, model_runner="v2"),
        )
    except BadInput:
        return {}, None
    items = {item.name: item.bytes for item in budget.items}
    graphs = graph_reserve(options, spec)
    items["CUDA graphs"] = graphs
    items["KV cache"] -= graphs
    return items, budget.num_gpu_blocks - graphs // budget.layout.block_bytes


def report(
    spec: ModelSpec, options: Options, gpu_name: str, measured: dict[str, int], num_blocks: int
) -> MemoryReport:
    """Both sides, item by item."""
    predicted, blocks = predicted_items(spec, gpu_name, options)
    lines = tuple(Line(name, predicted.get(name), value) for name, value in measured.items())
    return MemoryReport(lines, num_blocks, blocks)
