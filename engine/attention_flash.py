"""Attention by flash-attn 2.8 and later, where it is installed: a peer to measure the own kernels by.

Its pages hold a multiple of 256 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from numpy.typing import NDArray
from pagecast.engine.attention import Pages, Shape
from pagecast.kernels.copy_blocks import copy_blocks
from torch import Tensor


class FlashBackend:
    """flash-attn for attention; copying blocks as elsewhere."""

    name = "flash-attn"
    graphs = True

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._pages: Pages | None = None

    def plan(self, chunk_tokens: Sequence[int], chunk_lens: Sequence[int]) -> NDArray[np.int32]:
        """Where each chunk's queries begin, then where its keys do: [2, chunks + 1]."""
        starts = np.zeros((2, len(chunk_tokens) + 1), np.int32)
        np.cumsum(chunk_tokens, out=starts[0, 1:])
        np.cumsum(chunk_lens, out=starts[1, 1:])
        return starts.reshape(-1)

    def begin(self, pages: Pages) -> None:
        self._pages = pages

    def attend(self, layer: int, q: Tensor) -> Tensor:
        pages, shape = self._pages, self._shape
        assert pages is not None
        keys, values = shape.kv[layer, :, 0], shape.kv[layer, :, 1]
        n, window = pages.decode_rows, shape.windows[layer]
        # flash-attn counts the tokens before the query's own.
        span = (-1, -1) if window is None else (window - 1, 0)
        parts = []
        if n:
            out = flash_attn_with_kvcache(
                q[:n, None], keys, values, cache_seqlens=pages.decode_lens, block_table=pages.decode_table,
                causal=True, window_size=span,
            )  # fmt: skip
            parts.append(out[:, 0])
        if pages.chunk_table is not None:
            assert pages.extra is not None
            starts = pages.extra.view(2, -1)
            out = flash_attn_varlen_func(
                q[n:], keys, values, starts[0], starts[1], max(pages.chunk_tokens), max(pages.chunk_lens),
                causal=True, window_size=span, block_table=pages.chunk_table,
            )  # fmt: skip
            parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy_blocks(self, pairs: Tensor) -> None:
        copy_blocks(self._shape.kv, self._shape.kv, pairs, block_dim=1)
