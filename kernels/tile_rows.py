"""Rows of the tiles of a prefill plan: by the model and the GPU, and by the step where that pays."""

from collections.abc import Sequence

import torch
from pagecast.kernels.capabilities import processors_of
from pagecast.kernels.merge_pieces import rows_per_tile, tokens_per_tile
from pagecast.kernels.prefill_plan import wide_tiles_pay


class TileRows:
    """Rows, (token, head in the group), of the tiles that are fastest here.

    `usual`: of most steps, and of those captured in CUDA graphs, whose lengths are not known. `wide`: of
    steps with many long pieces; None where there is no kernel for such tiles.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._heads, self._kv_heads, self._dtype = heads, kv_heads, dtype
        self.usual = rows_per_tile(heads, kv_heads, dtype)
        self.wide: int | None = None
        self._processors = 0
        fits = dtype.itemsize == 2 and dtype == kv_dtype and heads // kv_heads <= self.usual
        if device.type != "cuda" or not fits or torch.cuda.get_device_capability(device) != (9, 0):
            return
        try:
            from pagecast.kernels.prefill_hopper import rows_of, wide_rows_of
        except (ImportError, AttributeError):  # this Triton's Gluon differs
            return
        self.usual, self.wide = rows_of(head_dim), wide_rows_of(head_dim)
        self._processors = processors_of(device)

    @property
    def most(self) -> int:
        """The most rows that a tile may have."""
        return max(self.usual, self.wide or 0)

    def tokens(self, rows: int) -> int:
        """New tokens of a tile of so many rows."""
        return tokens_per_tile(self._heads, self._kv_heads, self._dtype, rows)

    def of_step(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
        """The rows for a step whose sequences bring `query_lens` new tokens, the last of `seq_lens` each."""
        if self.wide is None or not query_lens:
            return self.usual
        wide = wide_tiles_pay(
            query_lens,
            seq_lens,
            self.tokens(self.usual),
            self.tokens(self.wide),
            kv_heads=self._kv_heads,
            processors=self._processors,
        )
        return self.wide if wide else self.usual
