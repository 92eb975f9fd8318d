"""Parts that both schedules of the Hopper prefill kernel share: the warp that fetches, turns and scores.

A `pipe` is (k_buffers, v_buffers, k_full, k_empty, v_full, v_empty): shared memory for some tiles of K and of
V under way, the stages, and for each stage a barrier that says when it is full and one that says when it is
free. Written in Gluon, Triton's lower level.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from pagecast.kernels.hopper import fetch_tile, zero_tail
from pagecast.kernels.prefill_work import count_items, find_item, load_item
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

# Turns are taken at the hardware's barriers from this one on, one for each warpgroup; Triton counts its own
# from 0. Unlike an arrival at a barrier in memory, giving a turn doesn't first gather the warpgroup. 256
# threads meet at each: the warpgroup that gives the turn and the one that takes it. The last turn that is
# given is never taken.
TURNS = gl.constexpr(12)


@gluon.jit
def fetch_pages(
    pipe,
    pages,
    KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    K_ROWS: gl.constexpr,
    V_ROWS: gl.constexpr,
    BOX: gl.constexpr,
    WINDOW: gl.constexpr,
    SIDE: gl.constexpr,
):
    """The warp that fetches: the KV tiles of each item, last to first, as buffers fall free."""
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = pipe
    k_cache, v_cache, table, table_stride, tiles, items = pages
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    step = 0
    for turn in range(count_items(items)):
        nth, head = find_item(turn, items, KV_HEADS, SIDE)
        sequence, _row, _count, _position, first, length = load_item(tiles, nth, TILE, WINDOW)
        last = (length + TILE - 1) // TILE
        row = table + sequence.to(gl.int64) * table_stride
        last_page = (length - 1) // BLOCK_SIZE
        for i in range(last - first):
            start = (last - 1 - i) * TILE
            stage = step % STAGES
            free = (step // STAGES + 1) & 1
            mbarrier.wait(k_empty.index(stage), free)
            full, buffer = k_full.index(stage), k_buffers.index(stage)
            fetch_tile(k_cache, row, start, last_page, head, full, buffer, BLOCK_SIZE, K_ROWS, BOX)
            mbarrier.wait(v_empty.index(stage), free)
            full, buffer = v_full.index(stage), v_buffers.index(stage)
            fetch_tile(v_cache, row, start, last_page, head, full, buffer, BLOCK_SIZE, V_ROWS, BOX)
            step += 1


@gluon.jit
def take_turn(PART: gl.constexpr):
    """Waits until the warpgroup before number PART has queued its products."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.b32 $0, 0;", "=r,r", [TURNS + PART], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def give_turn(PART: gl.constexpr):
    """Lets warpgroup number PART queue its products. Doesn't wait."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.b32 $0, 0;", "=r,r", [TURNS + PART], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def queue_scores(q, pipe, step, PART: gl.constexpr, TAIL: gl.constexpr):
    """Starts q k^T of a step's tile when it is there and it is this warpgroup's turn."""
    k_buffers, _v_buffers, k_full, _k_empty, _v_full, _v_empty = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    ROWS: gl.constexpr = q.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    stage = step % STAGES
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    take_turn(PART)
    k = k_buffers.index(stage)
    s = gl.zeros([ROWS, TILE], gl.float32, S)
    if TAIL:  # without the columns beyond, which are zero in q
        q_head, k_head = q.slice(0, 64, 1), k.slice(0, 64, 1)
        q_tail, k_tail = q.slice(64, TAIL, 1), k.slice(64, TAIL, 1)
        s = warpgroup_mma(q_head, k_head.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_tail, k_tail.permute((1, 0)), s, is_async=True)
    else:
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    return s


@gluon.jit
def zero_unwritten(pipe, step, length):
    """Zeros what lies past the sequence's end in V of a piece's last tile, which is computed first.

    Waits for that tile only where there is such a rest.
    """
    _k_buffers, v_buffers, _k_full, _k_empty, v_full, _v_empty = pipe
    STAGES: gl.constexpr = v_buffers.shape[0]
    TILE: gl.constexpr = v_buffers.shape[1]
    if length % TILE != 0:
        stage = step % STAGES
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        zero_tail(v_buffers.index(stage), length // TILE * TILE, length)


@gluon.jit
def hide_unseen(s, start, positions, WINDOW: gl.constexpr):
    """Scores of tokens that a row must not see become -inf."""
    S: gl.constexpr = s.type.layout
    token = gl.arange(0, s.shape[1], gl.SliceLayout(0, S))[None, :]
    newest = (positions - start)[:, None]
    seen = token <= newest
    if WINDOW > 0:
        seen = seen & (token > newest - WINDOW)
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def thread_sums(weights):
    """A row's sums in each of the four threads that share it."""
    ROWS: gl.constexpr = weights.shape[0]
    TILE: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([ROWS, TILE // 8, 4, 2]), 3), 1)


@gluon.jit
def rescale(acc, fade):
    """The output so far times a factor for each row."""
    return acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def new_maxima(s, scale, m, EDGE: gl.constexpr):
    """Maxima with a tile's scores, and what is taken from the scores times `scale` before the exponential."""
    new_m = gl.maximum(m, gl.max(s, 1))
    base = new_m * scale
    if EDGE:  # a row may have seen nothing yet
        base = gl.where(new_m == -float("inf"), 0.0, base)
    return new_m, base


@gluon.jit
def accumulate(weights, v, acc, A: gl.constexpr):
    """Starts the product of weights with V on top of `acc`, whose layout is A."""
    p = gl.convert_layout(weights.to(v.dtype), gl.DotOperandLayout(0, A, 2))
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def walk_tiles(
    STEPS: gl.constexpr,
    q,
    pipe,
    ranges,
    step,
    positions,
    scale,
    state,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    TAIL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """A schedule's STEPS over a piece's KV tiles from begin - 1 down to first.

    `ranges`: begin, first, and as in `tile_ranges` edge and whole: only outside of [whole, edge) are keys
    hidden.
    """
    begin, edge, whole, first = ranges
    step, state = STEPS(q, pipe, begin, edge, step, positions, scale, state, PART, PARTS, TAIL, WINDOW, True)
    step, state = STEPS(q, pipe, edge, whole, step, positions, scale, state, PART, PARTS, TAIL, WINDOW, False)
    if WINDOW > 0:
        step, state = STEPS(
            q, pipe, whole, first, step, positions, scale, state, PART, PARTS, TAIL, WINDOW, True
        )
    return step, state
