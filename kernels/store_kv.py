"""Store of the K and V of new tokens in their slots of the paged cache, with quantisation to fp8."""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from pagecast.kernels.launch import Launch, after_predecessor, next_power_of_2, require
from torch import Tensor

# Elements of K (and as many of V) that a program moves: four 16-byte loads a thread in flight.
PROGRAM_ELEMENTS = 4096


@triton.jit
def _rows(tokens_at, heads, dims, STRIDES: tl.constexpr):
    return (
        tokens_at[:, None, None] * STRIDES[0]
        + heads[None, :, None] * STRIDES[1]
        + dims[None, None, :] * STRIDES[2]
    )


@triton.jit
def _quantised(x, scale, heads, HEADS: tl.constexpr, PER_HEAD: tl.constexpr, FP8: tl.constexpr):
    x = x.to(tl.float32)
    if scale is not None:
        by = tl.load(scale + heads * PER_HEAD, mask=heads < HEADS, other=1.0)
        x = x / by[None, :, None]
    if FP8:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    return x


@triton.jit(do_not_specialize=["tokens"])
def _store_kv(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_scale,
    v_scale,
    tokens,
    K: tl.constexpr,
    V: tl.constexpr,
    K_CACHE: tl.constexpr,
    V_CACHE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    DIM_POW2: tl.constexpr,
    PER_HEAD: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_predecessor(OVERLAP)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    heads = tl.arange(0, HEADS_POW2)
    dims = tl.arange(0, DIM_POW2)
    slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
    live = (slot >= 0)[:, None, None]
    if HEADS != HEADS_POW2:
        live = live & (heads < HEADS)[None, :, None]
    if DIM != DIM_POW2:
        live = live & (dims < DIM)[None, None, :]
    new_k = tl.load(k + _rows(token, heads, dims, K), mask=live)
    new_v = tl.load(v + _rows(token, heads, dims, V), mask=live)
    if FP8 or k_scale is not None:
        new_k = _quantised(new_k, k_scale, heads, HEADS, PER_HEAD, FP8)
        new_v = _quantised(new_v, v_scale, heads, HEADS, PER_HEAD, FP8)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    within = heads[None, :, None] * K_CACHE[2] + dims[None, None, :] * K_CACHE[3]
    at = (block * K_CACHE[0] + offset * K_CACHE[1])[:, None, None] + within
    tl.store(k_cache + at, new_k.to(k_cache.dtype.element_ty), mask=live)
    within = heads[None, :, None] * V_CACHE[2] + dims[None, None, :] * V_CACHE[3]
    at = (block * V_CACHE[0] + offset * V_CACHE[1])[:, None, None] + within
    tl.store(v_cache + at, new_v.to(v_cache.dtype.element_ty), mask=live)


_launches: dict[Any, Launch] = {}


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes k and v [tokens, kv_heads, head_dim] to `slots` [tokens] (int32 or int64) of the caches.

    A slot is block * block_size + offset; a negative one writes nothing, and two equal ones are the
    caller's error (either may win). Caches are [num_blocks, block_size, kv_heads, head_dim]; any strides.
    `k_scale` and `v_scale` (fp32, [1] or [kv_heads], both or neither) store x / scale; fp8 (e4m3) caches
    clamp to +-448. Safe inside CUDA graphs. Raises BadInput where shapes don't fit together.
    """
    tokens = slots.shape[0]
    if tokens == 0:
        return
    key = (
        k.dtype,
        k_cache.dtype,
        k.shape[1:],
        k.stride(),
        v.stride(),
        k_cache.stride(),
        v_cache.stride(),
        k_cache.shape[1],
        slots.dtype,
        k_scale is None or k_scale.shape[0],
        k.device,
    )
    launch = _launches.get(key)
    if launch is None:
        launch = _launches[key] = _configure(k, v, k_cache, v_cache, k_scale, v_scale)
    launch(
        -(-tokens // launch.constants["TOKENS"]), (k, v, k_cache, v_cache, slots, k_scale, v_scale), tokens
    )


def _configure(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> Launch:
    heads, dim = k.shape[1:]
    require(k.shape == v.shape, f"store_kv: k is {tuple(k.shape)} but v is {tuple(v.shape)}; they must match")
    require(
        k_cache.shape == v_cache.shape and k_cache.shape[2:] == k.shape[1:],
        f"store_kv: caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} don't fit k {tuple(k.shape)}; "
        "they must be [num_blocks, block_size, kv_heads, head_dim]",
    )
    require((k_scale is None) == (v_scale is None), "store_kv: give both k_scale and v_scale, or neither")
    per_token = next_power_of_2(heads) * next_power_of_2(dim)
    constants = {
        "K": k.stride(),
        "V": v.stride(),
        "K_CACHE": k_cache.stride(),
        "V_CACHE": v_cache.stride(),
        "BLOCK_SIZE": k_cache.shape[1],
        "HEADS": heads,
        "DIM": dim,
        "TOKENS": max(1, PROGRAM_ELEMENTS // per_token),
        "HEADS_POW2": next_power_of_2(heads),
        "DIM_POW2": next_power_of_2(dim),
        "PER_HEAD": int(k_scale is not None and k_scale.shape[0] > 1),
        "FP8": k_cache.dtype == torch.float8_e4m3fn,
    }
    return Launch(_store_kv, constants, k.device, num_warps=4)
