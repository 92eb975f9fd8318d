"""A step's q and k normed and turned by position, and its K and V written to the paged cache, in one launch.

Apart, three kernels would read and write the same rows again; between matrix products that is what counts.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from pagecast.kernels.launch import Launch, after_predecessor, next_power_of_2, require
from pagecast.kernels.rms_scale import rms_scale
from torch import Tensor


@triton.jit
def _normed(first, second, w1, w2, eps, HALF: tl.constexpr):
    """Each head over its root mean square, times the weight of its kind."""
    squares = tl.sum(first * first + second * second, 1)
    scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
    return first * scale * w1, second * scale * w2


@triton.jit
def _weights(q_norm, k_norm, heads, lanes, mask, Q_HEADS: tl.constexpr, HALF: tl.constexpr):
    """The weights of both halves of each head."""
    is_q = mask & (heads < Q_HEADS)
    is_k = mask & (heads >= Q_HEADS)
    at = lanes + heads * 0
    w1 = tl.load(q_norm + at, mask=is_q, other=0.0).to(tl.float32)
    w1 += tl.load(k_norm + at, mask=is_k, other=0.0).to(tl.float32)
    w2 = tl.load(q_norm + HALF + at, mask=is_q, other=0.0).to(tl.float32)
    w2 += tl.load(k_norm + HALF + at, mask=is_k, other=0.0).to(tl.float32)
    return w1, w2


@triton.jit
def _stored(x, dtype: tl.constexpr, FP8: tl.constexpr):
    """x as the cache holds it: fp8 ends at 448."""
    if FP8:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
    return x.to(dtype)


@triton.jit(do_not_specialize=["eps"])
def _rotate_store(
    qkv,
    angles,
    q_norm,
    k_norm,
    k_cache,
    v_cache,
    slots,
    states,
    eps,
    TOKEN: tl.constexpr,
    HEAD: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    KV_POW2: tl.constexpr,
    HALF_POW2: tl.constexpr,
    DIM_POW2: tl.constexpr,
    FP8: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_POW2: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    heads = tl.arange(0, HEADS_POW2)[:, None]
    lanes = tl.arange(0, HALF_POW2)[None, :]
    mask = (heads < Q_HEADS + KV_HEADS) & (lanes < HALF)
    token = tl.program_id(0).to(tl.int64)
    if q_norm is not None:
        w1, w2 = _weights(q_norm, k_norm, heads, lanes, mask, Q_HEADS, HALF)
    after_predecessor(OVERLAP)
    slot = tl.load(slots + token).to(tl.int64)
    cos = tl.load(angles + token * 2 * HALF + lanes, mask=lanes < HALF, other=0.0)
    sin = tl.load(angles + token * 2 * HALF + HALF + lanes, mask=lanes < HALF, other=0.0)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    at = qkv + token * TOKEN + heads * HEAD + lanes
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    kv_heads = tl.arange(0, KV_POW2)[:, None]
    dims = tl.arange(0, DIM_POW2)[None, :]
    live = (kv_heads < KV_HEADS) & (dims < 2 * HALF) & (kv_heads * 0 + slot >= 0)
    v_at = qkv + token * TOKEN + (Q_HEADS + KV_HEADS + kv_heads) * HEAD + dims
    new_v = tl.load(v_at, mask=live, other=0.0)
    if states is not None:
        scale = rms_scale(states, token, eps, WIDTH, WIDTH_POW2)
        first *= scale
        second *= scale
        new_v = (new_v.to(tl.float32) * scale).to(qkv.dtype.element_ty)
    if q_norm is not None:
        first, second = _normed(first, second, w1, w2, eps, HALF)
    turned = first * cos - second * sin
    turned2 = second * cos + first * sin
    is_q = mask & (heads < Q_HEADS)
    tl.store(at, turned.to(qkv.dtype.element_ty), mask=is_q)
    tl.store(at + HALF, turned2.to(qkv.dtype.element_ty), mask=is_q)
    is_k = mask & (heads >= Q_HEADS) & (heads * 0 + slot >= 0)
    k_at = k_cache + block * K[0] + offset * K[1] + (heads - Q_HEADS) * K[2]
    # Rounded to q's precision first, as K is where it is stored by a kernel of its own.
    turned = _stored(turned.to(qkv.dtype.element_ty), k_cache.dtype.element_ty, FP8)
    turned2 = _stored(turned2.to(qkv.dtype.element_ty), k_cache.dtype.element_ty, FP8)
    tl.store(k_at + lanes * K[3], turned, mask=is_k)
    tl.store(k_at + (HALF + lanes) * K[3], turned2, mask=is_k)
    to = v_cache + block * V[0] + offset * V[1] + kv_heads * V[2] + dims * V[3]
    tl.store(to, _stored(new_v, v_cache.dtype.element_ty, FP8), mask=live)


_launches: dict[Any, Launch] = {}


def rotate_store_kv(
    qkv: Tensor,
    angles: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    states: Tensor | None = None,
) -> Tensor:
    """Norms (where weights are given) and turns q and k, stores K and V, and returns q (a view of qkv).

    qkv is [tokens, heads + 2 * kv_heads, head_dim] with dense heads; angles float32 [tokens, head_dim],
    cosines, then sines; caches [num_blocks, block_size, kv_heads, head_dim]; slots [tokens], -1 stores
    nothing. `states`, dense [tokens, width]: qkv is their product and is divided by their rows' root mean
    square first. k and v are left as they were. Safe inside CUDA graphs. Raises BadInput where shapes don't
    fit together.
    """
    tokens, all_heads, dim = qkv.shape
    kv_heads = k_cache.shape[2]
    heads = all_heads - 2 * kv_heads
    key = (
        qkv.dtype,
        qkv.stride(),
        all_heads,
        dim,
        k_cache.dtype,
        k_cache.shape[1:],
        k_cache.stride(),
        v_cache.stride(),
        slots.dtype,
        q_norm is None,
        None if states is None else states.shape[1],
        qkv.device,
    )
    launch = _launches.get(key)
    if launch is None:
        launch = _launches[key] = _configure(qkv, k_cache, v_cache, heads, states)
    if tokens:
        launch(tokens, (qkv, angles, q_norm, k_norm, k_cache, v_cache, slots, states), eps)
    return qkv[:, :heads]


def _configure(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, heads: int, states: Tensor | None) -> Launch:
    kv_heads, dim = k_cache.shape[2:]
    require(
        k_cache.shape == v_cache.shape and dim == qkv.shape[2] and heads > 0 and qkv.stride(2) == 1,
        f"rotate_store_kv: qkv {tuple(qkv.shape)} doesn't fit caches {tuple(k_cache.shape)} and "
        f"{tuple(v_cache.shape)}; they must be [num_blocks, block_size, kv_heads, head_dim]",
    )
    require(
        states is None or (states.is_contiguous() and len(states) == len(qkv)),
        f"rotate_store_kv: states {None if states is None else tuple(states.shape)} don't fit qkv "
        f"{tuple(qkv.shape)}; they must be dense, with a row for each token",
    )
    width = 1 if states is None else states.shape[1]
    constants = {
        "TOKEN": qkv.stride(0),
        "HEAD": qkv.stride(1),
        "K": k_cache.stride(),
        "V": v_cache.stride(),
        "BLOCK_SIZE": k_cache.shape[1],
        "Q_HEADS": heads,
        "KV_HEADS": kv_heads,
        "HALF": dim // 2,
        "HEADS_POW2": next_power_of_2(heads + kv_heads),
        "KV_POW2": next_power_of_2(kv_heads),
        "HALF_POW2": next_power_of_2(dim // 2),
        "DIM_POW2": next_power_of_2(dim),
        "FP8": k_cache.dtype == torch.float8_e4m3fn,
        "WIDTH": width,
        "WIDTH_POW2": next_power_of_2(width),
    }
    return Launch(_rotate_store, constants, qkv.device, num_warps=4)
