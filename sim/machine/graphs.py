"""CUDA graphs: the batch sizes that engines capture, and what our own engine's graphs keep on the GPU."""

from __future__ import annotations

GRAPH_LARGEST = 512  # vLLM's largest captured batch
GRAPH_LARGEST_OF = {"gpt_oss": 1024}
# Of our own engine: what a captured step keeps on the device, and all of them together.
GRAPH_BYTES = 2 << 20
GRAPH_POOL_BYTES = 160 << 20


def capture_sizes(max_num_seqs: int, model_type: str = "") -> list[int]:
    """Batch sizes that vLLM captures: 1, 2, 4, every 8th to 256, every 16th, to twice the requests.

    See `vllm/config/vllm.py`, `_set_cudagraph_sizes`, 0.11 and later; for gpt-oss `GptOssForCausalLMConfig`.
    """
    top = GRAPH_LARGEST_OF.get(model_type) or min(2 * max_num_seqs, GRAPH_LARGEST)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16)]
    return [size for size in sizes if size <= top]


def engine_graphs(max_num_seqs: int) -> list[int]:
    """Batch sizes of the decode steps that our own engine captures, up to `max_num_seqs` itself."""
    return [*(size for size in capture_sizes(max_num_seqs) if size < max_num_seqs), max_num_seqs]


def graph_reserve(graphs: int) -> int:
    """Bytes that our own engine keeps for its graphs, which are captured when the KV tensor is there."""
    return graphs * GRAPH_BYTES + GRAPH_POOL_BYTES if graphs else 0
