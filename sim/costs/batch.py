"""Batch: the shape of one step, all that a cost may depend on."""

from __future__ import annotations

from typing import NamedTuple


class Batch(NamedTuple):
    """The shape of one step, all that a cost may depend on.

    `decode_ctx` sums the context tokens of the decoding requests, without the token being computed;
    `decode_max` is the longest of them; `prefill` holds `(tokens computed, tokens already there)`
    for each prompt chunk, in no meaningful order. `after` is the number of tokens of the step before this
    one if that had prompt chunks, else 0: a GPU that has just done much arithmetic runs at lower clocks.
    """

    decode_n: int
    decode_ctx: int
    decode_max: int
    prefill: tuple[tuple[int, int], ...]
    after: int = 0
