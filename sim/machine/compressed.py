"""Compressed sparse attention (DeepSeek V4): caches of compressed tokens beside a window of whole ones.

Every layer keeps the newest tokens of a window. Layers with a compression ratio r keep one latent for r
tokens as well, and the state of the tokens that are being compressed; those with ratio 4 also keep the
indexer's keys.

Source: DeepSeek V4's modelling code; vllm/models/deepseek_v4 and
vllm/v1/attention/backends/mla/sparse_swa.py (0.33).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from pagecast.sim.core.group_spec import KvKind
from pagecast.sim.machine.indexer import fp8_key_bytes
from pagecast.sim.machine.matrix import Matrix

INDEXED_RATIO, COARSE_RATIO = 4, 128
RATIOS = (INDEXED_RATIO, COARSE_RATIO)
BLOCK_TOKENS = 256  # of compressed caches: the engine's block size for these models
_WINDOW_BLOCK = 64
_STATE_BLOCKS = {INDEXED_RATIO: 4, COARSE_RATIO: 8}
_ALIGNMENT = 576  # bytes: pages are padded to a multiple of this
_PACKED_BYTES = 584  # a latent: 448 values of 8 bits, a rotary key of 64 in 16 bits, and 8 bytes of scales
_FLOAT = 4


class CompressedCache(NamedTuple):
    """Caches of one form in `layers` layers: what a token adds, and a page of `block_size` tokens."""

    kind: KvKind
    window: int
    layers: int
    token_bytes: float
    block_size: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class CompressedCaches:
    """What layers of compressed attention keep, and their matrix products.

    `small`: a layer's parameters in no matrix product, as a mean over layers. `index_token_bytes`: what a
    token leaves among the indexer's keys of a layer.
    """

    caches: tuple[CompressedCache, ...]
    matrices: tuple[Matrix, ...]
    small: int
    index_token_bytes: float = 0.0

    def with_windows(self, count: int) -> CompressedCaches:
        """With so many layers more that keep a window alone."""
        every = max(cache.layers for cache in self.caches)  # the window is in all layers

        def more(layers: int) -> int:
            return layers + count if layers == every else layers

        return replace(
            self,
            caches=tuple(cache._replace(layers=more(cache.layers)) for cache in self.caches),
            matrices=tuple(matrix._replace(layers=more(matrix.layers)) for matrix in self.matrices),
        )


@dataclass(frozen=True, slots=True)
class CompressedShape:
    """Sizes of compressed attention; `ratios` has one entry for each layer, 0 or 1 for a window alone."""

    hidden: int
    heads: int
    head_dim: int
    q_rank: int
    o_rank: int
    o_groups: int
    window: int
    ratios: tuple[int, ...]
    index_heads: int
    index_dim: int


def compressed_caches(s: CompressedShape) -> CompressedCaches:
    """Caches and matrices of layers of that shape, whose ratios are 0, 1, 4 or 128."""
    n, counts = len(s.ratios), Counter(s.ratios)
    indexed, coarse = counts[INDEXED_RATIO], counts[COARSE_RATIO]
    index_key = fp8_key_bytes(s.index_dim)
    caches = (
        *_compressed(INDEXED_RATIO, indexed, _PACKED_BYTES),
        *_compressed(INDEXED_RATIO, indexed, index_key),
        *_compressed(COARSE_RATIO, coarse, _PACKED_BYTES),
        _windowed(s.window, n, _PACKED_BYTES, _WINDOW_BLOCK),
        *_states(INDEXED_RATIO, indexed, 2 * s.head_dim),
        *_states(INDEXED_RATIO, indexed, 2 * s.index_dim),
        *_states(COARSE_RATIO, coarse, s.head_dim),
    )
    matrices = (
        Matrix("q_a", s.hidden, s.q_rank, n),
        Matrix("q_b", s.q_rank, s.heads * s.head_dim, n, "outputs"),
        Matrix("kv_a", s.hidden, s.head_dim, n),
        Matrix("o_a", s.heads * s.head_dim // s.o_groups, s.o_groups * s.o_rank, n, "outputs"),
        Matrix("o", s.o_groups * s.o_rank, s.hidden, n, "inputs"),
        Matrix("compressor", s.hidden, 2 * 2 * s.head_dim, indexed),
        Matrix("compressor", s.hidden, 2 * s.head_dim, coarse),
        Matrix("index_q", s.q_rank, s.index_heads * s.index_dim, indexed),
        Matrix("index_weights", s.hidden, s.index_heads, indexed),
        Matrix("compressor", s.hidden, 2 * 2 * s.index_dim, indexed),
    )
    positions = indexed * INDEXED_RATIO * 2 * (s.head_dim + s.index_dim) + coarse * COARSE_RATIO * s.head_dim
    norms = s.q_rank + 2 * s.head_dim + s.index_dim
    return CompressedCaches(
        tuple(cache for cache in caches if cache.layers),
        tuple(matrix for matrix in matrices if matrix.layers),
        small=positions // n + norms,
        index_token_bytes=index_key / INDEXED_RATIO,
    )


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _compressed(ratio: int, layers: int, record: int) -> tuple[CompressedCache, ...]:
    page = _padded(BLOCK_TOKENS // ratio * record)
    return (CompressedCache(KvKind.LATENT, 0, layers, record / ratio, BLOCK_TOKENS, page),)


def _windowed(window: int, layers: int, record: int, block: int) -> CompressedCache:
    return CompressedCache(KvKind.WINDOW, window, layers, record, block, _padded(block * record))


def _states(ratio: int, layers: int, width: int) -> tuple[CompressedCache, ...]:
    """The tokens being compressed: two values in float32 for each channel; ratio 4 overlaps its groups."""
    window = ratio * (2 if ratio == INDEXED_RATIO else 1)
    return (_windowed(window, layers, 2 * width * _FLOAT, _STATE_BLOCKS[ratio]),)
