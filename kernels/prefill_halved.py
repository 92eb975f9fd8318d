"""The halved schedule of the Hopper prefill kernel: each tile's softmax and product with V in two halves.

Three warpgroups take turns to queue their scores. A tile's weights with V are two products, one for each half
of its keys, so that the second half is exponentiated while the first is multiplied. No weights are kept for
the next tile, so that 64 rows of 128 columns need no more than the 160 registers that three warpgroups leave
to a thread. A tile of K and V in shared memory then serves 192 rows. Written in Gluon, Triton's lower level.
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
def _halves(s):
    """The first and the second half of each row."""
    ROWS: gl.constexpr = s.shape[0]
    TILE: gl.constexpr = s.shape[1]
    return gl.split(s.reshape([ROWS, 2, TILE // 2]).permute((0, 2, 1)))


@gluon.jit
def _weights(s, scale, base):
    """The softmax's numerators of half a tile."""
    return gl.exp2(s * scale - gl.convert_layout(base, gl.SliceLayout(1, s.type.layout))[:, None])


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
    m, total, acc = state
    HALF: gl.constexpr = TILE // 2
    A: gl.constexpr = acc.type.layout
    SUMS: gl.constexpr = total.type.layout
    for i in range(begin - end):
        stage = step % STAGES
        s = queue_scores(q, pipe, step, PART, TAIL)
        give_turn((PART + 1) % PARTS)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        if EDGE:
            s = hide_unseen(s, (begin - 1 - i) * TILE, positions, WINDOW)
        new_m, base = new_maxima(s, scale, m, EDGE)
        fade = gl.exp2(m * scale - base)
        m = new_m
        acc = rescale(acc, fade)
        first_s, second_s = _halves(s)
        first = _weights(first_s, scale, base)
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        v = v_buffers.index(stage)
        product = accumulate(first, v.slice(0, HALF), acc, A)
        second = _weights(second_s, scale, base)
        product = accumulate(second, v.slice(HALF, HALF), product, A)
        sums = gl.convert_layout(thread_sums(first) + thread_sums(second), SUMS, assert_trivial=True)
        total = total * gl.convert_layout(fade, gl.SliceLayout(1, SUMS), assert_trivial=True)[:, None] + sums
        acc = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(v_empty.index(stage), count=1)
        step += 1
    return step, (m, total, acc)


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
    WINDOW: gl.constexpr,
):
    """An item whose queries lie in `q`: the next step, maxima, sums in the form of `thread_sums`, and the
    output before it is divided by them."""
    k_buffers, _v_buffers, _k_full, _k_empty, _v_full, _v_empty = pipe
    TILE: gl.constexpr = k_buffers.shape[1]
    ROWS: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    R: gl.constexpr = positions.type.layout
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    m = gl.full([ROWS], -float("inf"), gl.float32, R)
    first_half, _second_half = _halves(gl.zeros([ROWS, TILE], gl.float32, S))
    state = (m, thread_sums(first_half), gl.zeros([ROWS, WIDTH], gl.float32, A))
    zero_unwritten(pipe, step, length)
    last, edge, whole = tile_ranges(position, length, first, TILE, WINDOW)
    ranges = (last, edge, whole, first)
    return walk_tiles(_steps, q, pipe, ranges, step, positions, scale, state, PART, PARTS, 0, WINDOW)
