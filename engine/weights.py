"""Weights of a model: from a folder's safetensors files, or with random numbers for timing."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash
from pagecast.engine.model import Decoder, Mixture
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
# Of mixtures by family: the module's name, and those of each expert's gate, up and down projections.
_MIXTURES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
_OUTSIDE = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}

# Our parameters of a projection, and transformers' names for them.
_KINDS = {"weight": "weight", "bias": "bias", "scales": "weight_scale_inv"}

_POSITIVE = (1 << 62) - 1

Places = dict[str, tuple[nn.Module, int, str]]
"""transformers' names of tensors: the module that holds it, which part of it, and its parameter's name."""


def load(model: Decoder, folder: Path) -> None:
    """Fills `model` from every safetensors file in `folder`.

    Errors: BadInput for no such file, one that can't be read, a tensor of the wrong shape, and one that is
    missing.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadInput(f"{folder}: holds no *.safetensors file; convert the weights, or use --random-weights")
    missing = _places(model)
    for path in files:
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    place = name + "_inv" if name.endswith(".weight_scale") else name
                    if place in missing:
                        _fill(missing.pop(place), name, tensors.get_tensor(name), path)
        except SafetensorError as error:
            raise BadInput(f"{path}: can't be read ({error}); get the file again") from None
    if missing:
        raise BadInput(f"{folder}: tensor {min(missing)} is in none of {len(files)} safetensors files")


def randomise(model: Decoder, seed: int = 0) -> None:
    """Fills `model` with small random numbers; norms are 1.

    Each whole tensor's numbers follow from `seed` and its name, so that shares of one model belong together.
    """
    like = next(model.parameters())
    generator = torch.Generator(device=like.device)
    for name, (module, part, kind) in _places(model).items():
        if kind == "scales":  # they follow from the weight
            continue
        whole = torch.ones(module.shape(part, kind), dtype=like.dtype, device=like.device)
        if "norm" not in name:
            generator.manual_seed(xxhash.xxh3_64_intdigest(name.encode(), seed) & _POSITIVE)
            whole.normal_(0.0, 0.02, generator=generator)
        module.load(part, kind, whole)


def _places(model: Decoder) -> Places:
    """Where every tensor goes that the model needs."""
    places: Places = {
        f"{theirs}.weight": (getattr(model, ours), 0, "weight") for theirs, ours in _OUTSIDE.items()
    }
    if model.spec.facts.tied:
        del places["lm_head.weight"]
    for number, layer in enumerate(model.layers):
        prefix, parameters = f"model.layers.{number}.", dict(layer.named_parameters())
        mixed = isinstance(layer.mlp, Mixture)
        for theirs, (path, part) in _IN_LAYER.items():
            if mixed and path.startswith("mlp."):
                continue
            for kind, suffix in _KINDS.items():
                if f"{path}.{kind}" in parameters:
                    places[f"{prefix}{theirs}.{suffix}"] = (layer.get_submodule(path), part, kind)
        if mixed:
            places |= _expert_places(layer.mlp, prefix, *_MIXTURES[model.spec.facts.model_type])
    return places


def _expert_places(mixture: Mixture, prefix: str, name: str, projections: tuple[str, str, str]) -> Places:
    places: Places = {f"{prefix}{name}.gate.weight": (mixture.router, 0, "weight")}
    gate, up, down = projections
    kinds = ("weight",) if mixture.down.scales is None else ("weight", "scales")
    for expert in range(len(mixture.down.weight)):
        of_expert = f"{prefix}{name}.experts.{mixture.first + expert}"
        for kind in kinds:
            suffix = _KINDS[kind]
            places[f"{of_expert}.{gate}.{suffix}"] = (mixture.gate_up, 2 * expert, kind)
            places[f"{of_expert}.{up}.{suffix}"] = (mixture.gate_up, 2 * expert + 1, kind)
            places[f"{of_expert}.{down}.{suffix}"] = (mixture.down, expert, kind)
    return places


def _fill(place: tuple[nn.Module, int, str], name: str, value: Tensor, path: Path) -> None:
    module, part, kind = place
    fp8 = getattr(module, "scales", None) is not None
    if kind == "weight" and fp8 and value.dtype != torch.float8_e4m3fn:
        raise BadInput(f"{path}: tensor {name} is {value.dtype}, where config.json says fp8")
    try:
        module.load(part, kind, value)
    except (ValueError, IndexError) as error:
        raise BadInput(f"{path}: tensor {name} doesn't fit config.json: {error}") from None
