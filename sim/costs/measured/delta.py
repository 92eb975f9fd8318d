"""Measured kernels of gated delta layers: the convolution and the delta rule, of prompts and of decoding.

Projections are matrix products like others. Times hang on the heads that one GPU has, not on the model's
width; the state of each decoding request is read and written whatever its context.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pagecast.sim.costs.measured.grid import completed, extended
from pagecast.sim.costs.measured.missing import NotMeasured
from pagecast.sim.costs.measured.tables import MeasuredTable
from pagecast.sim.machine.recurrent import RecurrentLayers

_WIDTH = 128  # of a head's keys and values, in every model that was measured


class DeltaRule:
    """One gated delta layer on one of `tp` GPUs. Errors: NotMeasured."""

    def __init__(self, table: MeasuredTable, recurrent: RecurrentLayers, tp: int) -> None:
        if recurrent.form != "delta" or "delta_context" not in table:
            raise NotMeasured("operations of recurrent layers of this form were not measured")
        values = recurrent.state // _WIDTH
        heads = max((recurrent.convolved - values) // 2 // _WIDTH // tp, 1), values // _WIDTH // tp
        context, decode = table.family("delta_context"), table.family("delta_decode")
        prompts: Any = context.of(*heads)
        batches: Any = decode.of(*heads)
        if prompts is None or batches is None:
            raise NotMeasured(f"delta layers with {heads[0]} and {heads[1]} heads on a GPU were not measured")
        self._tokens, self._batches = context.axes["tokens"], decode.axes["batch"]
        self._prompts, self._decoding = completed(prompts, self._tokens), completed(batches, self._batches)

    def decode_seconds(self, n: int) -> float:
        """Seconds of `n` decoding requests."""
        return float(extended(np.array([n], np.float64), self._batches, self._decoding)[0])

    def seconds(self, tokens: int) -> float:
        """Seconds of a prompt chunk, whatever comes before it."""
        return float(extended(np.array([tokens], np.float64), self._tokens, self._prompts)[0])
