"""Parts that the kernels for Hopper GPUs share: fetching by the tensor memory accelerator, and early starts.

Written in Gluon, Triton's lower level.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Names that changed between Triton 3.6 and 3.9.
fetch_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def let_next_start(OVERLAP: gl.constexpr):
    """`launch.let_next_start` in Gluon."""
    if OVERLAP:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def wait_for_predecessor(OVERLAP: gl.constexpr):
    """`launch.wait_for_predecessor` in Gluon."""
    if OVERLAP:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def fetch_tile(
    cache,
    table_row,
    start,
    last_page,
    head,
    full,
    buffer,
    BLOCK_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    BOX: gl.constexpr,
):
    """Queues the copy of the tokens [start, start + TILE) into `buffer`, `full` announcing its arrival.

    ROWS are the cache's `row_strides`. Tokens past the last page get that page's: their weight will be 0.
    """
    TILE: gl.constexpr = buffer.shape[0]
    mbarrier.expect(full, TILE * buffer.shape[1] * buffer.dtype.primitive_bitwidth // 8)
    for part in gl.static_range(TILE // BOX):
        token = start + part * BOX
        page = gl.load(table_row + gl.minimum(token // BLOCK_SIZE, last_page))
        row = page * ROWS[0] + head * ROWS[1] + token % BLOCK_SIZE
        fetch_box(cache, [row, head * ROWS[2]], full, buffer.slice(part * BOX, BOX))


@gluon.jit
def zero_tail(buffer, start, length):
    """Zeros the rows of V from `length` on: their weight is 0, but what lies there may be NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for part in gl.static_range(buffer.shape[0] // 16):
        begin = start + part * 16
        if begin + 16 > length:
            piece = buffer.slice(part * 16, 16)
            token = begin + gl.arange(0, 16, gl.SliceLayout(1, L))
            rows = piece.load(L)
            piece.store(gl.where((token < length)[:, None], rows, gl.zeros_like(rows)))
    fence_async_shared()
    barrier()
