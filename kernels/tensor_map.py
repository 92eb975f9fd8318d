"""A paged cache as the matrix that Hopper's tensor memory accelerator reads, a box of rows at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any, TypeVar

import torch
from pagecast.kernels.launch import next_power_of_2
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as MatrixDescriptor

# A model's layers need two each; more means that caches come and go.
MAX_MAPS = 1024
MAX_MATRICES = 4096
# Larger boxes were no faster.
MOST_BOX_ROWS = 64


def row_strides(cache: Tensor) -> tuple[int, int, int] | None:
    """Where a cache [blocks, block_size, kv_heads, dim] lies in a matrix whose rows are one slot stride long.

    Rows from block to block, then rows and columns from head to head; None where the strides allow no such
    matrix, or one that the tensor memory accelerator can't read. A box is a power of two wide: what it holds
    past a head is the next one's, or zeros past the last.
    """
    blocks, slots, heads, dims = cache.stride()
    dim = cache.shape[3]
    if dims != 1 or blocks % slots or slots * cache.element_size() % 16 or cache.data_ptr() % 16:
        return None
    if heads % slots == 0:
        return blocks // slots, heads // slots, 0
    if (cache.shape[2] - 1) * heads + dim <= slots and (heads == dim or dim == next_power_of_2(dim)):
        return blocks // slots, 0, heads
    return None


class TensorMaps:
    """The maps of the caches that one kernel is given, made once each; a tile is fetched in whole boxes."""

    def __init__(self, tile: int) -> None:
        self._tile = tile
        self._maps: dict[tuple[int, int], Any] = {}

    def __call__(self, cache: Tensor) -> Any:
        """The map of a cache for which `row_strides` is not None."""
        key = (cache.data_ptr(), cache.shape[0])
        table = self._maps.get(key)
        if table is None:
            if len(self._maps) >= MAX_MAPS:
                self._maps.clear()
            table = self._maps[key] = self._describe(cache)
        return table

    def _describe(self, cache: Tensor) -> Any:
        strides = row_strides(cache)
        assert strides is not None
        blocks, block_size, heads, dim = cache.shape
        rows = (blocks - 1) * strides[0] + (heads - 1) * strides[1] + block_size
        columns = (heads - 1) * strides[2] + dim
        return TensorDescriptor(
            Address(cache.data_ptr(), cache.dtype),
            [rows, columns],
            [cache.stride(1), 1],
            [box_rows(block_size, self._tile), next_power_of_2(dim)],
            NVMMASharedLayout(128, 8 * cache.element_size(), 2),
        )


@dataclass(frozen=True, slots=True)
class Address:
    """A tensor's address without the tensor, which a kept map must not keep alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """As a tensor's."""
        return self.address


_Map = TypeVar("_Map")
_matrices: dict[Any, MatrixDescriptor] = {}
_swizzled: dict[Any, TensorDescriptor] = {}


def _made_once(maps: dict[Any, _Map], key: Any, make: Callable[[], _Map]) -> _Map:
    """The map of a key, made where there is none; all are forgotten once they are many."""
    made = maps.get(key)
    if made is None:
        if len(maps) >= MAX_MATRICES:
            maps.clear()
        made = maps[key] = make()
    return made


def matrix_map(matrix: Tensor, rows: int, columns: int) -> MatrixDescriptor:
    """A dense matrix [rows, columns], or several one below the other, as boxes of `rows` x `columns` are read
    of it; made once."""
    flat = matrix.flatten(0, -2)
    if not matrix.is_cuda:
        return MatrixDescriptor.from_tensor(flat, [rows, columns])

    def make() -> MatrixDescriptor:
        address = Address(matrix.data_ptr(), matrix.dtype)
        return MatrixDescriptor(address, list(flat.shape), [flat.shape[1], 1], [rows, columns])

    return _made_once(_matrices, (matrix.data_ptr(), flat.shape, matrix.dtype, rows, columns), make)


def swizzled_map(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A dense matrix of 16-bit numbers as Gluon's kernels copy boxes of `rows` x `columns`; made once."""

    def make() -> TensorDescriptor:
        address = Address(matrix.data_ptr(), matrix.dtype)
        layout = NVMMASharedLayout(min(2 * columns, 128), 16, 2)
        return TensorDescriptor(address, list(matrix.shape), [matrix.shape[1], 1], [rows, columns], layout)

    return _made_once(_swizzled, (matrix.data_ptr(), matrix.shape, matrix.dtype, rows, columns), make)


def box_rows(block_size: int, tile: int) -> int:
    """Rows of a box: as many as lie in one block and divide a tile, at most `MOST_BOX_ROWS`."""
    return gcd(block_size, tile, MOST_BOX_ROWS)
