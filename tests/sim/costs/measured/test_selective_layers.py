"""Measured gated delta layers and sparse latent attention, and the roofline of the latter's prompts."""

import numpy as np
import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.calibration.draw import half_width_percent
from pagecast.sim.costs.measured.latent import LatentAttention
from pagecast.sim.costs.measured.tables import table
from pagecast.sim.machine.models import model
from pagecast.sim.scenario import Scenario


def costs_of(name, costs, **options):
    return Scenario(model=name, gpu="H200", costs=costs, engine="vllm@0.33", **options).step_costs()


def test_gated_delta_layers_are_timed_by_batch_and_tokens_whatever_the_context():
    delta = costs_of("Qwen/Qwen3.5-27B", "measured").operations.delta
    once, many = delta.decode_seconds(1), delta.decode_seconds(256)
    assert 5e-6 < once < many < 1e-3
    assert 6 < delta.seconds(16384) / delta.seconds(2048) < 10


def test_other_recurrent_layers_are_left_to_the_roofline():
    name = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B"
    with pytest.raises(BadInput, match="recurrent layers of this form were not measured"):
        costs_of(name, "measured", tensor_parallel_size=2)
    assert costs_of(name, "auto", tensor_parallel_size=2).name == "roofline"


@pytest.mark.parametrize(
    ("engine", "tokens", "context", "measured_ms"),
    [("vllm", 8192, 0, 6.75), ("vllm", 32768, 0, 35.36), ("sglang", 8192, 131072, 24.95)],
)
def test_sparse_latents_of_prompts_take_what_was_measured(engine, tokens, context, measured_ms):
    # aiconfigurator-core 0.12.0, h200_sxm, dsa_context_module: 16 heads, fp8_block, bf16 KV; the last with a
    # prefix, of which the table has chunks of 4,096 tokens alone.
    attention = LatentAttention(
        table("H200", engine), model("deepseek-ai/DeepSeek-V3.2"), ("bfloat16", "fp8_block", 16)
    )
    seconds = attention.row_seconds(np.array([float(tokens)]))[0] + attention.seconds(tokens, context)
    assert 1e3 * seconds == pytest.approx(measured_ms, rel=0.15)


def test_the_rooflines_prompts_are_scored_against_all_of_their_context():
    sparse = costs_of("deepseek-ai/DeepSeek-V3.2", "roofline", tensor_parallel_size=8)
    measured = costs_of("deepseek-ai/DeepSeek-V3.2", "measured", tensor_parallel_size=8)
    for context in (0, 57344, 122880):
        chunk = Batch(0, 0, 0, ((8192, context),))
        assert 0.5 < sparse.device_ns(chunk) / measured.device_ns(chunk) < 1.5


def test_more_is_allowed_for_where_layers_keep_states_or_choose_tokens():
    plain, recurrent = (
        half_width_percent(costs_of(f"Qwen/{name}", "roofline")) for name in ("Qwen3-8B", "Qwen3.5-27B")
    )
    assert 19 < plain < 21 and 35 < recurrent < 38
    assert half_width_percent(costs_of("Qwen/Qwen3.5-27B", "measured")) > 40
