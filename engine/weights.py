"""Fills a model's parameters: from a folder's safetensors files, or with random numbers for timing."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from pagecast.engine.model import Decoder
from pagecast.sim.core.errors import BadInput
from torch import Tensor, nn

# transformers' names of a layer's modules: ours, and which of its fused projections.
_IN_LAYER = {
    "self_attn.q_proj": ("attention.qkv", 0),
    "self_attn.k_proj": ("attention.qkv", 1),
    "self_attn.v_proj": ("attention.qkv", 2),
    "self_attn.o_proj": ("attention.o", 0),
    "self_attn.q_norm": ("attention.q_norm", 0),
    "self_attn.k_norm": ("attention.k_norm", 0),
    "mlp.gate_proj": ("mlp.gate_up", 0),
    "mlp.up_proj": ("mlp.gate_up", 1),
    "mlp.down_proj": ("mlp.down", 0),
    "input_layernorm": ("attention_norm", 0),
    "post_attention_layernorm": ("mlp_norm", 0),
}
_OUTSIDE = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)$")


def load(model: Decoder, folder: Path) -> None:
    """Fills `model` from every safetensors file in `folder`.

    Errors: BadInput for no such file, a tensor of the wrong shape, and one that is missing.
    """
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadInput(f"{folder}: holds no *.safetensors file; convert the weights, or use --random-weights")
    missing = _expected(model)
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if name in missing:
                    _fill(model, name, tensors.get_tensor(name), path)
                    missing.discard(name)
    if missing:
        raise BadInput(f"{folder}: tensor {min(missing)} is in none of {len(files)} safetensors files")


def randomise(model: Decoder, seed: int = 0) -> None:
    """Fills `model` with small random numbers; norms are 1."""
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, values in parameters.items():
        if "norm" in name:
            values.fill_(1.0)
        else:
            values.normal_(0.0, 0.02, generator=generator)


def _place(model: Decoder, name: str) -> tuple[nn.Module, int, str] | None:
    """The module that holds a tensor of transformers' model, which part of it, and its parameter's name."""
    found = _LAYER.match(name)
    if found is None:
        module, _, kind = name.rpartition(".")
        return (getattr(model, _OUTSIDE[module]), 0, kind) if module in _OUTSIDE else None
    number, module, kind = int(found[1]), found[2], found[3]
    if module not in _IN_LAYER or number >= len(model.layers):
        return None
    path, part = _IN_LAYER[module]
    return model.layers[number].get_submodule(path), part, kind


def _expected(model: Decoder) -> set[str]:
    """transformers' names of every tensor that the model needs."""
    names = {f"{module}.weight" for module in _OUTSIDE}
    if model.spec.facts.tied:
        names.discard("lm_head.weight")
    for number, layer in enumerate(model.layers):
        ours = dict(layer.named_parameters())
        for module, (path, _) in _IN_LAYER.items():
            for kind in ("weight", "bias"):
                if f"{path}.{kind}" in ours:
                    names.add(f"model.layers.{number}.{module}.{kind}")
    return names


def _fill(model: Decoder, name: str, value: Tensor, path: Path) -> None:
    place = _place(model, name)
    assert place is not None
    module, part, kind = place
    try:
        module.load(part, kind, value)
    except (ValueError, IndexError) as error:
        raise BadInput(f"{path}: tensor {name} doesn't fit config.json: {error}") from None
