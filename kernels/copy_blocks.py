"""Copy of many blocks in one launch: inside the pool, to pinned host memory and back, all layers at once.

The GPU reads and writes pinned host memory directly, so blocks may lie anywhere on both sides and no
staging buffer or copy call per block is needed. Towards the host a few programs saturate the bus; the
rest of the GPU goes on with its work.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from math import prod
from typing import Any

import triton
import triton.language as tl
from pagecast.kernels.launch import Launch, next_power_of_2, require
from torch import Tensor

# Bytes a program copies at a time, and how many programs: on the device many small ones keep its memory
# busy; few with more in flight fill the bus to the host.
DEVICE_BYTES, DEVICE_PROGRAMS = 2048, 1 << 20
HOST_BYTES, HOST_PROGRAMS = 16384, 16


@triton.jit(do_not_specialize=["count"])
def _copy_blocks(
    source,
    target,
    pairs,
    count,
    SOURCE_BLOCK: tl.constexpr,
    TARGET_BLOCK: tl.constexpr,
    SIZES: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    RUN: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    CHUNKS: tl.constexpr = (RUN + CHUNK - 1) // CHUNK
    lanes = tl.arange(0, CHUNK)
    units = count * ROWS * CHUNKS
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        # Row by row, all pairs of one first: blocks of one layer lie close together.
        pair = unit // CHUNKS % count
        row = unit // CHUNKS // count
        start = unit % CHUNKS * CHUNK
        read = tl.load(pairs + 2 * pair).to(tl.int64)
        write = tl.load(pairs + 2 * pair + 1).to(tl.int64)
        stop = tl.where(tl.minimum(read, write) < 0, 0, RUN)
        read = read * SOURCE_BLOCK + start
        write = write * TARGET_BLOCK + start
        for d in tl.static_range(len(SIZES)):
            index = (row % SIZES[d]).to(tl.int64)
            row = row // SIZES[d]
            read += index * SOURCE[d]
            write += index * TARGET[d]
        mask = start + lanes < stop
        tl.store(target + write + lanes, tl.load(source + read + lanes, mask=mask), mask=mask)


_launches: dict[Any, Launch] = {}


def copy_blocks(source: Tensor, target: Tensor, pairs: Tensor, block_dim: int = 0) -> None:
    """Copies block pairs[i, 0] of `source` over block pairs[i, 1] of `target`, for every i.

    `block_dim` is the dimension that counts blocks; the other dimensions of the two must match (layers in
    front, for example), and their strides may differ. Either may be a pinned host tensor. `pairs` is int32
    or int64 [n, 2], dense, where the kernel can read it (device or pinned); a pair with a negative number
    is skipped. No block may be both read and written, or written twice, in one call. Queued on the current
    stream: host memory is valid once that stream has got there. Raises BadInput on mismatched tensors.
    """
    if pairs.shape[0] == 0:
        return
    key = (
        source.dtype,
        source.shape[:block_dim],
        source.shape[block_dim + 1 :],
        source.stride(),
        target.stride(),
        source.device,
        target.device,
        pairs.dtype,
        block_dim,
    )
    launch = _launches.get(key)
    if launch is None:
        launch = _launches[key] = _configure(source, target, pairs, block_dim)
    c = launch.constants
    units = pairs.shape[0] * c["ROWS"] * -(-c["RUN"] // c["CHUNK"])
    cap = DEVICE_PROGRAMS if source.device == target.device else HOST_PROGRAMS
    launch(min(units, cap), (source, target, pairs), pairs.shape[0])


def _configure(source: Tensor, target: Tensor, pairs: Tensor, block_dim: int) -> Launch:
    def inner(t: Tensor) -> tuple[int, ...]:
        return (*t.shape[:block_dim], *t.shape[block_dim + 1 :])

    require(
        source.dtype == target.dtype and inner(source) == inner(target),
        f"copy_blocks: blocks of {tuple(source.shape)} {source.dtype} don't fit those of "
        f"{tuple(target.shape)} {target.dtype} (blocks are counted by dimension {block_dim})",
    )
    for t in (source, target):
        require(
            t.device.type != "cpu" or t.is_pinned() or source.device == target.device,
            "copy_blocks: the host side of a copy must be pinned memory (pin_memory=True)",
        )
    require(pairs.is_contiguous() and pairs.shape[1:] == (2,), "copy_blocks: pairs must be a dense [n, 2]")
    run, sizes, reads, writes = _collapse(source, target, block_dim)
    program_bytes = DEVICE_BYTES if source.device == target.device else HOST_BYTES
    constants = {
        "SOURCE_BLOCK": source.stride(block_dim),
        "TARGET_BLOCK": target.stride(block_dim),
        "SIZES": sizes,
        "SOURCE": reads,
        "TARGET": writes,
        "RUN": run,
        "CHUNK": min(program_bytes // source.element_size(), next_power_of_2(run)),
        "ROWS": prod(sizes),
    }
    return Launch(_copy_blocks, constants, num_warps=4)


def _collapse(
    source: Tensor, target: Tensor, block_dim: int
) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The longest run dense in both, then the other dimensions: their sizes and strides, innermost first."""
    run = 1
    others: list[tuple[int, int, int]] = []
    for d in reversed(range(source.ndim)):
        size, read, write = source.shape[d], source.stride(d), target.stride(d)
        if d == block_dim or size == 1:
            continue
        if not others and read == run and write == run:
            run *= size
        else:
            others.append((size, read, write))
    sizes: Sequence[int] = [o[0] for o in others]
    return run, tuple(sizes), tuple(o[1] for o in others), tuple(o[2] for o in others)
