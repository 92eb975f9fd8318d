"""Measured multi-head latent attention: one operation that holds the layer's projections as well.

A module's time is split in what every row passes through (its time at the shortest context) and what grows
with the context, so that mixed steps can be composed as with plain attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pagecast.sim.costs.measured.grid import completed, extended
from pagecast.sim.costs.measured.missing import NotMeasured
from pagecast.sim.costs.measured.packing import Floats
from pagecast.sim.costs.measured.tables import MeasuredTable
from pagecast.sim.machine.model_facts import Mla, attended_pairs

# Sizes of the one model family that was measured: DeepSeek-V3, and Kimi-K2 with fewer heads.
MEASURED = Mla(kv_lora_rank=512, rope_dim=64, nope_dim=128, q_lora_rank=1536)
_HIDDEN, _SHORT = 7168, 512  # tokens of a prompt whose attention is little beside its projections


class LatentAttention:
    """MLA of one layer with `heads` query heads on one GPU. Errors: NotMeasured."""

    tile = 1

    def __init__(self, table: MeasuredTable, mla: Mla, hidden: int, key: tuple[str, str, int]) -> None:
        if mla != MEASURED or hidden != _HIDDEN or "mla_decode" not in table:
            raise NotMeasured("latent attention of these sizes was not measured")
        decode, context = table.family("mla_decode"), table.family("mla_context")
        for family in (decode, context):
            if family.of(*key) is None:
                raise NotMeasured(
                    f"latent attention with {key[2]} heads in {key[0]} and {key[1]} was not measured"
                )
        self._contexts, self._batches = decode.axes["context"], decode.axes["batch"]
        times: Any = decode.of(*key)
        self._grid = np.array([completed(row, decode.axes["context"]) for row in times])
        prompts: Any = context.of(*key)
        self._rows, self._row_times = _row_times(self._batches, self._grid[:, 0], context.axes, prompts)
        lengths = context.axes["tokens"]
        alone = completed(prompts[0], lengths)
        pairs = lengths * (lengths + 1) / 2
        rates = np.maximum(alone - self.row_seconds(lengths), 0.0) / pairs
        long = lengths > _SHORT
        self._lengths, self._rates = lengths[long], rates[long]
        self.least_s = 0.0

    def row_seconds(self, rows: Any) -> Floats:
        """Seconds of `rows` tokens without context."""
        return extended(rows, self._rows, self._row_times)

    def decode_seconds(self, n: int, contexts: Floats) -> Floats:
        """Seconds of a batch of `n` decoding requests beyond those of its rows, at each mean context."""
        base = self._grid - self._grid[:, :1]
        row = np.array([extended(n, self._batches, column) for column in base.T])
        return extended(contexts, self._contexts, np.maximum(row, 0.0))

    def rate(self, length: float) -> float:
        """Seconds of a (query, key) pair in a sequence of `length` tokens."""
        return float(np.interp(length, self._lengths, self._rates))

    def seconds(self, tokens: int, context: int) -> float:
        """Attention of a chunk of `tokens` after `context` tokens, above its rows."""
        return attended_pairs(tokens, context) * self.rate(tokens + context)


def _row_times(
    batches: Floats, decoding: Floats, axes: dict[str, Floats], prompts: Floats
) -> tuple[Floats, Floats]:
    """Time by rows: of decode batches at the shortest context, then of short prompts."""
    best: dict[float, float] = {}
    for at, batch in enumerate(axes["batch"]):
        for column, tokens in enumerate(axes["tokens"]):
            time, rows = prompts[at, column], batch * tokens
            if tokens <= _SHORT and np.isfinite(time) and rows > batches[-1]:
                best[rows] = min(time, best.get(rows, np.inf))
    finite = np.isfinite(decoding)
    rows = np.concatenate([batches[finite], sorted(best)])
    times = np.concatenate([decoding[finite], [best[key] for key in sorted(best)]])
    return rows, np.maximum.accumulate(times)
