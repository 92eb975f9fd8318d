"""Attention by flash-attn 2.8 and later, where it is installed: a peer to measure the own kernels by.

Its pages hold a multiple of 256 tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from numpy.typing import NDArray
from pagecast.engine.backend import Pages, PromptChunks, Shape
from pagecast.kernels.copy_blocks import copy_blocks
from torch import Tensor


class FlashBackend:
    """flash-attn for attention; copying blocks as elsewhere."""

    name = "flash-attn"
    graphs = True

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._pages: Pages | None = None

    def plan(self, prompts: PromptChunks, first: int, *, captured: bool) -> NDArray[np.int32]:
        """Where each chunk's queries begin, where its keys do, and its table's row: [3, chunks + 1]."""
        numbers = np.zeros((3, len(prompts.tokens) + 1), np.int32)
        np.cumsum(prompts.tokens, out=numbers[0, 1:])
        np.cumsum(prompts.lens, out=numbers[1, 1:])
        numbers[2, :-1] = prompts.rows
        return numbers.reshape(-1)

    def plan_room(self, tokens: int) -> int:
        # Flash-attn plans for itself.
        return 0

    def warm_up(self) -> None:
        pass  # flash-attn comes compiled

    def begin(self, pages: Pages) -> None:
        """Keeps the step's pages for the layers that follow."""
        self._pages = pages

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention of queries `q` [tokens, heads, head_dim] in one layer: one call per kind of row."""
        pages, shape = self._pages, self._shape
        assert pages is not None
        keys, values = shape.kv[layer, :, 0], shape.kv[layer, :, 1]
        n, window = pages.decode_rows, shape.windows[layer]
        # flash-attn counts the tokens before the query's own.
        span = (-1, -1) if window is None else (window - 1, 0)
        parts = []
        if n:
            out = flash_attn_with_kvcache(
                q[:n, None],
                keys,
                values,
                cache_seqlens=pages.decode_lens,
                block_table=pages.decode_table,
                causal=True,
                window_size=span,
            )
            parts.append(out[:, 0])
        if pages.extra is not None:
            queries, lens, rows = pages.extra.view(3, -1)
            out = flash_attn_varlen_func(
                q[n:],
                keys,
                values,
                queries,
                lens,
                max(pages.prompts.tokens),
                max(pages.prompts.lens),
                causal=True,
                window_size=span,
                block_table=pages.tables[rows[:-1]],
            )
            parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy_blocks(self, pairs: Tensor) -> None:
        """Copies blocks within the pool, for all layers."""
        copy_blocks(self._shape.kv, self._shape.kv, pairs, block_dim=1)
