"""Loading of a model: its device, its weights, and the KV cache in the memory that remains."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from pagecast.engine import attention, weights
from pagecast.engine.host_tier import HostTier, host_places
from pagecast.engine.memory_report import (
    MemoryReport,
    Meter,
    fit_blocks,
    graph_reserve,
    graph_sizes,
    prompt_graph_sizes,
    report,
)
from pagecast.engine.model import Decoder
from pagecast.engine.options import Options
from pagecast.engine.rope import most_positions
from pagecast.engine.runner import Runner
from pagecast.engine.sequence import Sequence
from pagecast.engine.shard import WHOLE, Shard, check_shards
from pagecast.engine.spec import ModelSpec
from pagecast.engine.text import tokenizer
from pagecast.sim.core.errors import BadInput, CannotRunHere
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.request import Request
from pagecast.sim.machine.gpus import GIB
from torch import Tensor

CPU_BLOCKS = 1024  # KV blocks on the CPU where the options set none
_MEMINFO = Path("/proc/meminfo")


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run, its KV tensor, and the limits that follow."""

    spec: ModelSpec
    model: Decoder
    kv: Tensor
    backend: str
    limits: Limits
    max_model_len: int
    tokenizer: Any
    options: Options
    memory: MemoryReport
    host: HostTier | None = None

    @property
    def device(self) -> torch.device:
        """The device that holds weights and KV cache."""
        return self.kv.device

    def runner(self, sequences: dict[Request, Sequence]) -> Runner:
        """A runner of this model for `sequences`, its CUDA graphs captured."""
        runner = make_runner(self.model, self.kv, self.backend, self.max_model_len, self.options, sequences)
        if self.device.type == "cuda":
            before, _ = torch.cuda.mem_get_info(self.device)
            runner.capture(graph_sizes(self.options), prompt_graph_sizes(self.options, self.spec))
            after, _ = torch.cuda.mem_get_info(self.device)
            self.memory = self.memory.corrected("CUDA graphs", max(before - after, 0))
        runner.host = self.host
        return runner


def make_runner(
    model: Decoder,
    kv: Tensor,
    backend: str,
    max_len: int,
    options: Options,
    sequences: dict[Request, Sequence],
) -> Runner:
    """A runner for the batch sizes that `options` allow."""
    rows, tokens = options.max_num_seqs, options.max_num_batched_tokens
    return Runner(
        model,
        kv,
        backend,
        sequences,
        max_rows=rows,
        max_tokens=tokens,
        max_len=max_len,
        most_drafts=options.most_drafts,
    )


def load(name: str, options: Options, shard: Shard = WHOLE) -> LoadedModel:
    """Loads a share of the model `name` as `options` say. Errors: BadInput, CannotRunHere."""
    device = find_device(options.device, shard.rank if shard.size > 1 else None)
    spec = ModelSpec.find(name)
    check_shards(spec.facts, shard.size, by_expert=shard.by_expert)
    max_len = _max_len(spec, options)
    backend = attention.choose(options.attention, device, options.block_size)
    dtype = find_dtype(spec, options.dtype, device)
    meter = Meter(device) if device.type == "cuda" else None
    model = make_model(spec, dtype, device, options, shard)
    blocks, measured = options.num_blocks or CPU_BLOCKS, {"weights": weight_bytes(model)}
    if meter is not None:
        blocks, measured = _measure(meter, spec, model, dtype, backend, max_len, options)
    blocks = shard.least(blocks)
    kv = make_kv(spec, blocks, options.block_size, _kv_dtype(options, dtype), device, shard.size)
    measured["KV cache"] = kv.nbytes
    device_name = torch.cuda.get_device_name(device) if meter is not None else "CPU"
    memory = report(spec, options, device_name, measured, blocks)
    host = make_host_tier(kv, options, shard.size)
    limits = options.limits(blocks, max_len, 0 if host is None else host.places)
    return LoadedModel(
        spec, model, kv, backend, limits, max_len, tokenizer(spec.folder), options, memory, host
    )


def make_host_tier(kv: Tensor, options: Options, shards: int = 1) -> HostTier | None:
    """Host memory for one of `shards` GPUs' KV blocks, which take what `options` ask for together.

    Errors: BadInput, CannotRunHere.
    """
    if options.kv_offloading_size is None:
        return None
    host = HostTier(kv, host_places(options.kv_offloading_size, shards * kv.nbytes // kv.shape[1]))
    host.warm_up()
    return host


def _measure(
    meter: Meter,
    spec: ModelSpec,
    model: Decoder,
    dtype: torch.dtype,
    backend: str,
    max_len: int,
    options: Options,
) -> tuple[int, dict[str, int]]:
    """The KV blocks that fit, and the bytes of all else on the GPU, measured by running the largest step."""
    meter.weights_loaded()
    one_block = make_kv(
        spec, 1, options.block_size, _kv_dtype(options, dtype), meter.device, model.shard.size
    )
    tokens = options.max_num_batched_tokens
    try:
        make_runner(model, one_block, backend, max_len, options, {}).rehearse(tokens)
    except torch.OutOfMemoryError:
        raise CannotRunHere(
            f"a step of max_num_batched_tokens {tokens} doesn't fit beside "
            f"{meter.used['weights'] / GIB:.2f} GiB of weights in {meter.total / GIB:.2f} GiB; lower it, "
            "or use a GPU with more memory"
        ) from None
    meter.rehearsed()
    used = {**meter.used, "CUDA graphs": graph_reserve(options, spec)}
    block_bytes = one_block.nbytes
    blocks = options.num_blocks or fit_blocks(meter.total, meter.free, used, block_bytes, max_len, options)
    return blocks, {**used, "CUDA context": meter.context}


def check_start(name: str, options: Options) -> None:
    """Checks that an engine can start on these GPUs, before any process is started. Errors: BadInput,
    CannotRunHere."""
    size = options.tensor_parallel_size
    spec = ModelSpec.find(name)
    check_shards(spec.facts, size, by_expert=options.enable_expert_parallel)
    device = find_device(options.device)
    if device.type == "cuda":
        check_gpus(size)


def find_device(name: str, rank: int | None = None) -> torch.device:
    """The device called `name`; with a `rank`, the GPU of that number, which becomes the current one.

    Errors: CannotRunHere where `name` is not "cpu" and there is no GPU, or none of that number.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CannotRunHere("no CUDA GPU here; run where there is one, or a small model with --device cpu")
    if rank is not None:
        check_gpus(rank + 1)
        torch.cuda.set_device(rank)
    return torch.device("cuda", torch.cuda.current_device())


def check_gpus(size: int) -> None:
    """Errors: CannotRunHere where fewer than `size` GPUs are visible."""
    count = torch.cuda.device_count()
    if count < size:
        raise CannotRunHere(f"tensor_parallel_size {size} needs as many GPUs; {count} can be seen here")


def find_dtype(spec: ModelSpec, name: str, device: torch.device) -> torch.dtype:
    """The dtype called `name`; `auto` is the checkpoint's on a GPU and float32 on the CPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else {"fp16": "float16"}.get(spec.facts.dtype, "bfloat16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def make_model(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, options: Options, shard: Shard = WHOLE
) -> Decoder:
    """A share of the model with its weights on the device.

    Errors: BadInput where the folder has none, CannotRunHere where there is no room for them.
    """
    if spec.folder is None and not options.random_weights:
        raise BadInput(f"{spec.facts.name}: no such folder; give one that holds weights, or --random-weights")
    needed = weight_bytes(_uninitialised(spec, dtype, torch.device("meta"), shard))

    def too_large() -> str:
        return f"the weights of {spec.facts.name} ({needed / GIB:.2f} GiB) don't fit: {_room(device)}"

    with _room_for(needed, device, too_large), torch.no_grad():
        model = _uninitialised(spec, dtype, device, shard)
        if options.random_weights or spec.folder is None:
            weights.randomise(model, options.seed)
        else:
            weights.load(model, spec.folder)
        model.fold_norms()
    return model.eval()


def _uninitialised(spec: ModelSpec, dtype: torch.dtype, device: torch.device, shard: Shard) -> Decoder:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Decoder(spec, shard)
    finally:
        torch.set_default_dtype(before)


def _kv_dtype(options: Options, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache of a model that computes in `dtype`."""
    return torch.float8_e4m3fn if options.fp8_kv else dtype


def make_kv(
    spec: ModelSpec, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, shards: int = 1
) -> Tensor:
    """The KV tensor of one of `shards` GPUs: [layers, blocks, 2, block_size, kv heads, head_dim]."""
    kv_heads, head_dim = spec.facts.local_kv_heads(shards), spec.facts.attention.head_dim
    shape = (spec.facts.layers, blocks, 2, block_size, kv_heads, head_dim)
    size = prod(shape) * dtype.itemsize

    def too_large() -> str:
        needed = f"{blocks} KV blocks take {size / GIB:.2f} GiB"
        return f"{needed}, more than is free; lower num_blocks (--num-gpu-blocks)"

    with _room_for(size, device, too_large):
        return torch.zeros(shape, dtype=dtype, device=device)


@contextmanager
def _room_for(size: int, device: torch.device, too_large: Callable[[], str]) -> Iterator[None]:
    """For what takes `size` bytes of the device's memory. Errors: CannotRunHere with what `too_large` says.

    A CPU's memory is looked at before: where it runs out, the system ends a process, and not always this one.
    """
    memory = machine_memory() if device.type == "cpu" else None
    if memory is not None and size > memory[1]:
        raise CannotRunHere(too_large())
    try:
        yield
    except RuntimeError as error:
        full_host = device.type == "cpu" and "can't allocate memory" in str(error)
        if not full_host and not isinstance(error, torch.OutOfMemoryError):
            raise
        raise CannotRunHere(too_large()) from None


def _room(device: torch.device) -> str:
    """A device's memory in words, and what to do where it is too little."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device)
        here, other = "this GPU has", "a smaller model or a GPU"
    else:
        memory = machine_memory()
        other = "a smaller model or dtype, or a machine"
        if memory is None:
            return f"this machine has too little memory; choose {other} with more memory"
        total, free = memory
        here = "this process may use"
    return (
        f"{here} {total / GIB:.2f} GiB, and {free / GIB:.2f} of it were free; choose {other} with more memory"
    )


def machine_memory() -> tuple[int, int] | None:
    """The machine's memory that this process may use, and how much of it is free, in bytes.

    None where the system does not say.
    """
    try:
        kib = dict(re.findall(r"^(\w+): +(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE))
        total, free = int(kib["MemTotal"]) << 10, int(kib["MemAvailable"]) << 10
    except (OSError, KeyError):
        return None
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return total, free
    return min(total, most), min(free, most)


def weight_bytes(model: Decoder) -> int:
    """Bytes of the model's parameters."""
    return sum(values.nbytes for values in model.parameters())


def _max_len(spec: ModelSpec, options: Options) -> int:
    longest = spec.facts.max_position
    wanted = longest if options.max_model_len is None else options.max_model_len
    known = most_positions(spec)
    if wanted > known:
        raise BadInput(f"max_model_len is {wanted}; {spec.facts.name} knows positions up to {known}")
    return wanted
