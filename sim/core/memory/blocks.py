"""Sequences of blocks: their numbers or, where nobody asks for those, only how many they are."""

from __future__ import annotations

from array import array

import numpy as np

_NUMBER = "i"
_NO_NUMBER = "b"


def numbered_blocks(count: int) -> array[int]:
    """Blocks numbered from 0, the last first."""
    return array(_NUMBER, range(count - 1, -1, -1))


def unnumbered_blocks(count: int) -> array[int]:
    """So many blocks without numbers. The functions below need not put them in order."""
    return array(_NO_NUMBER, bytes(count))


def have_numbers(blocks: array[int]) -> bool:
    """Whether these blocks have numbers."""
    return blocks.typecode == _NUMBER


def by_row(columns: array[int], width: int) -> array[int]:
    """Row by row, what came column by column."""
    if width == 1 or len(columns) == width or columns.typecode == _NO_NUMBER:
        return columns
    return array(_NUMBER, np.frombuffer(columns, np.intc).reshape(width, -1).T.tobytes())


def last_first(rows: array[int], width: int) -> array[int]:
    """Column by column, in each the last row first, what came row by row."""
    if rows.typecode == _NO_NUMBER:
        return rows
    if width > 1:
        return array(_NUMBER, np.frombuffer(rows, np.intc).reshape(-1, width)[::-1].T.tobytes())
    return rows[::-1]


def columns_of(rows: array[int], step: int, first: int, width: int) -> array[int]:
    """The columns `first` to `first + width` of rows of `step` blocks, row by row."""
    if width == 1:
        return rows[first::step]
    if rows.typecode == _NO_NUMBER:
        return rows[: len(rows) // step * width]
    columns = rows[first : first + width]
    for begin in range(first + step, len(rows), step):
        columns += rows[begin : begin + width]
    return columns


def without(blocks: array[int], others: array[int]) -> array[int]:
    """Blocks without others that are among them."""
    if blocks.typecode == _NO_NUMBER:
        return blocks[len(others) :]
    left_out = set(others)
    return array(_NUMBER, [block for block in blocks if block not in left_out])
