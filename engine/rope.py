"""Rotary positions: the table of cosines and sines, with the scalings that stretch a model's context."""

from __future__ import annotations

import torch
from pagecast.engine.spec import DEFAULT_ROPE_THETA, ModelSpec
from pagecast.sim.core.errors import BadInput
from torch import Tensor


def rotary_table(spec: ModelSpec, max_len: int) -> Tensor:
    """Cosines, then sines, of positions 0 to `max_len`: float32 [max_len, head_dim].

    Rows are halves of `head_dim / 2` angles each. Scalings that depend on the length of the text
    (`dynamic`, `longrope`) are taken at `max_len`, so that a cached key stays valid as its text grows.
    Errors: BadInput for a scaling that transformers doesn't know.
    """
    frequencies, factor = _frequencies(spec, max_len)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos() * factor, angles.sin() * factor], dim=1)


def most_positions(spec: ModelSpec) -> int:
    """Positions that a model knows with its scaling. Source: vLLM's `_get_and_verify_max_len`."""
    known = spec.facts.max_position
    factor = float(spec.rope.get("factor", 1.0))
    match spec.rope.get("rope_type", "default"):
        case "linear" | "dynamic":
            return int(known * factor)
        case "yarn":
            original = spec.rope.get("original_max_position_embeddings", known)
            return max(known, int(original * factor))
        case _:
            return known


def _frequencies(spec: ModelSpec, max_len: int) -> tuple[Tensor, float]:
    """Radians a position, float32 [head_dim / 2], and what cosines and sines are multiplied by."""
    kind = spec.rope.get("rope_type", "default")
    dim = spec.facts.attention.head_dim
    if kind == "default":
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / float(spec.rope.get("rope_theta", DEFAULT_ROPE_THETA)) ** exponent, 1.0
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
        raise BadInput(f"{spec.folder}/config.json: rope_type {kind!r} is not known; choose one of {known}")
    config = AutoConfig.from_pretrained(spec.folder)
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_len)
    return frequencies.float(), float(factor)
