"""The dtype that vLLM gives the KV cache of sparse latent attention by itself: packed, by the GPU's kernels.

Source: `_canonicalize_sparse_mla_kv_cache_dtype` in vllm/model_executor/layers/attention/mla_attention.py and
the order of backends in platforms/cuda.py, 0.24 to 0.33.
"""

from __future__ import annotations

from pagecast.sim.machine.gpus import Gpu
from pagecast.sim.machine.model_facts import ModelFacts

PACKED = "fp8_ds_mla"


def packed_dtype(model: ModelFacts, gpu: Gpu, kv_cache_dtype: str) -> str:
    """The dtype of the KV cache in place of the one asked for.

    FlashMLA, which Hopper has, takes every dtype of 8 bits packed; desktop Blackwell has no other format.
    """
    shape = model.attention
    if shape.indexer is None or shape.mla is None or "ds_mla" in kv_cache_dtype:
        return kv_cache_dtype
    eight_bits = model.kv_element_bytes(kv_cache_dtype) == 1
    if (gpu.hopper and eight_bits) or (gpu.desktop_blackwell and (eight_bits or kv_cache_dtype == "auto")):
        return PACKED
    return kv_cache_dtype
