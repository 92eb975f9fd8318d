"""The indexer of sparse attention: small heads that choose the tokens which a query attends to.

Each token leaves one key of its own in a cache beside the layer's KV, on every GPU.

Source: the modelling code of DeepSeek V3.2, GLM-5 and MiniMax-M3; the caches' specifications in vLLM 0.33
(model_executor/models/deepseek_v2.py, models/glm5next, models/minimax_m3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagecast.sim.machine.matrix import Matrix

_SCALED_BLOCK = 128  # values of a key in fp8 that share a scale of 4 bytes


@dataclass(frozen=True, slots=True)
class Indexer:
    """Indexers of `layers` layers, whose matrix products are `matrices`.

    `token_bytes`: what one token keeps in one of the layers. `small`: a layer's parameters in no matrix
    product. `chosen`: tokens that a query attends to at most, in `sparse_layers` layers. `pool`: tokens that
    leave one key together; a token that is not pooled yet takes `pooled_token_bytes`. `score_flops`: of one
    (query, key) pair in a layer, on every GPU.
    """

    layers: int
    matrices: tuple[Matrix, ...]
    token_bytes: float
    small: int
    chosen: int
    sparse_layers: int
    pool: int = 1
    pooled_token_bytes: int = 0
    score_flops: int = 0


def fp8_key_bytes(dim: int) -> int:
    """Bytes of a key of `dim` values in fp8, scales included."""
    return dim + -(-dim // _SCALED_BLOCK) * 4


class IndexHeads(NamedTuple):
    """Heads of an indexer, the width of each, and the tokens that they choose."""

    heads: int
    dim: int
    chosen: int


def latent_indexer(
    layers: int, sparse_layers: int, hidden: int, rank: int, index: IndexHeads, pool: int = 1
) -> Indexer:
    """DeepSeek's: queries from the latent of `rank`, one key a token in fp8 with a scale.

    `pool`: so many tokens leave one key together, weighed by a gate (GLM-5.3 Flash).
    """
    heads, dim, chosen = index
    gate = (Matrix("index_gate", hidden, dim, layers),) if pool > 1 else ()
    return Indexer(
        layers=layers,
        matrices=(
            Matrix("index_q", rank, heads * dim, layers),
            Matrix("index_k", hidden, dim, layers),
            Matrix("index_weights", hidden, heads, layers),
            *gate,
        ),
        token_bytes=fp8_key_bytes(dim) / pool,
        small=2 * dim + (pool * dim if pool > 1 else 0),
        chosen=chosen,
        sparse_layers=sparse_layers,
        pool=pool,
        pooled_token_bytes=2 * 2 * dim,
        score_flops=2 * heads * dim,
    )


def hidden_indexer(layers: int, hidden: int, index: IndexHeads) -> Indexer:
    """MiniMax's: queries and one key a token from the hidden state, keys in 16 bits."""
    heads, dim, chosen = index
    return Indexer(
        layers=layers,
        matrices=(Matrix("index_q", hidden, heads * dim, layers), Matrix("index_k", hidden, dim, layers)),
        token_bytes=2 * dim,
        small=2 * dim,
        chosen=chosen,
        sparse_layers=layers,
        score_flops=2 * heads * dim,
    )
