"""The halved schedule of the Hopper prefill kernel: each tile's softmax and product with V in two halves.

Three warpgroups take turns to queue their scores. A tile's weights with V are two products, one for each half
of its keys, so that the second half is exponentiated while the first is multiplied. No weights are kept for
the next tile, so that 64 rows of 128 columns need no more than the 160 registers that three warpgroups leave
to a thread. A tile of K and V in shared memory then serves 192 rows. Written in Gluon, Triton's lower level.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from pagecast.kernels.prefill_pipe import (
    give_turn,
    hide_unseen,
    queue_scores,
    rescale,
    thread_sums,
    zero_unwritten,
)
from pagecast.kernels.prefill_work import tile_ranges
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _halves(s):
    """The first and the second half of each row."""
    ROWS: gl.constexpr = s.shape[0]
    TILE: gl.constexpr = s.shape[1]
    return gl.split(s.reshape([ROWS, 2, TILE // 2]).permute((0, 2, 1)))


@gluon.jit
def _new_maxima(s, scale, m, EDGE: gl.constexpr):
    """Maxima with a tile's scores, these times `scale`, and what the output must be scaled by."""
    new_m = gl.maximum(m, gl.max(s, 1))
    base = new_m * scale
    if EDGE:  # a row may have seen nothing yet
        base = gl.where(new_m == -float("inf"), 0.0, base)
    return new_m, base, gl.exp2(m * scale - base)


@gluon.jit
def _weights(s, scale, base):
    """The softmax's numerators of half a tile."""
    return gl.exp2(s * scale - gl.convert_layout(base, gl.SliceLayout(1, s.type.layout))[:, None])


@gluon.jit
def _accumulate(weights, v, acc, A: gl.constexpr):
    """Starts the product of weights with V on top of `acc`, whose layout is A."""
    p = gl.convert_layout(weights.to(v.dtype), gl.DotOperandLayout(0, A, 2))
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _queue_half(
    v,
    weights,
    acc,
    rest,
    HALF: gl.constexpr,
    A: gl.constexpr,
    T: gl.constexpr,
    TAIL: gl.constexpr,
):
    """Starts the products of half a tile's weights with its V: with all columns into `acc`, or with 64 and
    with the TAIL beyond into `acc` and `rest`, whose layouts are A and T."""
    KEYS: gl.constexpr = weights.shape[1]
    v = v.slice(HALF * KEYS, KEYS)
    if TAIL:
        acc = _accumulate(weights, v.slice(0, 64, 1), acc, A)
        rest = _accumulate(weights, v.slice(64, TAIL, 1), rest, T)
    else:
        acc = _accumulate(weights, v, acc, A)
    return acc, rest


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
    """The KV tiles begin - 1 down to end: scores, then the softmax and the product with V in halves."""
    k_buffers, v_buffers, _k_full, k_empty, v_full, v_empty = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    m, total, acc, rest = state
    A: gl.constexpr = acc.type.layout
    T: gl.constexpr = rest.type.layout
    SUMS: gl.constexpr = total.type.layout
    for i in range(begin - end):
        stage = step % STAGES
        s = queue_scores(q, pipe, step, PART, TAIL)
        give_turn((PART + 1) % PARTS)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        if EDGE:
            s = hide_unseen(s, (begin - 1 - i) * TILE, positions, WINDOW)
        m, base, fade = _new_maxima(s, scale, m, EDGE)
        acc = rescale(acc, fade)
        if TAIL:
            rest = rescale(rest, fade)
        first_s, second_s = _halves(s)
        first = _weights(first_s, scale, base)
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        v = v_buffers.index(stage)
        product, rest_product = _queue_half(v, first, acc, rest, 0, A, T, TAIL)
        second = _weights(second_s, scale, base)
        product, rest_product = _queue_half(v, second, product, rest_product, 1, A, T, TAIL)
        sums = gl.convert_layout(thread_sums(first) + thread_sums(second), SUMS, assert_trivial=True)
        total = total * gl.convert_layout(fade, gl.SliceLayout(1, SUMS), assert_trivial=True)[:, None] + sums
        if TAIL:
            acc, rest = warpgroup_mma_wait(0, deps=[product, rest_product])
        else:
            acc = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(v_empty.index(stage), count=1)
        step += 1
    return step, (m, total, acc, rest)


@gluon.jit
def attend_in_halves(
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
    """An item whose queries lie in `q`: the next step, maxima, sums in the form of `thread_sums`, and the
    output before it is divided by them."""
    k_buffers, _v_buffers, _k_full, _k_empty, _v_full, _v_empty = pipe
    TILE: gl.constexpr = k_buffers.shape[1]
    ROWS: gl.constexpr = q.shape[0]
    COLUMNS: gl.constexpr = 64 if TAIL else q.shape[1]
    R: gl.constexpr = positions.type.layout
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    m = gl.full([ROWS], -float("inf"), gl.float32, R)
    first_half, _second_half = _halves(gl.zeros([ROWS, TILE], gl.float32, S))
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, A)
    rest = m  # unused without a tail
    if TAIL:
        T: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
        rest = gl.zeros([ROWS, TAIL], gl.float32, T)
    state = (m, thread_sums(first_half), acc, rest)
    zero_unwritten(pipe, step, length)
    last, edge, whole = tile_ranges(position, length, first, TILE, WINDOW)
    step, state = _steps(q, pipe, last, edge, step, positions, scale, state, PART, PARTS, TAIL, WINDOW, True)
    step, state = _steps(
        q, pipe, edge, whole, step, positions, scale, state, PART, PARTS, TAIL, WINDOW, False
    )
    if WINDOW > 0:
        step, state = _steps(
            q, pipe, whole, first, step, positions, scale, state, PART, PARTS, TAIL, WINDOW, True
        )
    return step, state
