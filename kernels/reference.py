"""Reference of every kernel in plain PyTorch: used by the tests, and on machines without a GPU."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FP8_MAX = 448.0


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Writes k and v [tokens, kv_heads, head_dim] to `slots` [tokens]; a negative slot writes nothing.

    Caches are [num_blocks, block_size, kv_heads, head_dim]. Those in fp8 e4m3 are clamped to its range.
    """
    keep = slots >= 0
    places = slots[keep].long()
    block, offset = places // k_cache.shape[1], places % k_cache.shape[1]
    for x, cache in ((k, k_cache), (v, v_cache)):
        kept = x[keep]
        if cache.dtype == torch.float8_e4m3fn:
            kept = kept.float().clamp(-FP8_MAX, FP8_MAX)
        cache[block, offset] = kept.to(cache.dtype)


def gather(cache: Tensor, table_row: Tensor, length: int, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """The first `length` tokens of a sequence, [length, kv_heads, head_dim], in `dtype` and unscaled."""
    block_size = cache.shape[1]
    blocks = table_row[: -(-length // block_size)].long()
    rows = cache[blocks].flatten(0, 1)[:length].to(dtype)
    return rows if scale is None else rows * scale.to(dtype)[:, None]


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention of the last q.shape[0] positions of a sequence; all [tokens, heads, head_dim].

    `window` is how many positions a token sees, itself included (None: all). `sinks` [heads] are logits that
    take their share of the softmax and have no value.
    """
    queries, length = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    positions = torch.arange(length, device=q.device)
    ago = positions[length - queries :, None] - positions
    hidden = (ago < 0) if window is None else (ago < 0) | (ago >= window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        beside = sinks.to(scores.dtype)[:, None, None].expand(-1, queries, 1)
        scores = torch.cat([scores, beside], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    scale: float | None = None,
    window: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Attention of the last query_lens[i] of seq_lens[i] tokens of each sequence; computed in `dtype`.

    q is [sum(query_lens), heads, head_dim], sequence after sequence; block_table [sequences, blocks].
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    first = 0
    for row, queries, length in zip(block_table, query_lens, seq_lens, strict=True):
        if queries == 0:
            continue
        k = gather(k_cache, row, length, dtype, k_scale)
        v = gather(v_cache, row, length, dtype, v_scale)
        new = q[first : first + queries].to(dtype)
        out[first : first + queries] = attention(new, k, v, scale, window, sinks)
        first += queries
    return out


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Sequence[int],
    *,
    scale: float | None = None,
    window: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Attention of one new token per sequence, q [sequences, heads, head_dim]; rows of length 0 are zero."""
    live = [i for i, length in enumerate(seq_lens) if length > 0]
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    if not live:
        return out
    out[live] = paged_prefill(
        q[live],
        k_cache,
        v_cache,
        block_table[live],
        [1] * len(live),
        [seq_lens[i] for i in live],
        scale=scale,
        window=window,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        dtype=dtype,
    )
    return out


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]], block_dim: int = 0) -> None:
    """Copies block a of `source` over block b of `target` for each pair (a, b), all layers at once."""
    for a, b in pairs:
        target.select(block_dim, b).copy_(source.select(block_dim, a))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; computed in fp32, returned in x's dtype."""
    return weight * (x.float() * rms_scale(x, eps)).to(x.dtype)


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """The reciprocal of the root mean square over the last dimension: float32, that dimension 1."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


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
    """As the kernel of that name; the q returned shares no memory."""
    kv_heads = k_cache.shape[2]
    if states is not None:
        qkv = (qkv * rms_scale(states, eps)[..., None]).to(qkv.dtype)
    q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    store_kv(_rotated(k, angles), v, k_cache, v_cache, slots)
    return _rotated(q, angles)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles[:, None].to(x.dtype).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def quantise_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [rows, width] in fp8 and a scale for each `group` columns of a row, float32 [rows, width / group]."""
    wide = x.float().unflatten(1, (-1, group))
    scales = wide.abs().amax(-1).clamp(min=1e-12) / FP8_MAX
    small = (wide / scales[..., None]).clamp(-FP8_MAX, FP8_MAX)
    return small.flatten(1).to(torch.float8_e4m3fn), scales


def dequantise(weight: Tensor, scales: Tensor) -> Tensor:
    """The float32 of an fp8 weight [outputs, inputs] with scales [outputs / n, inputs / m]; where n is m, the
    last row of scales may stand for fewer outputs."""
    (outputs, inputs), (height, width) = weight.shape, scales.shape
    group = inputs // width
    rows = group if -(-outputs // group) == height else outputs // height
    factor = scales.repeat_interleave(rows, 0)[:outputs]
    return weight.float() * factor.repeat_interleave(group, 1)


def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    numbers, x_scales = quantise_groups(x, weight.shape[1] // scales.shape[1])
    return (dequantise(numbers, x_scales) @ dequantise(weight, scales).T).to(x.dtype)


def _times(x: Tensor, weight: Tensor, scales: Tensor | None) -> Tensor:
    return x @ weight.T if scales is None else fp8_linear(x, weight, scales)


def choose_experts(logits: Tensor, active: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """The `active` likeliest experts of each token and their weights, [tokens, active] both.

    Of equal logits, that of the lower expert counts as the greater. Weights are the softmax over all experts
    in float32 (float64 for such logits), scaled to a sum of one if `normalised`.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    experts = wide.sort(dim=-1, descending=True, stable=True).indices[:, :active]
    weights = wide.softmax(-1).gather(1, experts)
    return experts, weights / weights.sum(-1, keepdim=True) if normalised else weights


def mixture(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    active: int,
    *,
    normalised: bool,
    first: int = 0,
    slots: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As the kernel of that name, one expert after another."""
    experts, weights = choose_experts(logits, active, normalised=normalised)
    if slots is not None:
        weights = weights * (slots >= 0)[:, None]
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert, (into, back) in enumerate(zip(gate_up, down, strict=True), start=first):
        tokens, place = (experts == expert).nonzero(as_tuple=True)
        if len(tokens):
            of_expert = (
                (None, None) if scales is None else (scales[0][expert - first], scales[1][expert - first])
            )
            gate, up = _times(x[tokens], into, of_expert[0]).chunk(2, dim=-1)
            value = _times(torch.nn.functional.silu(gate) * up, back, of_expert[1])
            out.index_add_(0, tokens, value.to(weights.dtype) * weights[tokens, place, None])
    return out.to(x.dtype)
