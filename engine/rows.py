"""Rows of the device's tables: one per running request, with the changes since the last step.

The block tables, sampling parameters and newest tokens of running requests stay on the device. A step
sends only what is new: a few blocks of tables that grew, and the parameters of requests that came.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pagecast.engine.sampling import FIELDS, pack
from pagecast.engine.sequence import NO_ROW, Sequence
from pagecast.sim.core.memory.memory import Memory

Ints = NDArray[np.int32]
_NONE = np.empty(0, np.int32)


class Rows:
    """`count` rows of `columns` blocks each; `changes` empties what is to be sent."""

    def __init__(self, count: int, columns: int, block_size: int) -> None:
        self.columns = columns
        self.padding = count  # the number of the spare row, for padding
        self.block_size = block_size
        self._free = list(range(count - 1, -1, -1))
        self._places: list[Ints] = []  # row * columns + column
        self._blocks: list[Ints] = []
        self._params: list[Ints] = []

    def serve(self, sequence: Sequence, tokens: int, memory: Memory) -> None:
        """Brings a row up to date with the block table of a request that computes chunks, now up to its first
        `tokens` tokens; gives it one if it has none."""
        if sequence.row != NO_ROW and tokens <= sequence.blocks_sent * self.block_size:
            return
        blocks = memory.blocks(sequence.request)
        if sequence.row == NO_ROW:
            sequence.row = self._free.pop()
            sequence.blocks_sent = 0
            row = np.empty(FIELDS + 1, np.int32)
            row[0], row[1:] = sequence.row, pack(sequence.params, sequence.seed)
            self._params.append(row)
        sent, sequence.blocks_sent = sequence.blocks_sent, len(blocks)
        if sent < len(blocks):
            first = sequence.row * self.columns
            self._places.append(np.arange(first + sent, first + len(blocks), dtype=np.int32))
            self._blocks.append(np.array(blocks[sent:], np.int32))

    def serve_decodes(self, sequences: list[Sequence], positions: Ints, memory: Memory) -> None:
        """Brings the rows of decoding requests, which compute `positions`, up to date: sends the new block of
        each whose position begins one."""
        begin = np.flatnonzero(positions % self.block_size == 0)
        if not len(begin):
            return
        columns = (positions[begin] // self.block_size).tolist()
        places, blocks = [], []
        for i, column in zip(begin.tolist(), columns, strict=True):
            sequence = sequences[i]
            places.append(sequence.row * self.columns + column)
            blocks.append(memory.last_block(sequence.request))
            sequence.blocks_sent = column + 1
        self._places.append(np.array(places, np.int32))
        self._blocks.append(np.array(blocks, np.int32))

    def free(self, sequence: Sequence) -> None:
        """Takes a request's row back: it has ended, or was preempted."""
        sequence.preemptions = sequence.request.preemptions
        if sequence.row != NO_ROW:
            self._free.append(sequence.row)
            sequence.row = NO_ROW

    def changes(self) -> tuple[Ints, Ints, Ints]:
        """Changes new to the device: places in the tables, their blocks, and rows of parameters."""
        if not self._places and not self._params:
            return _NONE, _NONE, _NONE
        parts = _flat(self._places), _flat(self._blocks), _flat(self._params)
        self._places, self._blocks, self._params = [], [], []
        return parts


def _flat(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else _NONE
