"""The small operations between matrix products, in plain PyTorch; on the GPU each is one fused kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; computed in fp32, returned in x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum: [tokens, hidden] both. No residual: the sum is x."""
    if x.is_cuda:
        from pagecast.engine import fused

        return fused.add_rms_norm(x, residual, weight, eps)
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [tokens, 2 * width] with the gate first; returns [tokens, width]."""
    if gate_up.is_cuda:
        from pagecast.engine import fused

        return fused.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def norm_rotate(
    qk: Tensor, angles: Tensor, q_heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float
) -> Tensor:
    """Norms (where given) each head of qk [tokens, q and k heads, head_dim] and turns it by its position.

    `angles` is float32 [tokens, head_dim]: cosines, then sines. The result may share qk's memory.
    """
    if qk.is_cuda:
        from pagecast.engine import fused

        return fused.norm_rotate(qk, angles, q_heads, q_norm, k_norm, eps)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(qk[:, :q_heads], q_norm, eps), rms_norm(qk[:, q_heads:], k_norm, eps)
        qk = torch.cat([q, k], dim=1)
    cos, sin = angles[:, None].to(qk.dtype).chunk(2, dim=-1)
    first, second = qk.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
