"""Sampler of the next tokens on the device; what a row gets does not depend on the other rows.

A draw is the likeliest token after adding Gumbel noise to the logits divided by the temperature. The noise
is a hash of (seed, position, token), so it needs no state and repeats with the seed.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from pagecast.engine.params import SamplingParams
from pagecast.engine.shard import WHOLE, Shard, VocabPart
from torch import Tensor

FIELDS = 4  # temperature, top_p (fp32 bits), top_k, seed
SEEDS = 1 << 31
_LOW = 0xFFFFFFFF
_MOST_TOP_K = (1 << 31) - 1
_MOST_TEMPERATURE = 1e38
_FILTERED_TOGETHER = 32  # rows sorted at a time, which bounds the memory that takes


def pack(params: SamplingParams, seed: int) -> NDArray[np.int32]:
    """The row of parameters the sampler keeps on the device: int32 [FIELDS].

    Values beyond what fits mean the same as the largest that does: such a `top_k` rules nothing out, and such
    a temperature makes all tokens equally likely.
    """
    row = np.empty(FIELDS, np.int32)
    temperature = min(params.temperature, _MOST_TEMPERATURE)
    row[:2] = np.array([temperature, params.top_p], np.float32).view(np.int32)
    row[2:] = min(params.top_k, _MOST_TOP_K), seed % SEEDS
    return row


class Sampler:
    """Parameters and the newest token of every row; row numbers are those of the block tables.

    Each share of the model draws from its part of the `vocab` tokens; then all take the best of these draws.
    `vocab` None: as many as there are logits.
    """

    def __init__(
        self, rows: int, device: torch.device, *, shard: Shard = WHOLE, vocab: int | None = None
    ) -> None:
        self.shard = shard
        self._vocab = vocab
        self.params = torch.zeros(FIELDS, rows, dtype=torch.int32, device=device)
        self.temperature = self.params[0].view(torch.float32)
        self.top_p = self.params[1].view(torch.float32)
        self.top_k = self.params[2]
        self.seed = self.params[3]
        self.newest = torch.zeros(rows, dtype=torch.int32, device=device)

    def part(self, columns: int) -> VocabPart:
        """The tokens of `columns` columns of logits."""
        return self.shard.part(self._vocab or columns * self.shard.size)

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, forced: Tensor, filtered: Tensor | None
    ) -> Tensor:
        """The next token of each of `rows`: int32 [n], -1 where its logits are not finite.

        `logits` [n, vocab / shards] may be overwritten; `positions` (int32 [n]) are those of the tokens to be
        drawn; `forced` (int32 [n]) tokens to take instead, or -1. `filtered` numbers the rows of
        `logits` with top-k or top-p.
        """
        if filtered is not None:
            for some in filtered.split(_FILTERED_TOGETHER):
                of = rows[some]
                wide = self._whole(logits[some].float())
                kept = _keep_likely(wide, self.temperature[of], self.top_k[of], self.top_p[of])
                first, used, _ = self.part(logits.shape[1])
                logits[some, :used] = kept[:, first : first + used].to(logits.dtype)
        if logits.is_cuda:
            from pagecast.engine import fused

            return fused.sample(logits, rows, positions, forced, self)
        return self._sample(logits.float(), rows, positions, forced)

    def _whole(self, logits: Tensor) -> Tensor:
        """Every share's columns [n, vocab] of some rows."""
        if self.shard.size == 1:
            return logits
        every = self.shard.gather(logits).transpose(0, 1).reshape(len(logits), -1)
        return every[:, : self.part(logits.shape[1]).vocab]

    def _sample(self, logits: Tensor, rows: Tensor, positions: Tensor, forced: Tensor) -> Tensor:
        part = self.part(logits.shape[1])
        logits = logits[:, : part.used]
        finite = (logits.amax(-1) < torch.inf) & ~logits.isnan().any(-1)
        temperature = self.temperature[rows][:, None]
        random = (temperature > 0).any()
        if random:
            noise = gumbel(self.seed[rows], positions, part.used, part.first)
            logits = torch.where(temperature > 0, logits / temperature.clamp(min=1e-5) + noise, logits)
        at = logits.argmax(-1)
        best = logits.gather(-1, at[:, None])[:, 0]
        # A token's number is exact in float32: vocabularies are smaller than 2^24.
        candidates = torch.stack([best, (at + part.first).float(), finite.float()], dim=-1)
        bests, tokens, finites = self.shard.gather(candidates).unbind(-1)
        top = bests.max(0).values
        draw = torch.where(bests == top, tokens, float(part.vocab)).min(0).values
        draw = draw.clamp(max=part.vocab - 1)
        draw = torch.where(forced >= 0, forced, draw.int())
        self.newest[rows] = draw
        return torch.where((finites.min(0).values > 0) & (top > -torch.inf), draw, -1)


def gumbel(seeds: Tensor, positions: Tensor, vocab: int, first: int = 0) -> Tensor:
    """Standard Gumbel noise of `vocab` tokens from number `first` on: float32 [n, vocab], from int32 seeds
    and positions [n]."""
    key = _mix((_mix(seeds.long() & _LOW) + positions.long()) & _LOW)[:, None]
    # An odd step of its own for each row: no row's noise is another's, moved.
    step = _mix(key ^ 0x5BD1E995) | 1
    tokens = torch.arange(first, first + vocab, device=seeds.device)
    hashed = _mix((tokens * step + key) & _LOW)
    uniform = (hashed.float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash with little bias (Wellons, hash prospector: lowbias32), in int64 lanes."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def _keep_likely(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits [n, vocab] with -inf for all but the `top_k` likeliest (0: all) that have `top_p` together."""
    ordered, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    ordered = ordered.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), -torch.inf)
    likely = (ordered / temperature.clamp(min=1e-5)[:, None]).softmax(-1)
    before = likely.cumsum(-1) - likely
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (rank > 0), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)
