"""Steps captured as CUDA graphs, one for each of a ladder of token counts, sharing one memory pool.

A graph runs from the packed metadata to the final states; logits and the draw follow it. A step is padded to
the next size with rows that have no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class StepGraphs:
    """`run(size)` is captured for each of `sizes`; it must read and write the same memory every time.

    `pool` is the memory pool to use: graphs that never run at once may share one.
    """

    def __init__(self, run: Callable[[int], Tensor], sizes: Sequence[int], pool: Any) -> None:
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._states: dict[int, Tensor] = {}
        # The largest first: the smaller ones find their memory in its pool.
        for size in sorted(sizes, reverse=True):
            run(size)  # kernels are compiled and libraries loaded outside of the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                states = run(size)
            self._graphs[size], self._states[size] = graph, states

    def __call__(self, size: int) -> Tensor:
        """Replays a step; returns the final states [size, hidden], valid until the next replay."""
        self._graphs[size].replay()
        return self._states[size]

    def close(self) -> None:
        """Lets the graphs go: NCCL ends a group only when no graph holds one of its operations."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._states.clear()
