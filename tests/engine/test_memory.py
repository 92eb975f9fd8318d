"""Blocks are what the rest of the memory makes; where that is too little, the message says what would fit."""

from typing import Any

import numpy as np
import pytest
from pagecast.engine import memory_report
from pagecast.engine.bench import bytes_read
from pagecast.engine.options import Options
from pagecast.engine.spec import ModelSpec
from pagecast.sim.core.errors import BadInput, CannotRunHere
from pagecast.sim.machine.gpus import GIB

USED = {"weights": 16 * GIB, "activations": 2 * GIB, "libraries": GIB // 2, "CUDA graphs": GIB // 2}
BLOCK = 2 << 20


def fit(total: int, free: int, max_model_len: int = 4096, **options: Any) -> int:
    return memory_report.fit_blocks(total * GIB, free * GIB, USED, BLOCK, max_model_len, Options(**options))


def test_the_rest_is_blocks() -> None:
    assert fit(total=80, free=63) == (72 - 19) * GIB // BLOCK
    assert fit(total=80, free=63, gpu_memory_utilization=0.5) == (40 - 19) * GIB // BLOCK
    # Others use the GPU too: what is free counts, less what will be needed and a little more.
    assert fit(total=80, free=20) == (20 * GIB - 5 * GIB // 2 - GIB // 4) // BLOCK


def test_what_would_fit_is_said() -> None:
    with pytest.raises(CannotRunHere, match=r"max_model_len of at most 40960") as caught:
        fit(total=24, free=10, max_model_len=65536, gpu_memory_utilization=1.0)
    assert caught.value.exit_code == 3
    assert "weights 16.00, activations 2.00" in str(caught.value)
    with pytest.raises(CannotRunHere, match=r"gpu_memory_utilization of 0.82"):
        fit(total=24, free=10, max_model_len=4096, gpu_memory_utilization=0.8)
    with pytest.raises(CannotRunHere, match=r"what would fit: a smaller max_num_batched_tokens"):
        fit(total=19, free=2)


def test_the_prediction_has_the_budgets_items(model_of: Any) -> None:
    spec = ModelSpec.find("Qwen/Qwen3-8B")
    items, blocks = memory_report.predicted_items(spec, "NVIDIA H200", Options())
    assert {"weights", "activations", "libraries", "CUDA graphs", "CUDA context", "KV cache"} <= set(items)
    assert blocks is not None and abs(blocks - 49_700) < 1500
    assert memory_report.predicted_items(spec, "some other device", Options()) == ({}, None)


def test_the_prediction_counts_every_expert() -> None:
    spec = ModelSpec.find("Qwen/Qwen3-30B-A3B")
    items, _ = memory_report.predicted_items(spec, "NVIDIA H200", Options())
    assert abs(items["weights"] - spec.facts.params * 2) < 64 << 20
    # Rows of each token's 8 experts, between the products and after them.
    assert items["activations"] > 8192 * 8 * (768 + 2048) * 2
    few, many = bytes_read(spec.facts, np.array([1, 256]), 1).tolist()
    embedding = spec.facts.embedding_params
    assert few == pytest.approx(spec.facts.active_params - embedding)
    assert 0.99 < many / (spec.facts.params - embedding) <= 1


def test_the_cpu_has_as_many_blocks_as_are_asked_for(model_of: Any, engine_of: Any) -> None:
    engine = engine_of(model_of("qwen3").folder, num_blocks=33)
    report = engine.loaded.memory
    assert report.num_blocks == engine.limits.num_blocks == 33
    measured = {line.name: line.measured for line in report.lines}
    assert measured["KV cache"] == 33 * 2 * 2 * 16 * 2 * 32 * 4
    engine.loop.runner.rehearse(64)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("gpu_memory_utilization", 1.5),
        ("dtype", "int3"),
        ("device", "tpu"),
        ("block_size", 0),
        ("pipeline_depth", 2),
        ("num_blocks", 0),
        ("max_num_batched_tokens", 4),
    ],
)
def test_options_out_of_range_are_named(option: str, value: Any, model_of: Any, engine_of: Any) -> None:
    with pytest.raises(BadInput, match=option):
        engine_of(model_of("qwen3").folder, **{option: value})
