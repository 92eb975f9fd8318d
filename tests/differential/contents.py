"""Digests of which contents were stored and removed in a step, the same for two schedulers.

A block's content is all that its key depends on: adapter, salt, and every token up to its end. Its name
follows from the specification alone, so neither block numbers nor keys have to agree.
"""

from __future__ import annotations

import zlib
from typing import Any

Row = dict[str, Any]


class Contents:
    """Takes note of blocks stored and removed, each told by a request that has it and its number there."""

    def __init__(self, rows: list[Row], block_size: int) -> None:
        self._texts = [text(number, row) for number, row in enumerate(rows)]
        self._scopes = [f"{row.get('adapter')} {row.get('salt')}" for row in rows]
        self._size = block_size
        self._names: dict[tuple[int, int], int] = {}
        self._happened: list[str] = []

    def stored(self, row: int, block: int) -> None:
        """A block of this content can be found from now on."""
        self._happened.append(f"+{self.name(row, block)}")

    def removed(self, row: int, block: int) -> None:
        """A block of this content can be found no more."""
        self._happened.append(f"-{self.name(row, block)}")

    def name(self, row: int, block: int) -> int:
        """The same number for equal contents, whoever has them."""
        name = self._names.get((row, block))
        if name is None:
            tokens = self._texts[row][: (block + 1) * self._size]
            name = self._names[row, block] = zlib.crc32(f"{self._scopes[row]} {tokens}".encode())
        return name

    def digest(self) -> int:
        """A number below 2**8 for all since the last digest, in any order; 0 where there was nothing."""
        if not self._happened:
            return 0
        joined = " ".join(sorted(self._happened))
        self._happened.clear()
        return zlib.crc32(joined.encode()) & 0xFF or 1


def text(number: int, row: Row) -> list[tuple[object, int]]:
    """A request's prompt and output, token by token, as places in texts and images."""
    spans = row.get("spans") or [[f"prompt {number}", 0, row["input_tokens"]]]
    tokens: list[tuple[object, int]] = []
    for content, offset, length in spans:
        tokens += [(content, offset + i) for i in range(length)]
    for name, offset, length in row.get("items", ()):
        tokens[offset : offset + length] = [(f"{name} at {offset}", i) for i in range(length)]
    output = row.get("output_content", f"output {number}")
    return tokens + [(output, i) for i in range(row["output_tokens"])]
