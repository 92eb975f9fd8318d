"""Starts an engine: finds the device, loads the model, and makes the KV tensor of what memory remains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pagecast.engine import attention, weights
from pagecast.engine.model import Decoder
from pagecast.engine.options import Options
from pagecast.engine.runner import Runner
from pagecast.engine.sequence import Sequence
from pagecast.engine.spec import ModelSpec
from pagecast.engine.text import tokenizer
from pagecast.sim.core.errors import BadInput, CannotRunHere
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Limits
from torch import Tensor

CPU_BLOCKS = 1024  # where nobody says how many


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run, its KV tensor, and the limits that follow."""

    spec: ModelSpec
    model: Decoder
    kv: Tensor
    backend: str
    limits: Limits
    max_model_len: int
    tokenizer: Any
    options: Options

    @property
    def device(self) -> torch.device:
        return self.kv.device

    def runner(self, sequences: dict[Request, Sequence]) -> Runner:
        """A runner over this memory, for these sequences."""
        return Runner(
            self.model,
            self.kv,
            self.backend,
            sequences,
            max_rows=self.limits.max_num_seqs,
            max_tokens=self.limits.max_num_batched_tokens,
            max_len=self.max_model_len,
        )


def load(name: str, options: Options) -> Loaded:
    """Loads the model `name` as `options` say. Errors: BadInput, CannotRunHere."""
    device = find_device(options.device)
    spec = ModelSpec.find(name)
    max_len = _max_len(spec, options)
    backend = attention.choose(options.attention, device, options.block_size)
    dtype = find_dtype(spec, options.dtype, device)
    model = make_model(spec, dtype, device, options)
    blocks = options.num_blocks or CPU_BLOCKS
    kv = make_kv(spec, blocks, options.block_size, dtype, device)
    limits = options.limits(blocks, max_len)
    return Loaded(spec, model, kv, backend, limits, max_len, tokenizer(spec.folder), options)


def find_device(name: str) -> torch.device:
    """The device called `name`. Errors: CannotRunHere where there is no GPU and the CPU was not asked for."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CannotRunHere("no CUDA GPU here; run where there is one, or a small model with --device cpu")
    return torch.device("cuda", torch.cuda.current_device())


def find_dtype(spec: ModelSpec, name: str, device: torch.device) -> torch.dtype:
    """The dtype called `name`; `auto` is the checkpoint's on a GPU and float32 on the CPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else {"fp16": "float16"}.get(spec.facts.dtype, "bfloat16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def make_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device, options: Options) -> Decoder:
    """The model with its weights on the device. Errors: BadInput where the folder has none."""
    if spec.folder is None and not options.random_weights:
        raise BadInput(f"{spec.facts.name}: no such folder; give one that holds weights, or --random-weights")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), torch.no_grad():
            model = Decoder(spec)
            if options.random_weights or spec.folder is None:
                weights.randomise(model, options.seed)
            else:
                weights.load(model, spec.folder)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def make_kv(
    spec: ModelSpec, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The KV tensor: [layers, blocks, 2, block_size, kv heads, head_dim]."""
    a = spec.facts.attention
    shape = (spec.facts.layers, blocks, 2, block_size, a.kv_heads, a.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def _max_len(spec: ModelSpec, options: Options) -> int:
    longest = spec.facts.max_position
    wanted = options.max_model_len or longest
    if wanted > longest and spec.rope.get("rope_type", "default") == "default":
        raise BadInput(f"max_model_len is {wanted}; {spec.facts.name} knows positions up to {longest}")
    return wanted
