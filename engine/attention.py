"""Attention backends by name, and the one of plain PyTorch."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import torch
from numpy.typing import NDArray
from pagecast.engine.backend import Backend, Pages, PromptChunks, Shape
from pagecast.kernels import reference
from pagecast.sim.core.errors import BadInput, CannotRunHere
from torch import Tensor

BACKENDS = ("triton", "flash-attn", "torch")


class TorchBackend:
    """Plain PyTorch, a sequence at a time: for the CPU, and to check the others by."""

    name = "torch"
    graphs = False

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._pages: Pages | None = None
        self._lens: list[int] = []

    def plan(self, prompts: PromptChunks, first: int, *, captured: bool) -> NDArray[np.int32]:
        # Plain PyTorch plans no work.
        return np.empty(0, np.int32)

    def plan_room(self, tokens: int) -> int:
        # There is no plan.
        return 0

    def warm_up(self) -> None:
        pass  # plain PyTorch is not compiled

    def begin(self, pages: Pages) -> None:
        """Keeps the step's pages for the layers that follow."""
        self._pages = pages
        self._lens = pages.decode_lens.tolist()

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention of queries `q` [tokens, heads, head_dim] in one layer: decodes first, then chunks."""
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
        """Copies blocks within the pool, for all layers."""
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
    if name == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") == "1":
        return name  # the kernels in Triton's interpreter: slow, to look into them
    if name != "torch" and device.type != "cuda":
        slow = "; TRITON_INTERPRET=1 runs its kernels on the CPU, slowly" if name == "triton" else ""
        raise CannotRunHere(
            f"attention backend {name} needs a CUDA GPU; choose torch, which needs none{slow}"
        )
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
