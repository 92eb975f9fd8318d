"""The overlapped schedule of the Hopper prefill kernel: softmax beside the previous tile's product.

Two warpgroups take turns: one computes its softmax while the other's products run, and while its own product
of the tile before runs (the schedule of FlashAttention-3, Shah et al. 2024). Weights of a tile wait in
registers until the scores of the next are queued. Written in Gluon, Triton's lower level.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from pagecast.kernels.prefill_pipe import (
    accumulate,
    give_turn,
    hide_unseen,
    new_maxima,
    queue_scores,
    rescale,
    thread_sums,
    walk_tiles,
    zero_unwritten,
)
from pagecast.kernels.prefill_work import tile_ranges
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait


@gluon.jit
def _pack(weights, DTYPE: gl.constexpr):
    """Weights rounded, in pairs: int32 [ROWS, TILE / 2].

    Carried round the loop as numbers of 16 bits, each would take a register of its own.
    """
    ROWS: gl.constexpr = weights.shape[0]
    TILE: gl.constexpr = weights.shape[1]
    ROUND: gl.constexpr = "cvt.rn.bf16x2.f32" if DTYPE.is_bf16() else "cvt.rn.f16x2.f32"
    low, high = gl.split(weights.reshape([ROWS, TILE // 2, 2]))
    return gl.inline_asm_elementwise(
        ROUND + " $0, $1, $2;", "=r,f,f", [high, low], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpack(pairs, DTYPE: gl.constexpr):
    """What `_pack` was given, rounded."""
    low = pairs.to(gl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.join(low, high).reshape([pairs.shape[0], 2 * pairs.shape[1]])


@gluon.jit
def queue_output(q, pipe, step, pairs, acc, rest, TAIL: gl.constexpr):
    """Starts the products of a step's weights with V: with all columns, or with 64 and with the TAIL beyond,
    into `acc` and `rest`."""
    _k_buffers, v_buffers, _k_full, _k_empty, v_full, _v_empty = pipe
    STAGES: gl.constexpr = v_buffers.shape[0]
    weights = _unpack(pairs, q.dtype)
    stage = step % STAGES
    mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
    v = v_buffers.index(stage)
    A: gl.constexpr = acc.type.layout
    if TAIL:
        T: gl.constexpr = rest.type.layout
        acc = accumulate(weights, v.slice(0, 64, 1), acc, A)
        rest = accumulate(weights, v.slice(64, TAIL, 1), rest, T)
    else:
        acc = accumulate(weights, v, acc, A)
    return acc, rest


@gluon.jit
def _softmax(s, scale, m, total, EDGE: gl.constexpr):
    """A step of the online softmax: weights, what the output must be scaled by, max and sum.

    Sums stay in the form of `thread_sums`; whoever needs them adds up the four.
    """
    new_m, base = new_maxima(s, scale, m, EDGE)
    weights = gl.exp2(s * scale - base[:, None])
    fade = gl.exp2(m * scale - base)
    sums = thread_sums(weights)
    T: gl.constexpr = sums.type.layout
    total = gl.convert_layout(total, T, assert_trivial=True)
    total *= gl.convert_layout(fade, gl.SliceLayout(1, T), assert_trivial=True)[:, None]
    return weights, fade, new_m, total + sums


@gluon.jit
def _steps(
    q,
    pipe,
    begin,
    end,
    step,
    positions,
    scale,
    state,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    TAIL: gl.constexpr,
    WINDOW: gl.constexpr,
    EDGE: gl.constexpr,
):
    """The KV tiles begin - 1 down to end: scores, the previous tile's product with V, then the softmax.

    ptxas moves the wait for the product to where the softmax has its first maxima. Rounding and rescaling
    come after the wait and fill the gaps between exponentials; nothing stands between the products.
    """
    k_buffers, _v_buffers, _k_full, k_empty, _v_full, v_empty = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    pairs, m, total, acc, rest = state
    for i in range(begin - end):
        s = queue_scores(q, pipe, step, PART, TAIL)
        product, rest_product = queue_output(q, pipe, step - 1, pairs, acc, rest, TAIL)
        give_turn((PART + 1) % PARTS)
        s = warpgroup_mma_wait(2 if TAIL else 1, deps=[s])
        mbarrier.arrive(k_empty.index(step % STAGES), count=1)
        if EDGE:
            s = hide_unseen(s, (begin - 1 - i) * TILE, positions, WINDOW)
        weights, fade, m, total = _softmax(s, scale, m, total, EDGE)
        if TAIL:
            acc, rest = warpgroup_mma_wait(0, deps=[product, rest_product])
            rest = rescale(rest, fade)
        else:
            acc = warpgroup_mma_wait(0, deps=[product])
        acc = rescale(acc, fade)
        pairs = _pack(weights, q.dtype)
        mbarrier.arrive(v_empty.index((step - 1) % STAGES), count=1)
        step += 1
    return step, (pairs, m, total, acc, rest)


@gluon.jit
def attend_overlapped(
    q,
    pipe,
    position,
    length,
    positions,
    first,
    step,
    scale,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    TAIL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Everything but the last product with V of an item whose queries lie in `q`."""
    k_buffers, _v_buffers, _k_full, k_empty, _v_full, _v_empty = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    ROWS: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    R: gl.constexpr = positions.type.layout
    COLUMNS: gl.constexpr = 64 if TAIL else WIDTH
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    last, edge, whole = tile_ranges(position, length, first, TILE, WINDOW)
    s = queue_scores(q, pipe, step, PART, TAIL)
    give_turn((PART + 1) % PARTS)
    s = warpgroup_mma_wait(0, deps=[s])
    stage = step % STAGES
    mbarrier.arrive(k_empty.index(stage), count=1)
    s = hide_unseen(s, (last - 1) * TILE, positions, WINDOW)
    nothing = gl.full([ROWS], -float("inf"), gl.float32, R)
    no_sums = thread_sums(gl.zeros_like(s))
    weights, _fade, m, total = _softmax(s, scale, nothing, no_sums, True)
    zero_unwritten(pipe, step, length)
    rest = m  # unused without a tail
    if TAIL:
        T: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
        rest = gl.zeros([ROWS, TAIL], gl.float32, T)
    state = (_pack(weights, q.dtype), m, total, gl.zeros([ROWS, COLUMNS], gl.float32, A), rest)
    ranges = (last - 1, edge, whole, first)
    return walk_tiles(_steps, q, pipe, ranges, step + 1, positions, scale, state, PART, PARTS, TAIL, WINDOW)
