"""Attention by the project's own Triton kernels: one launch a layer for each kind of row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from pagecast.engine.attention import Pages, Shape
from pagecast.kernels.copy_blocks import copy_blocks
from pagecast.kernels.paged_decode import DecodeSchedule, DecodeShape, paged_decode
from pagecast.kernels.paged_prefill import paged_prefill, plan_prefill, tokens_per_tile
from torch import Tensor


class TritonBackend:
    """Reads lengths and tables on the device, so that decode steps can be captured in CUDA graphs.

    Layers with one window share the schedule of a step.
    """

    name = "triton"
    graphs = True

    def __init__(self, shape: Shape) -> None:
        kv = shape.kv
        self._shape = shape
        kv_heads, head_dim = kv.shape[4:]
        self._tile_tokens = tokens_per_tile(shape.heads, kv_heads, kv.dtype)
        self._schedules = {
            window: DecodeSchedule(
                DecodeShape(shape.heads, kv_heads, head_dim, kv.dtype, window), shape.max_rows, kv.device
            )
            for window in dict.fromkeys(shape.windows)
        }
        self._pages: Pages | None = None

    def plan(self, chunk_tokens: Sequence[int], chunk_lens: Sequence[int]) -> NDArray[np.int32]:
        return plan_prefill(chunk_tokens, chunk_lens, self._tile_tokens).reshape(-1)

    def begin(self, pages: Pages) -> None:
        self._pages = pages
        if pages.decode_rows:
            for schedule in self._schedules.values():
                schedule.update(pages.decode_lens)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        pages, shape = self._pages, self._shape
        assert pages is not None
        keys, values = shape.kv[layer, :, 0], shape.kv[layer, :, 1]
        n, window = pages.decode_rows, shape.windows[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if n:
            table, lens, schedule = pages.decode_table, pages.decode_lens, self._schedules[window]
            paged_decode(q[:n], keys, values, table, lens, schedule=schedule, out=out[:n], window=window)
        if pages.chunk_table is not None:
            assert pages.extra is not None
            tiles = pages.extra.view(-1, 4)
            paged_prefill(q[n:], keys, values, pages.chunk_table, tiles, out=out[n:], window=window)
        return out

    def copy_blocks(self, pairs: Tensor) -> None:
        copy_blocks(self._shape.kv, self._shape.kv, pairs, block_dim=1)
