"""The options that commands share: each field of a scenario can be given, and reaches it."""

import json
from typing import Annotated, Any

import pytest
import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.reading import LoadOptions
from pagecast.planner_app.commands.scenario_options import (
    GivenScenario,
    WorkArguments,
    load,
)
from pagecast.sim.scenario import Scenario
from typer.testing import CliRunner

GIVEN: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B",
    "assume_dense": True,
    "gpu": "A100-80GB",
    "engine": "nano-vllm@bb823b3",
    "costs": "roofline",
    "block_size": 32,
    "gpu_memory_utilization": 0.5,
    "free_gpu_memory_fraction": 0.6,
    "kv_tokens": 1000,
    "num_gpu_blocks": 99,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 77,
    "max_model_len": 500,
    "kv_cache_dtype": "fp8",
    "disable_hybrid_kv_cache_manager": True,
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "moe_data_parallel_size": 2,
    "gpu_link_gb_per_s": 16.0,
    "host_time_factor": 1.5,
    "scheduling_policy": "priority",
    "async_scheduling": False,
    "enable_prefix_caching": False,
    "eviction": "slru",
    "retention": "0-512:80:30 decode:10",
    "eviction_protected": 0.7,
    "eviction_prefix_cap": 0.3,
    "admission": "expected",
    "admission_quantile": 0.8,
    "max_output_tokens": 700,
    "watermarks": "0.7:0.9",
    "shed_ttft_s": 2.5,
    "preemption_victim": "least-progress",
    "preemption": "swap",
    "swap_space_gib": 2.0,
    "swap_gb_per_s": 50.0,
    "partial_reuse": "copy",
    "tenants": "a:weight=2,blocks=100 *:weight=1",
    "isolation": "tenant",
    "public_namespaces": "docs",
    "isolation_price": True,
    "scrub_private_blocks": True,
    "rollout_at_s": 12.5,
    "max_loras": 4,
    "speculative_config": "ngram:3:0.5",
    "enable_chunked_prefill": False,
    "long_prefill_token_threshold": 512,
    "long_prefill_token_threshold_adaptive": True,
    "max_num_scheduled_tokens": 1024,
    "watermark": 0.05,
    "scheduler_reserve_full_isl": False,
    "prefill_schedule_interval": 4,
    "decode_context_parallel_size": 2,
    "max_num_queued_reqs": 100,
    "max_num_queued_tokens": 100_000,
    "encoder_tokens": 4096,
    "context_chunking_policy": "equal_progress",
    "max_prefill_tokens": 4096,
    "enable_mixed_chunk": True,
    "schedule_conservativeness": 0.5,
    "radix_eviction_policy": "lfu",
    "scheduler_recv_interval": 10,
    "batch_wait_timeout_iters": 20,
    "batch_wait_max_tokens_ratio": 0.5,
    "ignore_eos": True,
    "kv_offloading_size": 12.5,
    "kv_offloading_backend": "native",
    "kv_offloading_eviction_policy": "arc",
    "kv_offloading_block_size": 64,
    "offload_prompt_only": False,
    "kv_offloading_store_threshold": 2,
    "secondary_tiers": "fs",
    "disk_load_gb_per_s": 5.0,
    "disk_store_gb_per_s": 2.0,
    "disk_latency_ms": 0.1,
    "host_load_gb_per_s": 20.0,
    "host_store_gb_per_s": 10.0,
    "host_latency_ms": 0.2,
    "offloading_step_ms": 0.5,
    "offloading_block_us": 3.0,
    "failing_transfers": 0.1,
    "link_faults": "host-load:slow=0.5,factor=3",
    "kv_load_failure_policy": "recompute",
    "slow_transfers": 0.2,
    "seed": 5,
}


@with_options
def command(arguments: WorkArguments, extra: Annotated[int, typer.Option()] = 1) -> None:
    work, scenario = load(arguments)
    console.print_json({"requests": len(work), "extra": extra, **scenario.flat()})


app = typer.Typer()
app.command()(command)


def scenario_of(*arguments: object) -> dict[str, Any]:
    ran = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def test_every_field_of_a_scenario_is_an_option():
    assert set(GIVEN) == set(Scenario.flat_fields()), "give the new field a value here"
    options: list[object] = []
    for name, value in GIVEN.items():
        flag = name.replace("_", "-")
        options += [f"--no-{flag}" if value is False else f"--{flag}"]
        options += [] if isinstance(value, bool) else [value]
    scenario = scenario_of("chat", *options, "--limit", 7, "--extra", 2)
    assert scenario == {"requests": 7, "extra": 2, **GIVEN}


def test_what_is_not_given_is_left_to_the_file_and_then_to_the_default(tmp_path):
    path = tmp_path / "scenario.yaml"
    path.write_text("block_size: 32\nenable_prefix_caching: false\n")
    scenario = scenario_of("chat", "--scenario", path, "--limit", 2, "--max-num-seqs", 9)
    wanted = {"block_size": 32, "enable_prefix_caching": False, "max_num_seqs": 9, "gpu": "H200"}
    assert {name: scenario[name] for name in wanted} == wanted


@pytest.fixture(scope="module")
def help_text():
    return CliRunner().invoke(app, ["--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).stdout


@pytest.mark.parametrize("field", Scenario.flat_fields())
def test_help_says_what_each_field_is(field, help_text):
    about = Scenario.flat_fields()[field].description
    assert about is not None
    assert about.split(" (")[0][:40] in " ".join(help_text.split())


def loaded_at(rate: float) -> Any:
    """The bundled chat sample at a rate."""
    trace, _ = load(GivenScenario(trace="chat", reading=LoadOptions(rate=rate, limit=600)))
    return trace


def test_a_rate_that_pauses_keep_from_being_reached_is_told() -> None:
    (note,) = loaded_at(100).notes
    assert "--rate 100 is not reached" in note
    assert loaded_at(2).notes == ()
