"""The interface of attention over the paged cache.

A backend owns no memory but its workspace: it is given the KV tensor, and for each step where that step's
tokens lie. Rows that compute one token come first, then prompt chunks, sequence after sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pagecast.engine.spec import ModelSpec
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that a backend is made for. `kv` is [layers, blocks, 2, block_size, kv heads, head_dim], fp8 or
    the `dtype` of the queries."""

    kv: Tensor
    dtype: torch.dtype
    heads: int
    windows: tuple[int | None, ...]
    max_rows: int

    @classmethod
    def of(cls, spec: ModelSpec, kv: Tensor, dtype: torch.dtype, max_rows: int, shards: int = 1) -> Shape:
        """The shape of one of `shards` GPUs' attention over its cache `kv`, for at most `max_rows` sequences
        per step."""
        return cls(kv, dtype, spec.facts.attention.heads // shards, spec.windows, max_rows)


class PromptChunks(NamedTuple):
    """A step's prompt chunks, on the host: chunk i computes `tokens[i]` tokens, the last of `lens[i]`, whose
    blocks are row `rows[i]` of the tables."""

    tokens: Sequence[int] = ()
    lens: Sequence[int] = ()
    rows: Sequence[int] = ()


NO_PROMPTS = PromptChunks()


@dataclass(frozen=True, slots=True)
class Pages:
    """Where one step's tokens lie; tensors are int32 on the device.

    The first `decode_rows` tokens are one of a sequence each: `decode_table` [rows, columns] holds their
    sequences' blocks, `decode_lens` [rows] the tokens they see, themselves included (0: no such sequence).
    The rest belong to prompt chunks, whose blocks are in `tables` [any, columns]: those of `prompts`, and
    `extra` is what the backend's `plan` returned for them (None: there are none). `slots` [tokens] is where
    each token's K and V go (-1: nowhere).

    While a step with prompts is captured, `prompts` is empty and `extra` all the room that a plan may take;
    any of the first `decode_rows` tokens may then be a chunk's, and has length 0.
    """

    decode_rows: int
    decode_table: Tensor
    decode_lens: Tensor
    slots: Tensor
    tables: Tensor
    prompts: PromptChunks = NO_PROMPTS
    extra: Tensor | None = None


class Backend(Protocol):
    """Attends over the cache, in which the step's own K and V already are, layer by layer."""

    name: str
    graphs: bool
    """Whether a step of single tokens may be captured in a CUDA graph."""

    def plan(self, prompts: PromptChunks, first: int, *, captured: bool) -> NDArray[np.int32]:
        """Numbers about a step's chunks, whose tokens begin at row `first`, that travel with its metadata;
        flat. `captured`: the step replays a CUDA graph, which was captured without these lengths."""
        ...

    def plan_room(self, tokens: int) -> int:
        """How many numbers `plan` makes at most of chunks of so many tokens together; 0 where a step with
        prompts can't be captured in a CUDA graph."""
        ...

    def warm_up(self) -> None:
        """Compiles whatever a step may need, so that no step waits for it."""
        ...

    def begin(self, pages: Pages) -> None:
        """Readies for the layers of one step."""
        ...

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention of q [tokens, heads, head_dim]."""
        ...

    def copy_blocks(self, pairs: Tensor) -> None:
        """Copies block pairs[i, 0] over block pairs[i, 1] in every layer; int32 [n, 2]."""
        ...
