"""Attention by the project's own Triton kernels: one launch per layer for each kind of row."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pagecast.engine.backend import Pages, PromptChunks, Shape
from pagecast.kernels.capabilities import processors_of
from pagecast.kernels.copy_blocks import copy_blocks
from pagecast.kernels.decode_schedule import FEW_ROWS, DecodeSchedule, DecodeShape
from pagecast.kernels.merge_pieces import Pieces
from pagecast.kernels.paged_decode import paged_decode
from pagecast.kernels.paged_prefill import paged_prefill
from pagecast.kernels.prefill_plan import COLUMNS, most_rows, plan_prefill
from pagecast.kernels.tile_rows import TileRows
from pagecast.kernels.widen_blocks import widen_blocks
from torch import Tensor

MOST_WIDE_TOKENS = 32768
LEAST_NEW_TOKENS = 256


class WideBlocks:
    """A layer's blocks of the step's prompts in the queries' dtype, beside an fp8 cache.

    Used where a step has at least `LEAST_NEW_TOKENS` in its prompts, which see at most `MOST_WIDE_TOKENS`.
    """

    def __init__(self, kv: Tensor, dtype: torch.dtype) -> None:
        self._block_size = kv.shape[3]
        room = MOST_WIDE_TOKENS // self._block_size
        self._blocks = torch.empty(room, *kv.shape[2:], dtype=dtype, device=kv.device)
        self.caches = self._blocks[:, 0], self._blocks[:, 1]
        self._numbers = torch.empty(0, dtype=torch.int32, device=kv.device)
        self.tables: Tensor | None = None
        """The prompts' block tables of the wide blocks; None where the step does without."""

    def begin(self, pages: Pages) -> None:
        """Looks up the blocks of a step's prompts. Steps that are captured have none on the host."""
        self.tables = None
        prompts = pages.prompts
        counts = -(-np.asarray(prompts.lens, np.int64) // self._block_size)
        if sum(prompts.tokens) < LEAST_NEW_TOKENS or counts.sum() > len(self._blocks):
            return
        nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        at = np.repeat(np.asarray(prompts.rows, np.int64), counts) * pages.tables.shape[1] + nth
        places = torch.from_numpy(at).to(pages.tables.device, non_blocking=True)
        self._numbers = pages.tables.reshape(-1)[places]
        self.tables = torch.zeros_like(pages.tables)
        self.tables.view(-1)[places] = torch.arange(len(at), dtype=torch.int32, device=places.device)

    def layer(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of the step's prompts in one layer, whose cache is `kv`."""
        widen_blocks(kv, self._numbers, self._blocks)
        return self.caches


class TritonBackend:
    """Reads lengths, tables and tiles on the device, so that steps can be captured in CUDA graphs.

    Layers with one window share the schedule of a step; there is one for few rows and one for more. All share
    its plan of the prompts, which cuts no tiles where a layer has a window. An fp8 cache is widened, layer by
    layer, for steps with many new tokens.
    """

    name = "triton"
    graphs = True

    def __init__(self, shape: Shape) -> None:
        kv = shape.kv
        self._shape = shape
        kv_heads, head_dim = kv.shape[4:]
        self._rows = TileRows(shape.heads, kv_heads, head_dim, shape.dtype, kv.dtype, kv.device)
        self._pieces = None
        if kv.is_cuda and not any(shape.windows):
            processors = processors_of(kv.device)
            sizes = shape.heads, kv_heads, head_dim, shape.dtype
            self._pieces = Pieces(*sizes, kv.device, processors, self._rows.most)
        self._schedules = {
            window: tuple(
                DecodeSchedule(
                    DecodeShape(shape.heads, kv_heads, head_dim, kv.dtype, window), rows, kv.device
                )
                for rows in (FEW_ROWS, shape.max_rows)
            )
            for window in dict.fromkeys(shape.windows)
        }
        self._caches = [(layer[:, 0], layer[:, 1]) for layer in kv]
        self._pages: Pages | None = None
        self._step_pieces: Pieces | None = None
        self._step_rows = self._rows.usual
        self._wide = None if kv.dtype == shape.dtype else WideBlocks(kv, shape.dtype)

    def plan(self, prompts: PromptChunks, first: int, *, captured: bool) -> NDArray[np.int32]:
        """The plan of the step's prefill attention, flat: which program computes which tile."""
        kv_heads, processors = self._sharing()
        rows = self._rows.usual if captured else self._rows.of_step(prompts.tokens, prompts.lens)
        plan = plan_prefill(
            prompts.tokens,
            prompts.lens,
            self._rows.tokens(rows),
            first=first,
            tables=np.asarray(prompts.rows, np.int32),
            kv_heads=kv_heads,
            processors=processors,
        )
        return plan.reshape(-1)

    def plan_room(self, tokens: int) -> int:
        """The most int32 entries of a plan for a step of so many tokens."""
        # A chunk has two tokens or more, and a tile of its own at least.
        return COLUMNS * most_rows(tokens // 2, *self._sharing())

    def _sharing(self) -> tuple[int, int]:
        """KV heads, and the multiprocessors among which tiles are cut (0: they are not)."""
        return self._shape.kv.shape[4], 0 if self._pieces is None else self._pieces.processors

    def _pieces_of(self, pages: Pages) -> Pieces | None:
        """Memory for the results of cut tiles; None where the step certainly has none."""
        tokens = pages.prompts.tokens
        tile = self._rows.tokens(self._step_rows)
        tiles = sum(-(-n // tile) for n in tokens)
        if pages.extra is None or (tokens and len(pages.extra) == COLUMNS * (1 + tiles)):
            return None
        return self._pieces

    def warm_up(self) -> None:
        """Compiles prefill of short and long prompts, with cut tiles and without, over each kind of cache."""
        shape = self._shape
        kv_heads, head_dim = shape.kv.shape[4:]
        heads = shape.heads + 2 * kv_heads
        q = torch.zeros(1, heads, head_dim, dtype=shape.dtype, device=shape.kv.device)[:, : shape.heads]
        plan = torch.from_numpy(plan_prefill([1], [1], self._rows.tokens(self._rows.usual))).to(q.device)
        table = torch.zeros(1, 1, dtype=torch.int32, device=q.device)
        caches = [self._caches[0]] if self._wide is None else [self._caches[0], self._wide.caches]
        sizes = [(self._rows.usual, 1), (self._rows.usual, None)]
        if self._rows.wide is not None:
            sizes.append((self._rows.wide, None))
        kinds = product(caches, self._schedules, (None, self._pieces), sizes)
        for (keys, values), window, pieces, (rows, longest) in kinds:
            out = torch.empty(1, shape.heads, head_dim, dtype=q.dtype, device=q.device)
            paged_prefill(
                q,
                keys,
                values,
                table,
                plan,
                out=out,
                window=window,
                pieces=pieces,
                longest=longest,
                rows=rows,
            )

    def begin(self, pages: Pages) -> None:
        """Keeps the step's pages, and shares out the work of its decodes."""
        self._pages = pages
        self._step_rows = self._rows.of_step(pages.prompts.tokens, pages.prompts.lens)
        self._step_pieces = self._pieces_of(pages)
        if self._wide is not None:
            self._wide.begin(pages)
        if pages.decode_rows:
            for schedules in self._schedules.values():
                schedules[pages.decode_rows > FEW_ROWS].update(pages.decode_lens)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention of queries `q` [tokens, heads, head_dim] in one layer: one launch per kind of row."""
        pages, shape = self._pages, self._shape
        assert pages is not None
        keys, values = self._caches[layer]
        n, window = pages.decode_rows, shape.windows[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if n:
            table, lens, schedule = (
                pages.decode_table,
                pages.decode_lens,
                self._schedules[window][n > FEW_ROWS],
            )
            # The layer's matrix products have run since the schedule was made.
            options: dict[str, Any] = {"schedule": schedule, "window": window, "settled": True}
            paged_decode(q[:n], keys, values, table, lens, out=out[:n], **options)
        if pages.extra is not None:
            plan, tables = pages.extra.view(-1, COLUMNS), pages.tables
            if self._wide is not None and self._wide.tables is not None:
                tables = self._wide.tables
                keys, values = self._wide.layer(shape.kv[layer])
            longest = max(pages.prompts.lens, default=None)
            paged_prefill(
                q,
                keys,
                values,
                tables,
                plan,
                out=out,
                window=window,
                pieces=self._step_pieces,
                longest=longest,
                rows=self._step_rows,
            )
        return out

    def copy_blocks(self, pairs: Tensor) -> None:
        """Copies blocks within the pool, for all layers in one launch."""
        copy_blocks(self._shape.kv, self._shape.kv, pairs, block_dim=1)
