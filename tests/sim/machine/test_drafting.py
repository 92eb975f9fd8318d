"""Memory of requests that speculate: draft layers, draft models, states."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pagecast.sim.core.group_spec import KvKind
from pagecast.sim.machine.drafting import with_draft_layers
from pagecast.sim.machine.models import model
from pagecast.sim.scenario import Scenario

QWEN = "Qwen/Qwen3.6-27B"
STATES = (KvKind.STATE, KvKind.CHECKPOINT)


def blocks_of_states(**options: Any) -> int:
    layout = Scenario.make({"model": QWEN, "gpu": "H200", **options}).layout()
    return max(spec.states for spec in layout.specs if spec.kind in STATES)


@pytest.mark.parametrize(
    ("name", "share"),  # of the experts' layers, each with all of its experts, and a product of 2h x h
    [("deepseek-ai/DeepSeek-V3", 1 / 58), ("zai-org/GLM-4.6", 1 / 89)],
)
def test_a_draft_layer_takes_what_a_layer_of_the_decoder_takes(name: str, share: float) -> None:
    facts = model(name)
    loaded = with_draft_layers(facts)
    added = loaded.weight_bytes() / facts.weight_bytes() - 1
    assert added == pytest.approx(share, rel=0.1)
    assert loaded.kv_bytes_per_token() / facts.kv_bytes_per_token() == (facts.layers + 1) / facts.layers


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"enable_prefix_caching": False}, 1),
        ({"enable_prefix_caching": True, "engine": "vllm@0.24"}, 2),  # the state at the end of the last block
        ({"enable_prefix_caching": True}, 3),  # and one within a prompt
        ({"enable_prefix_caching": True, "gpu": "A100 80GB"}, 2),
        ({"enable_prefix_caching": False, "speculative_config": "ngram:3:0.5"}, 4),
        ({"enable_prefix_caching": True, "engine": "vllm@0.24", "speculative_config": "mtp:3:0.5"}, 5),
    ],
)
def test_a_sequence_holds_states_for_drafts_and_cached_prefixes(options: Any, blocks: int) -> None:
    assert blocks_of_states(**options) == blocks


def test_blocks_have_a_multiple_of_the_tokens_at_which_states_are_exported() -> None:
    options = {"model": QWEN, "gpu": "H200", "speculative_config": "mtp:3:0.5"}
    assert Scenario.make({**options, "engine": "vllm@0.33"}).layout().block_size == 832
    assert Scenario.make({**options, "engine": "vllm@0.24"}).layout().block_size == 800


def test_a_draft_model_takes_memory_beside_the_model() -> None:
    alone = Scenario.make({"model": "Qwen/Qwen3-8B", "gpu": "H200"})
    config = '{"method": "draft_model", "model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 3}'
    beside = alone.changed(speculative_config=config)
    token = (147_456 + 114_688) * 16
    assert beside.layout().block_bytes == token
    lost = alone.budget().kv_bytes - beside.budget().kv_bytes
    assert lost == pytest.approx(model("Qwen/Qwen3-0.6B").weight_bytes(), rel=0.1)


def test_draft_layers_that_are_unknown_are_said() -> None:
    budget = Scenario.make({"model": "Qwen/Qwen3-8B", "gpu": "H200", "speculative_config": "mtp:1"}).budget()
    assert budget is not None and "no draft layers of this model are known" in " ".join(budget.notes)


def test_draft_layers_are_in_the_dtype_that_the_checkpoint_gives_them(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_next",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 4096,
        "vocab_size": 1024,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    scheme = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}

    def added(**more: Any) -> float:
        (tmp_path / "config.json").write_text(
            json.dumps({**config, "quantization_config": {**scheme, **more}}), encoding="utf-8"
        )
        facts = model(str(tmp_path))
        return with_draft_layers(facts).weight_bytes() - facts.weight_bytes()

    joining = 2 * 1024 * 1024 * 2  # the product that joins state and embedding is in 16 bits
    quantised = added() - joining
    assert added(ignore=["lm_head", "mtp*"]) - joining == pytest.approx(quantised * 16 / 4.5, rel=0.01)
    assert added(ignore=["lm_head", "model.layers.4.*"]) > added(ignore=["lm_head", "model.layers.3.*"])


def test_the_size_of_an_index_counts_draft_layers_only_where_they_are_loaded() -> None:
    facts = model("deepseek-ai/DeepSeek-V3")
    sized = replace(facts, checkpoint_bytes=facts.weight_bytes() + 10**9)
    assert with_draft_layers(sized).weight_bytes() == with_draft_layers(facts).weight_bytes() + 10**9
