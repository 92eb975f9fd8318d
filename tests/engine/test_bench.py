"""The benchmark reports the work that was done, and its floor counts it."""

from typing import Any

import pytest
import torch
from pagecast.engine.bench import bench, prompt_flops_per_token
from pagecast.engine.params import SamplingParams
from pagecast.sim.core.errors import BadInput
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_prompts_compute_the_products_that_the_floor_counts(
    family: str, model_of: Any, engine_of: Any
) -> None:
    # PyTorch counts its own products only: on a GPU some are our kernels'.
    engine = engine_of(model_of(family).folder, max_num_batched_tokens=40, device="cpu")
    prompt = torch.randint(0, 256, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    with FlopCounterMode(display=False) as counter:
        engine.generate([prompt], SamplingParams(max_tokens=1))
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    facts = engine.loaded.spec.facts
    logits = 2 * facts.hidden * facts.vocab
    sampled = facts.matmul_flops_per_token()
    assert products == 99 * prompt_flops_per_token(facts) + sampled + logits


def test_requests_that_are_not_served_have_no_speed(model_of: Any, engine_of: Any) -> None:
    engine = engine_of(model_of("qwen2").folder, num_blocks=30, max_model_len=1024)
    with pytest.raises(BadInput, match=r"request 0 of 4 was not served .*: rejected after 0 tokens .needs "):
        bench(engine, requests=4, shortest=200, longest=400)
    engine = engine_of(model_of("qwen2").folder)
    engine.loaded.model.embedding.weight[:] = torch.nan
    with pytest.raises(BadInput, match=r"request 0 of 4 .*: failed after 0 tokens .*not finite"):
        bench(engine, requests=4, shortest=8, longest=16)
