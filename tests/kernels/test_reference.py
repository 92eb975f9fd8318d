"""The references themselves, against PyTorch's own attention and by hand."""

from collections.abc import Callable
from typing import Any

import torch
from pagecast.kernels import reference


def test_attention_is_scaled_dot_product_attention() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 6, 64), torch.randn(9, 2, 64), torch.randn(9, 2, 64)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    out = reference.attention(q, k, v, 64**-0.5, None)
    torch.testing.assert_close(out, expected[0].transpose(0, 1))


def test_a_window_of_one_sees_only_itself() -> None:
    q, k, v = torch.randn(3, 2, 8), torch.randn(5, 1, 8), torch.randn(5, 1, 8)
    out = reference.attention(q, k, v, 1.0, 1)
    torch.testing.assert_close(out, v[2:].expand(3, 2, 8))


def test_chunks_give_what_the_whole_prompt_gives(paged: Callable[..., Any]) -> None:
    cache = paged([50], 2, 64, 16, torch.float32)
    k, v, table = cache.k.cpu(), cache.v.cpu(), cache.table.cpu()
    q = torch.randn(50, 4, 64)
    whole = reference.paged_prefill(q, k, v, table, [50], [50])
    chunks = [
        reference.paged_prefill(q[a:b], k, v, table, [b - a], [b]) for a, b in ((0, 20), (20, 49), (49, 50))
    ]
    torch.testing.assert_close(torch.cat(chunks), whole)
