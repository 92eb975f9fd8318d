"""Operations of the layers and the runner: plain PyTorch on the CPU, one fused kernel each on the GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from pagecast.kernels import reference
from pagecast.kernels.linear_cuts import Kind, LinearCut, cut_of
from torch import Tensor


class TokenInputs(NamedTuple):
    """Inputs of a step's tokens, a row each: id, rotary angles, KV slot (-1: none), number of tokens seen."""

    ids: Tensor
    angles: Tensor
    slots: Tensor
    lens: Tensor


def place(
    rows: Tensor,
    ids: Tensor,
    positions: Tensor,
    newest: Tensor,
    tables: Tensor,
    angles: Tensor,
    block_size: int,
) -> TokenInputs:
    """Looks up the inputs of tokens at `positions` of the sequences `rows` (int32 [n]; position -1: padding).

    An id below 0 stands for the sequence's newest token, in `newest` [rows]. `tables` is [rows, blocks],
    `angles` float32 [positions, dim].
    """
    if rows.is_cuda:
        from pagecast.engine import fused

        return TokenInputs(*fused.place(rows, ids, positions, newest, tables, angles, block_size))
    at = positions.clamp(min=0)
    slots = tables[rows, at // block_size] * block_size + at % block_size
    slots = torch.where(positions < 0, -1, slots)
    return TokenInputs(torch.where(ids < 0, newest[rows], ids), angles[at], slots, positions + 1)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum: [tokens, hidden] both. No residual: the sum is x.

    With a residual, x may also be addends, fp32 [addends, tokens, hidden].
    """
    if x.is_cuda:
        from pagecast.engine import fused

        return fused.add_rms_norm(x, residual, weight, eps)
    if residual is not None and x.dim() == residual.dim() + 1:
        x = x.sum(0).to(residual.dtype)
    total = x if residual is None else x + residual
    return reference.rms_norm(total, weight, eps), total


# So many numbers a kernel copies to or from pinned memory before a transfer of their size would have begun.
_FEW_NUMBERS = 8192


def copy_numbers(source: Tensor, target: Tensor) -> None:
    """Queues a copy of int32 numbers between the device and pinned host memory."""
    if (source.is_cuda or target.is_cuda) and 0 < len(source) <= _FEW_NUMBERS:
        from pagecast.engine import fused

        fused.copy_numbers(source, target)
    else:
        target.copy_(source, non_blocking=True)


def put_numbers(places: Tensor, numbers: Tensor, target: Tensor) -> None:
    """Writes int32 `numbers` to `places` of the dense `target`."""
    if target.is_cuda and len(places):
        from pagecast.engine import fused

        fused.put_numbers(places, numbers, target)
    else:
        target.view(-1)[places] = numbers


def embed_share(tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    """Embeddings of token ids [tokens] from a share `weight` [rows, hidden] that begins with token `first`;
    zeros for tokens outside it."""
    if tokens.is_cuda:
        from pagecast.engine import fused

        return fused.embed_share(tokens, weight, first)
    local = tokens - first
    here = (local >= 0) & (local < len(weight))
    rows = F.embedding(local.clamp(0, len(weight) - 1), weight)
    return rows.masked_fill(~here[:, None], 0)


class Product(NamedTuple):
    """What a matrix product multiplies its input by.

    `weight` [outputs, inputs] is multiplied transposed. It has `scales` if it is fp8.
    """

    weight: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None


def linear(x: Tensor, product: Product) -> Tensor:
    """x [tokens, inputs] times the weight, plus the bias: [tokens, outputs]."""
    cut = _own_cut("plain", x, product)
    if cut is not None:
        return _own_linear(x, product.weight, cut)
    weight, scales, bias = product
    if scales is None:
        return F.linear(x, weight, bias)
    if x.is_cuda:
        from pagecast.kernels.fp8_linear import fp8_linear

        out = fp8_linear(x, weight, scales)
    else:
        out = reference.fp8_linear(x, weight, scales)
    return out if bias is None else out + bias


def _own_cut(kind: Kind, x: Tensor, product: Product) -> LinearCut | None:
    """How our own kernel for few tokens cuts this product; None: it does not compute it."""
    if product.scales is not None or product.bias is not None or not x.is_cuda:
        return None
    return cut_of(kind, x, product.weight)


def _own_linear(x: Tensor, weight: Tensor, cut: LinearCut, *, gated: bool = False) -> Tensor:
    from pagecast.kernels.linear_hopper import linear_hopper

    return linear_hopper(x, weight, cut, gated=gated)


def by_library(x: Tensor, product: Product) -> bool:
    """Whether the library computes this product of x, not our own kernel."""
    return _own_cut("plain", x, product) is None


def add_linear(states: Tensor, x: Tensor, product: Product) -> None:
    """Adds `linear` of x to `states` [tokens, outputs], in place, for a product without scales and bias."""
    states.addmm_(x, product.weight.t())


def linear_sums(x: Tensor, product: Product) -> Tensor:
    """`linear`, or addends [addends, tokens, outputs] of it, which `add_rms_norm` adds up."""
    cut = _own_cut("sums", x, product)
    return linear(x, product) if cut is None else _own_linear(x, product.weight, cut)


def gated_linear(x: Tensor, product: Product, eps: float | None = None) -> Tensor:
    """`silu_mul` of `linear`: [tokens, outputs / 2]. With `eps`, x are states that are still to be normed."""
    cut = _own_cut("gated", x, product) if eps is None else None
    if cut is not None:
        return _own_linear(x, product.weight, cut, gated=True)
    gate_up = linear(x, product)
    return silu_mul(gate_up) if eps is None else silu_mul(gate_up, x, eps)


def silu_mul(gate_up: Tensor, states: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """silu(gate) * up for [tokens, 2 * width] with the gate first; returns [tokens, width].

    `states` [tokens, hidden]: gate and up are products of these and must be divided by each row's root mean
    square first.
    """
    if gate_up.is_cuda:
        from pagecast.engine import fused

        return fused.silu_mul(gate_up, states, eps)
    if states is not None:
        gate_up = (gate_up * reference.rms_scale(states, eps)).to(gate_up.dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class Turn(NamedTuple):
    """The norm of q and k (where weights are given) and their rotation by `angles`.

    `angles` is float32 [tokens, head_dim]: cosines, then sines. `states` [tokens, hidden]: qkv is their
    product and must be divided by each row's root mean square first.
    """

    angles: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    states: Tensor | None = None


def turn_and_store(qkv: Tensor, turn: Turn, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
    """Turns q and k of qkv [tokens, heads + 2 * kv heads, head_dim], writes K and V to `slots` of the caches
    [blocks, block_size, kv heads, head_dim] (-1: nowhere), and returns q, which may share qkv's memory."""
    angles, q_norm, k_norm, eps, states = turn
    norms = (q_norm, k_norm)
    if qkv.is_cuda:
        from pagecast.kernels.rotate_store_kv import rotate_store_kv

        return rotate_store_kv(qkv, angles, *norms, eps, keys, values, slots, states)
    return reference.rotate_store_kv(qkv, angles, *norms, eps, keys, values, slots, states)


class Experts(NamedTuple):
    """A mixture of experts: gate_up [experts, 2 * width, hidden] with the gate first, down [experts, hidden,
    width]. A token goes to `active` of them, whose weights are scaled to a sum of one if `normalised`.
    `counts` int32 [experts] is workspace, zero between uses. The experts that are here begin with number
    `first`; a token's other experts add nothing. `scales`: those of both weights where they are fp8."""

    gate_up: Tensor
    down: Tensor
    counts: Tensor
    active: int
    normalised: bool
    first: int = 0
    scales: tuple[Tensor, Tensor] | None = None


def mixture(x: Tensor, logits: Tensor, experts: Experts, slots: Tensor | None) -> Tensor:
    """The experts' output for x [tokens, hidden] by router logits [tokens, experts]; the same shape.

    Tokens whose slot in `slots` [tokens] is negative go to no expert.
    """
    if x.is_cuda:
        from pagecast.kernels.mixture import mixture as fused_mixture

        gate_up, down, counts, active, normalised, first, scales = experts
        return fused_mixture(
            x, logits, gate_up, down, counts, active, normalised, first=first, slots=slots, scales=scales
        )
    gate_up, down, _, active, normalised, first, scales = experts
    return reference.mixture(
        x, logits, gate_up, down, active, normalised=normalised, first=first, slots=slots, scales=scales
    )
