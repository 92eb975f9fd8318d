"""Measured multi-head latent attention: one operation that holds the layer's projections as well.

A module's time is split in what every row passes through (its time at the shortest context) and what grows
with the context, so that mixed steps can be composed as with plain attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pagecast.sim.costs.measured.grid import completed, extended
from pagecast.sim.costs.measured.missing import NotMeasured
from pagecast.sim.costs.measured.tables import MeasuredTable
from pagecast.sim.machine.model_facts import Mla, ModelFacts, attended_pairs
from pagecast.traces.arrays import Floats

# Sizes that were measured: DeepSeek-V3, and Kimi-K2 with fewer heads; with indexers DeepSeek-V3.2 and GLM-5.
_DEEPSEEK = Mla(kv_lora_rank=512, rope_dim=64, nope_dim=128, q_lora_rank=1536)
_GLM = Mla(kv_lora_rank=512, rope_dim=64, nope_dim=192, q_lora_rank=2048)
_DENSE: dict[tuple[Mla, int], tuple[str, ...]] = {(_DEEPSEEK, 7168): ()}
_SPARSE: dict[tuple[Mla, int], tuple[str, ...]] = {
    (_DEEPSEEK, 7168): ("DeepseekV32ForCausalLM",),
    (_GLM, 6144): ("GlmMoeDsaForCausalLM",),
}
PREFIXED_TOKENS = 4096  # of chunks whose prefixes are swept
_SHORT = 512  # tokens of a prompt whose attention is little beside its projections


class LatentAttention:
    """MLA of one layer with `heads` query heads on one GPU. Errors: NotMeasured."""

    tile = 1

    def __init__(self, table: MeasuredTable, model: ModelFacts, key: tuple[str, str, int]) -> None:
        """`key`: dtypes of KV and projections, and the query heads of one GPU."""
        mla, indexer = model.attention.mla, model.attention.indexer
        kind, sizes = ("sparse", _SPARSE) if indexer else ("mla", _DENSE)
        measured = sizes.get((mla, model.hidden)) if mla else None
        if measured is None or f"{kind}_decode" not in table:
            raise NotMeasured(
                f"{'sparse' if indexer else 'latent'} attention of these sizes was not measured"
            )
        if indexer and indexer.layers < model.layers:
            raise NotMeasured("layers that use another's choice of tokens were not measured")
        decode, context = table.family(f"{kind}_decode"), table.family(f"{kind}_context")
        kernel = (*measured, *key)
        for family in (decode, context):
            if family.of(*kernel) is None:
                raise NotMeasured(
                    f"latent attention with {key[2]} heads in {key[0]} and {key[1]} was not measured"
                )
        self._contexts, self._batches = decode.axes["context"], decode.axes["batch"]
        times: Any = decode.of(*kernel)
        self._grid = np.array([completed(row, decode.axes["context"]) for row in times])
        prompts: Any = context.of(*kernel)
        self._rows, self._row_times = _row_times(self._batches, self._grid[:, 0], context.axes, prompts)
        lengths = context.axes["tokens"]
        alone = completed(prompts[0], lengths)
        long = lengths > _SHORT
        self._lengths = lengths[long]
        spent = np.maximum(alone - self.row_seconds(lengths), 0.0)[long]
        self._rates = spent / _pairs(self._lengths)
        self._chosen = indexer.chosen if indexer else 0
        if self._chosen:
            spent[~np.isfinite(prompts[0][long])] = np.nan
            indexed_s = _indexed_s(table, kernel, self._chosen)
            self._pair_s, self._indexed_s = _sparse_rates(self._lengths, spent, self._chosen, indexed_s)
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
        if self._chosen:
            chosen = attended_pairs(tokens, context, self._chosen)
            return self._pair_s * chosen + self._indexed_s * attended_pairs(tokens, context)
        return attended_pairs(tokens, context) * self.rate(tokens + context)


def _pairs(lengths: Floats, chosen: int = 0) -> Floats:
    return np.array([attended_pairs(int(length), 0, chosen) for length in lengths], np.float64)


def _indexed_s(table: MeasuredTable, key: tuple[Any, ...], chosen: int) -> float | None:
    """Seconds of a pair that an indexer scores, from chunks behind prefixes; None: not measured."""
    if "sparse_prefix" not in table:
        return None
    family = table.family("sparse_prefix")
    times, contexts = family.of(*key), family.axes["context"]
    if times is None:
        return None
    far = np.isfinite(times) & (contexts >= chosen)
    if far.sum() < 2:
        return None
    slope = np.polyfit(contexts[far], times[far], 1)[0]
    return max(float(slope) / PREFIXED_TOKENS, 0.0)


def _sparse_rates(
    lengths: Floats, spent: Floats, chosen: int, indexed_s: float | None
) -> tuple[float, float]:
    """Seconds of a pair that is attended to and of one that the indexer scores, from prompts alone."""
    beyond = (lengths > chosen) & np.isfinite(spent)
    attended, scored, spent = _pairs(lengths, chosen)[beyond], _pairs(lengths)[beyond], spent[beyond]
    if indexed_s is None:
        terms = np.stack([np.ones(len(scored)), scored / attended], axis=1)
        pair_s, indexed_s = np.maximum(np.linalg.lstsq(terms, spent / attended, rcond=None)[0], 0.0)
        return float(pair_s), float(indexed_s)
    return max(float(np.mean((spent - indexed_s * scored) / attended)), 0.0), indexed_s


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
