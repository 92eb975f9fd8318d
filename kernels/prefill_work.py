"""Work of the Hopper prefill kernel: which items of the plan a program has, and where their rows of q lie.

Written in Gluon, Triton's lower level.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

# A name that changed between Triton 3.6 and 3.9.
_fetch_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# From so many KV heads on, K and V of all of them don't fit the L2 cache of an H100 where there is much work.
MANY_HEADS = gl.constexpr(16)
DOUBLINGS = gl.constexpr(3)  # from 2 or 4 heads under way at once up to 16 or 32


@gluon.jit
def count_items(items):
    """How many pieces of work this program has."""
    return (items - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def find_item(turn, items, KV_HEADS: gl.constexpr, SIDE: gl.constexpr):
    """This program's piece of work number `turn`: its place in the plan, and its KV head.

    Pieces go round the programs, to and fro: they grow shorter, so that the first program would always have
    the longest. Where there is much work, only SIDE heads are under way at once: their K and V stay in the
    L2 cache. Of MANY_HEADS twice as many are, and again, until each program has two pieces: all at once would
    not stay there.
    """
    programs = gl.num_programs(0)
    item = turn * programs + gl.program_id(0)
    if SIDE == KV_HEADS:
        back = gl.minimum((turn + 1) * programs, items) - 1 - gl.program_id(0)
        item = gl.where(turn % 2 == 1, back, item)
        return item // KV_HEADS, item % KV_HEADS
    else:
        number = items // KV_HEADS
        side = SIDE
        if KV_HEADS >= MANY_HEADS:
            side = number * 0 + SIDE
            for _ in gl.static_range(DOUBLINGS):
                more = (number * side < 2 * programs) & (KV_HEADS % (2 * side) == 0)
                side = gl.where(more, 2 * side, side)
        much = number * side >= 2 * programs
        together = gl.where(much, number * side, items)
        part = item // together
        nth = item - part * together
        through = nth // programs
        back = gl.minimum((through + 1) * programs, together) - 1 - (nth - through * programs)
        nth = gl.where((through + part) % 2 == 1, back, nth)
        head = gl.where(much, part * side + nth % side, nth % KV_HEADS)
        return gl.where(much, nth // side, nth // KV_HEADS), head


@gluon.jit
def load_item(tiles, nth, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """A piece of the plan: sequence, first row of q, rows, position of the first, first KV tile, end."""
    entry = tiles + 8 * nth
    sequence, row = gl.load(entry), gl.load(entry + 1)
    count, position = gl.load(entry + 2), gl.load(entry + 3)
    first = gl.load(entry + 4) // TILE
    if WINDOW > 0:
        first = gl.maximum(position - WINDOW + 1, 0) // TILE
    return sequence, row, count, position, first, gl.load(entry + 5)


@gluon.jit
def tile_ranges(position, length, first, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """KV tiles of a piece from its last + 1 down: of those from `edge` on, the diagonal or the sequence's end
    may hide some keys from some rows, and of those below `whole`, a window may."""
    last = (length + TILE - 1) // TILE
    edge = gl.minimum(gl.maximum((position + 1) // TILE, first), last - 1)
    whole = first
    if WINDOW > 0:
        whole = gl.minimum(edge, (gl.maximum(length - WINDOW, 0) + TILE - 1) // TILE)
    return last, edge, whole


@gluon.jit
def row_offsets(lane, row, count, head, STRIDES: gl.constexpr, GROUP: gl.constexpr):
    """Offsets of the rows of q or of the output; lanes past the last row repeat its token."""
    token = (row + gl.minimum(lane // GROUP, count - 1)).to(gl.int64)
    return token * STRIDES[0] + (head * GROUP + lane % GROUP) * STRIDES[1]


@gluon.jit
def fetch_queries(
    q,
    tiles,
    turn,
    items,
    buffer,
    lane,
    dims,
    Q: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    TILE: gl.constexpr,
    WINDOW: gl.constexpr,
    SIDE: gl.constexpr,
):
    """Starts to copy the queries of a turn's item, if there is one."""
    if turn < count_items(items):
        nth, head = find_item(turn, items, KV_HEADS, SIDE)
        _sequence, row, count, _position, _first, _length = load_item(tiles, nth, TILE, WINDOW)
        at = row_offsets(lane, row, count, head, Q, GROUP)
        pointers = q + at[:, None] + dims[None, :]
        if buffer.shape[1] == DIM:
            _fetch_rows(buffer, pointers)
        else:
            _fetch_rows(buffer, pointers, mask=(lane >= 0)[:, None] & (dims < DIM)[None, :])
    async_copy.commit_group()
