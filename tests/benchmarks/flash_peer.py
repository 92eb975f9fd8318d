"""FlashAttention-3 as vLLM ships it, called without vLLM: the peer of the attention benchmarks.

Install vLLM, or name its `_vllm_fa3_C.abi3.so` in the environment variable FLASH3_LIBRARY.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from pagecast.engine.kernel_bench import PagedBatch
from torch import Tensor

NAME = "FA3"


def _library() -> str | None:
    named = os.environ.get("FLASH3_LIBRARY")
    if named:
        return named
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    libraries = sorted(Path(spec.submodule_search_locations[0]).glob("vllm_flash_attn/_vllm_fa3_C*.so"))
    return str(libraries[0]) if libraries else None


def load() -> bool:
    """True if FlashAttention-3 is here and this GPU can run it."""
    library = _library()
    if library is None or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    torch.ops.load_library(library)
    return True


def schedule(q: Tensor, k_cache: Tensor, batch: PagedBatch) -> Tensor:
    """FlashAttention-3's own plan of a step (made once a step by its users, so not timed)."""
    return torch.ops._vllm_fa3_C.get_scheduler_metadata(
        batch.starts.shape[0] - 1,
        batch.most_queries,
        batch.most_tokens,
        q.shape[1],
        k_cache.shape[2],
        q.shape[2],
        q.shape[2],
        q.dtype,
        batch.seq_lens,
        batch.starts,
        None,
        None,
        None,
        None,
        k_cache.shape[1],
        0,
        True,
        -1,
        -1,
        False,
        0,
        None,
        0,
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, batch: PagedBatch, plan: Tensor | None = None
) -> None:
    """Causal attention, paged where the batch has a table; else k and v are [tokens, kv_heads, dim]."""
    none: Any = None
    torch.ops._vllm_fa3_C.fwd(
        q,
        k,
        v,
        none,
        none,
        none,
        out,
        batch.starts,
        batch.starts if batch.block_table is None else none,
        none,
        none,
        batch.seq_lens,
        batch.most_queries,
        batch.most_tokens,
        batch.block_table,
        none,
        none,
        none,
        none,
        none,
        none,
        none,
        none,
        q.shape[2] ** -0.5,
        True,
        -1,
        -1,
        0.0,
        True,
        plan,
        0,
        none,
        0,
        none,
        1,
        0,
        none,
    )
