"""Attention over the paged cache: one small interface, and the plain PyTorch backend.

A backend owns no memory but its workspace: it is given the KV tensor, and for each step where that step's
tokens lie. Rows that compute one token come first, then prompt chunks, sequence after sequence.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pagecast.engine.spec import ModelSpec
from pagecast.kernels import reference
from pagecast.sim.core.errors import BadInput, CannotRunHere
from torch import Tensor

BACKENDS = ("triton", "flash-attn", "torch")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a backend is made for. `kv` is [layers, blocks, 2, block_size, kv heads, head_dim]."""

    kv: Tensor
    heads: int
    windows: tuple[int | None, ...]
    max_rows: int

    @classmethod
    def of(cls, spec: ModelSpec, kv: Tensor, max_rows: int) -> Shape:
        """The shape of a model's attention over the cache `kv`, for at most `max_rows` sequences a step."""
        return cls(kv, spec.facts.attention.heads, spec.windows, max_rows)


class Prompts(NamedTuple):
    """A step's prompt chunks, on the host: chunk i computes `tokens[i]` tokens, the last of `lens[i]`, whose
    blocks are row `rows[i]` of the tables."""

    tokens: Sequence[int] = ()
    lens: Sequence[int] = ()
    rows: Sequence[int] = ()


NO_PROMPTS = Prompts()


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
    prompts: Prompts = NO_PROMPTS
    extra: Tensor | None = None


class Backend(Protocol):
    """Attends over the cache, in which the step's own K and V already are, layer by layer."""

    name: str
    graphs: bool
    """Whether a step of single tokens may be captured in a CUDA graph."""

    def plan(self, prompts: Prompts, first: int) -> NDArray[np.int32]:
        """Numbers about a step's chunks, whose tokens begin at row `first`, that travel with its metadata;
        flat."""
        ...

    def plan_room(self, tokens: int) -> int:
        """How many numbers `plan` makes at most of chunks of so many tokens together; 0 where a step with
        prompts can't be captured in a CUDA graph."""
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


class TorchBackend:
    """Plain PyTorch, a sequence at a time: for the CPU, and to check the others by."""

    name = "torch"
    graphs = False

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._pages: Pages | None = None
        self._lens: list[int] = []

    def plan(self, prompts: Prompts, first: int) -> NDArray[np.int32]:
        return np.empty(0, np.int32)

    def plan_room(self, tokens: int) -> int:
        return 0

    def begin(self, pages: Pages) -> None:
        self._pages = pages
        self._lens = pages.decode_lens.tolist()

    def attend(self, layer: int, q: Tensor) -> Tensor:
        pages, shape = self._pages, self._shape
        assert pages is not None
        keys, values = shape.kv[layer, :, 0], shape.kv[layer, :, 1]
        n, window = pages.decode_rows, shape.windows[layer]
        parts = []
        if n:
            table, lens = pages.decode_table, self._lens
            parts.append(reference.paged_decode(q[:n], keys, values, table, lens, window=window))
        if pages.extra is not None:
            chunks, ends, rows = pages.prompts
            table = pages.tables[list(rows)]
            parts.append(reference.paged_prefill(q[n:], keys, values, table, chunks, ends, window=window))
        return torch.cat(parts).to(q.dtype)

    def copy_blocks(self, pairs: Tensor) -> None:
        kv = self._shape.kv
        reference.copy_blocks(kv, kv, [(a, b) for a, b in pairs.tolist()], block_dim=1)


def choose(name: str, device: torch.device, block_size: int) -> str:
    """The backend to use: `name`, or for `auto` triton on a GPU and torch elsewhere.

    Errors: BadInput for an unknown name or a block size the backend can't page by; CannotRunHere where
    the machine lacks what the backend needs.
    """
    if name == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if name not in BACKENDS:
        raise BadInput(f"attention backend {name!r} is not known; choose one of auto, {', '.join(BACKENDS)}")
    if name != "torch" and device.type != "cuda":
        raise CannotRunHere(f"attention backend {name} needs a CUDA GPU; choose torch, which needs none")
    if name == "flash-attn":
        if importlib.util.find_spec("flash_attn") is None:
            raise CannotRunHere("attention backend flash-attn needs the package flash-attn 2.8 or later")
        if block_size % 256:
            raise BadInput(f"flash-attn needs a block_size that is a multiple of 256, not {block_size}")
    return name


def make(name: str, shape: Shape) -> Backend:
    """The backend called `name` (see `choose`)."""
    if name == "triton":
        from pagecast.engine.attention_triton import TritonBackend

        return TritonBackend(shape)
    if name == "flash-attn":
        from pagecast.engine.attention_flash import FlashBackend

        return FlashBackend(shape)
    return TorchBackend(shape)
