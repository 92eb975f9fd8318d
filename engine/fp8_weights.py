"""Weights in fp8 as checkpoints store them, and as the kernels read them.

A checkpoint scales fp8 (e4m3) weights by tensor, by output channel, or by blocks of 128 x 128 (DeepSeek-V3,
Qwen3-FP8). Here every weight has scales of its own: one scale covers 128 inputs and gcd(128, projection
widths) outputs, so sharding and fusing never need rescaling.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from pagecast.kernels import reference
from pagecast.kernels.fp8_group import GROUP as GROUP
from pagecast.sim.core.errors import BadInput
from torch import Tensor, nn

# Modules that stay as they are, in every checkpoint the engine reads: the parts of a name that tell them.
_PLAIN = (("lm_head",), ("embed_tokens",), ("router",), ("mlp", "gate"))


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """A model whose projections are fp8. `by_channel`: every output has scales of its own."""

    by_channel: bool = False


def weight_of(
    widths: Sequence[int], inputs: int, fp8: Fp8Weights | None, *experts: int
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """The weight, uninitialised, of projections of these `widths` one after another, and its scales if fp8.

    Both are [outputs, inputs], or with `experts` [experts, outputs, inputs]. Errors: BadInput for fp8 with
    inputs that are no multiple of 128.
    """
    if fp8 is None:
        return _parameter((*experts, sum(widths), inputs), torch.get_default_dtype()), None
    if inputs % GROUP:
        raise BadInput(f"fp8 weights need a multiple of {GROUP} inputs on each GPU, not {inputs}")
    rows = 1 if fp8.by_channel else gcd(GROUP, *widths)
    scales = _parameter((*experts, sum(widths) // rows, inputs // GROUP), torch.float32)
    return _parameter((*experts, sum(widths), inputs), torch.float8_e4m3fn), scales


def stored_parts(
    name: str, value: Tensor, outputs: int, inputs: int, weight: Tensor, scales: Tensor | None
) -> dict[str, tuple[Tensor, int]]:
    """Tensors to store for checkpoint tensor `name`: parameter name to (value, outputs per row).

    `value` is that of a whole projection [outputs, inputs]; the parameters are `weight` and `scales`. A value
    that is not fp8 is quantised for an fp8 `weight`. Errors: ValueError as for `whole_scales`.
    """
    if scales is None:
        return {name: (value, 1)}
    rows = weight.shape[-2] // scales.shape[-2]
    if name == "scales":
        return {name: (whole_scales(value, outputs, inputs, rows), rows)}
    if value.dtype == weight.dtype:
        return {name: (value, 1)}
    numbers, own_scales = quantised(value, rows)
    return {name: (numbers, 1), "scales": (own_scales, rows)}


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def whole_scales(value: Tensor, outputs: int, inputs: int, rows: int) -> Tensor:
    """A checkpoint's scales of a whole projection, one for each `rows` outputs and 128 inputs.

    Errors: ValueError for scales that belong neither to the tensor, nor to channels or blocks of 128 x 128.
    """
    value, groups = value.float(), inputs // GROUP
    if value.numel() == 1:
        return value.reshape(1, 1).expand(outputs // rows, groups)
    if rows == 1 and value.numel() == outputs:
        return value.reshape(outputs, 1).expand(outputs, groups)
    if tuple(value.shape) == (-(-outputs // GROUP), groups):
        return value.repeat_interleave(GROUP // rows, 0)[: outputs // rows]
    raise ValueError(
        f"scales of shape {tuple(value.shape)} are neither of the tensor, nor of channels, nor of blocks of "
        f"{GROUP} x {GROUP} of {outputs} x {inputs}"
    )


def quantised(value: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """A weight in fp8 with a scale for each block of `rows` x 128: numbers and scales."""
    outputs, inputs = value.shape
    blocks = value.reshape(outputs // rows, rows, inputs // GROUP, GROUP).transpose(1, 2)
    numbers, scales = reference.quantise_groups(blocks.reshape(-1, rows * GROUP), rows * GROUP)
    numbers = numbers.view(outputs // rows, inputs // GROUP, rows, GROUP).transpose(1, 2)
    return numbers.reshape(outputs, inputs), scales.view(outputs // rows, inputs // GROUP)


def fp8_weights(scheme: Mapping[str, Any], where: str) -> Fp8Weights:
    """The fp8 weights that a `quantization_config` asks for. Errors: BadInput for those that can't be run."""
    method = str(scheme.get("quant_method", "")).lower()
    if method not in ("fp8", "compressed-tensors"):
        raise BadInput(
            f"{where}: quantization_config.quant_method is {method!r}; the engine runs fp8 and "
            "compressed-tensors with fp8 weights, and weights that are not quantised"
        )
    blocks = scheme.get("weight_block_size")
    if blocks is not None and list(blocks) != [GROUP, GROUP]:
        raise BadInput(f"{where}: weight_block_size is {blocks}; the engine runs blocks of {GROUP} x {GROUP}")
    for name in (*(scheme.get("modules_to_not_convert") or ()), *(scheme.get("ignore") or ())):
        if not _stays_plain(str(name)):
            raise BadInput(
                f"{where}: {name} is not quantised; the engine runs fp8 in all projections or none"
            )
    groups = scheme.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values() if isinstance(group, Mapping)]
    return Fp8Weights(by_channel=any(w.get("strategy") == "channel" for w in weights))


def _stays_plain(module: str) -> bool:
    """Whether the engine leaves a module as it is; its name may be a regular expression (`re:.*lm_head`)."""
    parts = tuple(re.findall(r"\w+", module))
    if any(part.endswith("norm") for part in parts):
        return True
    return any(parts[at : at + len(plain)] == plain for plain in _PLAIN for at in range(len(parts)))
