"""A kernel of the engine without a GPU: attention over blocks that lie anywhere in the pool.

    python examples/kernel_on_cpu.py

Triton's interpreter runs the kernel with numpy, program by program: print() works in it.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from pagecast.kernels.paged_decode import paged_decode

BLOCK, HEADS, KV_HEADS, DIM = 16, 4, 2, 64


def main() -> None:
    """Attends to two sequences of 40 and 23 tokens in scattered blocks, and compares with plain attention."""
    torch.manual_seed(0)
    keys, values = (torch.randn(8, BLOCK, KV_HEADS, DIM) for _ in range(2))
    queries = torch.randn(2, HEADS, DIM)
    table = torch.tensor([[5, 0, 7], [3, 6, 0]], dtype=torch.int32)  # blocks of each sequence, in its order
    lengths = torch.tensor([40, 23], dtype=torch.int32)
    out = paged_decode(queries, keys, values, table, lengths)
    for row, length in enumerate(lengths.tolist()):
        k, v = (pool[table[row].long()].flatten(0, 1)[:length] for pool in (keys, values))
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
        weights = torch.einsum("hd,thd->ht", queries[row], k).div(DIM**0.5).softmax(dim=-1)
        expected = torch.einsum("ht,thd->hd", weights, v)
        assert float((out[row] - expected).abs().max()) < 1e-5
        blocks = table[row, : -(-length // BLOCK)].tolist()
        print(f"sequence {row}: {length} tokens in blocks {blocks}, off by less than 1e-5")


if __name__ == "__main__":
    main()
