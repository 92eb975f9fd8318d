"""What `plan --emit` writes, `--launch` reads back to the same scenario."""

import random

import pytest
from pagecast.planner_app.launch.launch import read_launch
from pagecast.planner_app.planner.fleet.emit import emit
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.scenario import Scenario

ROUTERS = {"vllm": "random", "k8s": "random", "llm-d": "llm-d", "dynamo": "dynamo"}
DRAWS = 40
# No option of vLLM: the GPU and the speed of its links. Of a drafter, how many drafts are accepted.
UNSAID = ("gpu", "host_load_gb_per_s", "disk_latency_ms")
CHOICES = {
    "model": ["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-8B-Instruct"],
    "gpu": ["H200", "L40S"],
    "block_size": [16, 32, 64],
    "gpu_memory_utilization": [0.8, 0.95],
    "num_gpu_blocks": [5000],
    "max_num_seqs": [1, 64, 1024],
    "max_num_batched_tokens": [2048, 16384],
    "max_model_len": [40960],
    "kv_cache_dtype": ["auto", "fp8"],
    "tensor_parallel_size": [2, 4],
    "enable_expert_parallel": [True],
    "scheduling_policy": ["priority"],
    "enable_prefix_caching": [False],
    "async_scheduling": [False],
    "disable_hybrid_kv_cache_manager": [True],
    "max_loras": [1, 4],
    "watermark": [0.05],
    "decode_context_parallel_size": [2],
    "scheduler_reserve_full_isl": [False],
    "long_prefill_token_threshold": [512],
    "max_num_scheduled_tokens": [1024],
    "speculative_config": [
        "mtp:2:0.7",
        "ngram:4",
        '{"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 3, "acceptance": 0.6}',
    ],
}
OFFLOADING = {
    "kv_offloading_eviction_policy": ["arc"],
    "kv_offloading_block_size": [128],
    "offload_prompt_only": [False],
    "kv_offloading_store_threshold": [2],
    "kv_load_failure_policy": ["recompute"],
    "secondary_tiers": ["fs", '[{"type": "fs", "n_read_threads": 4}]'],
    "host_load_gb_per_s": [20.0],
    "disk_latency_ms": [1.0],
}


def draw(seed):
    rng = random.Random(seed)
    fields = {name: rng.choice(values) for name, values in CHOICES.items() if rng.random() < 0.4}
    if rng.random() < 0.5:
        fields["kv_offloading_size"] = rng.choice([4.0, 32.0])
        fields |= {name: rng.choice(values) for name, values in OFFLOADING.items() if rng.random() < 0.4}
    return Scenario.make(fields)


def said(scenario):
    """What a scenario says that a start of vLLM can say."""
    unsaid = (*UNSAID, "speculative_config")
    own = {name: value for name, value in scenario.resolved().items() if name not in unsaid}
    drafter = scenario.speculation
    own["speculation"] = None if drafter is None else {**drafter.model_dump(), "acceptance": None}
    return own | {"async_scheduling": scenario.pipelined}


@pytest.mark.parametrize("form", ROUTERS)
def test_emitted_fleets_are_read_back(form, tmp_path):
    fleet = FleetSettings.make({"router": {"policy": ROUTERS[form]}, "groups": [{"replicas": 2}]})
    path = tmp_path / ("fleet.sh" if form == "vllm" else "fleet.yaml")
    for seed in range(DRAWS):
        scenario = draw(seed)
        path.write_text(emit(form, scenario, fleet))
        launch = read_launch(f"@{path}")
        assert said(Scenario.make(launch.fields)) == said(scenario), seed
        assert launch.replicas == 2
        assert launch.gpus == scenario.tensor_parallel_size
        # Equal replicas, and a drafter of unknown acceptance: nothing that is emitted is left out.
        assert not [note for note in launch.notes if "not modelled" in note], seed


def test_replicas_that_hand_over_are_read_one_by_one(tmp_path):
    groups = [{"name": "first", "role": "prefill"}, {"name": "second", "role": "decode", "replicas": 2}]
    fleet = FleetSettings.make({"router": {"policy": "llm-d"}, "groups": groups, "disaggregation": {}})
    path = tmp_path / "fleet.yaml"
    path.write_text(emit("llm-d", Scenario(max_num_seqs=8), fleet))
    launch = read_launch(f"@{path}#pagecast-fleet-second")
    assert Scenario.make(launch.fields).resolved() == Scenario(max_num_seqs=8).resolved()
    assert launch.replicas == 2
    assert "KV transfer by NixlConnector" in launch.notes[1]
