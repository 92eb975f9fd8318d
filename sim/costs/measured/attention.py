"""Measured attention: decode over a batch and a context, prompt chunks by the pairs that they attend to.

Decode was measured for uniform batches; what a ragged batch takes is taken from its mean context. Prompts
were measured without a cached prefix. Their time above that of a one-token prompt, per (query, key) pair, is
a rate that depends on the length; a chunk after a prefix takes its own pairs at the rate of its full length.

FlashAttention's variable-length kernel computes whole tiles of query rows. In a step with prompts a decoding
request takes a tile as well, on top of reading its context, and nothing is split along the context: the
longest tile is a lower bound of the step's attention.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import numpy as np
from pagecast.sim.costs.families.attention_tiles import Tiles
from pagecast.sim.costs.measured.grid import completed, extended
from pagecast.sim.costs.measured.missing import NotMeasured
from pagecast.sim.costs.measured.products import BF16
from pagecast.sim.costs.measured.tables import OperationTimes
from pagecast.sim.machine.model_facts import attended_pairs
from pagecast.traces.arrays import Floats


class AttentionHeads(NamedTuple):
    """Attention of one layer on one GPU; `window` 0 is full attention."""

    kv_dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int


class DecodeAttention:
    """Decode attention of one layer. Contexts leave out the token that is computed."""

    def __init__(self, family: OperationTimes, target: AttentionHeads) -> None:
        key = nearest(family, target)
        self._contexts, self._batches = family.axes["context"], family.axes["batch"]
        self._alike = target.kv_heads / key.kv_heads
        self._wide = target.head_dim / key.head_dim
        self._window = np.inf if key.window == target.window else target.window
        self._grid = _filled(family.times[family.keys[tuple(key)]], family)

    def seconds(self, n: int, contexts: Floats) -> Floats:
        """Time of a batch of `n` requests at each mean context."""
        batch = n * self._alike
        last = len(self._batches) - 2
        at = min(max(int(np.searchsorted(self._batches, batch)) - 1, 0), last)
        low, high = self._batches[at], self._batches[at + 1]
        share = max((batch - low) / (high - low), 0.0)
        row = (1 - share) * self._grid[at] + share * self._grid[at + 1]
        return extended(np.minimum(contexts, self._window), self._contexts, row) * self._wide


class PromptAttention:
    """Attention of prompt chunks in one layer, above the time of the smallest launch."""

    def __init__(self, family: OperationTimes, target: AttentionHeads, tiles: Tiles | None, sms: int) -> None:
        key = nearest(family, target)
        times = completed(family.times[family.keys[tuple(key)]][0], family.axes["tokens"])
        lengths = family.axes["tokens"]
        scale = target.heads * target.head_dim / (key.heads * key.head_dim)
        self.least_s = float(times[0])
        pairs = np.array([attended_pairs(int(length), 0, key.window) for length in lengths])
        rates = np.maximum(times - times[0], 0.0) * scale / pairs
        long = lengths >= _SHORTEST
        self._lengths: list[float] = lengths[long].tolist()
        self._rates: list[float] = rates[long].tolist()
        self._window = target.window
        group = target.heads // target.kv_heads
        self.tile = tiles.tokens(group) if tiles else 1
        self.narrow = tiles.narrow_rows // group if tiles and _may_be_narrow(target) else 0
        self.narrow_share = self.narrow / self.tile
        self.exposed = tiles.exposed if tiles else 0.0
        self._span_s = self._rates[-1] * self.tile * sms / target.kv_heads if tiles else 0.0

    def rate(self, length: float) -> float:
        """Seconds of a (query, key) pair in a sequence of `length` tokens."""
        lengths, rates = self._lengths, self._rates
        at = bisect_right(lengths, length)
        if at == 0:
            return rates[0]
        if at == len(lengths):
            return rates[-1]
        low, high = lengths[at - 1], lengths[at]
        share = (length - low) / (high - low)
        return rates[at - 1] + share * (rates[at] - rates[at - 1])

    def seconds(self, tokens: int, context: int) -> float:
        """Time of a chunk of `tokens` after `context` tokens; whole tiles where the kernel has them."""
        tile = self.tile
        rows = -(-tokens // tile) * tile if context else tokens
        return attended_pairs(rows, context, self._window) * self.rate(tokens + context)

    def tile_seconds(self, context: float) -> float:
        """Computing a decoding request's tile, on top of reading its `context` tokens; 0 without tiles."""
        return context * self.tile * self._rates[-1] if self._span_s else 0.0

    def span_seconds(self, longest: int) -> float:
        """The tile of the longest sequence, walked by one multiprocessor."""
        return longest * self._span_s


def _may_be_narrow(target: AttentionHeads) -> bool:
    """Whether the kernel has tiles of fewer rows for such heads."""
    return target.kv_dtype == BF16 and target.head_dim in (64, 128) and not target.window


_SHORTEST = 64  # of shorter prompts, what is above the smallest launch is no rate


def nearest(family: OperationTimes, target: AttentionHeads) -> AttentionHeads:
    """The measured configuration most like `target`. Errors: NotMeasured for its KV dtype or window."""
    if tuple(target) in family.keys:
        return target
    keys = [AttentionHeads(*key) for key in family.keys if key[0] == target.kv_dtype]
    if not keys:
        raise NotMeasured(f"attention with a KV cache in {target.kv_dtype} was not measured")
    windows = {key.window for key in keys}
    if target.window not in windows:
        keys = [key for key in keys if key.window == 0]
    else:
        keys = [key for key in keys if key.window == target.window]

    def distance(key: AttentionHeads) -> tuple[float, float, float]:
        groups = key.heads / key.kv_heads / (target.heads / target.kv_heads)
        return (
            abs(np.log(key.head_dim / target.head_dim)),
            abs(np.log(key.kv_heads / target.kv_heads)),
            abs(np.log(groups)),
        )

    return min(keys, key=distance)


def _filled(times: Floats, family: OperationTimes) -> Floats:
    """The grid without gaps: along contexts, then in proportion to the batch where none was measured."""
    contexts, batches = family.axes["context"], family.axes["batch"]
    rows = [completed(row, contexts) for row in times]
    last: Any = None
    for at, row in enumerate(rows):
        count = np.isfinite(times[at]).sum()
        if count < 2 and last is not None:
            scaled = rows[last] * batches[at] / batches[last]
            rows[at] = scaled if not count else np.maximum(scaled, np.nan_to_num(row))
        else:
            last = at
    return np.array(rows)
