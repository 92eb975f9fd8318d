"""Notes on a replay: where the scenario leaves what the GPU can do."""

from dataclasses import replace

import pytest
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.machine.models import model as find_model
from pagecast.sim.replay import replay
from pagecast.sim.replay.notes import most_blocks
from pagecast.sim.replay.sequence_bytes import bytes_per_sequence
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

WINDOWS = {"model": "openai/gpt-oss-20b", "gpu": "H100", "costs": "roofline"}


def codes(**fields) -> list[str]:
    result = replay(read("chat", limit=3), Scenario(**WINDOWS, **fields))
    return [note.code for note in result.notes if hasattr(note, "code")]


def test_blocks_of_a_model_that_keeps_every_token_are_held_against_the_memory_for_those() -> None:
    """Blocks have twice the bytes where no layer forgets what is outside its window."""
    assert "blocks_beyond_memory" not in codes(num_gpu_blocks=150_000)
    assert "blocks_beyond_memory" in codes(num_gpu_blocks=150_000, disable_hybrid_kv_cache_manager=True)


def test_a_sequence_takes_more_bytes_where_no_layer_forgets_what_is_outside_its_window() -> None:
    windows, whole = (
        Scenario(**WINDOWS, disable_hybrid_kv_cache_manager=every_token) for every_token in (False, True)
    )
    model = find_model(WINDOWS["model"])
    assert bytes_per_sequence([4099], whole) == 4112 * model.kv_bytes_per_token()
    assert bytes_per_sequence([4099], windows) < 0.6 * bytes_per_sequence([4099], whole)


def test_forecasts_of_models_with_windows_are_told_not_to_be_relied_on() -> None:
    text = sentence(Scenario(**{**WINDOWS, "costs": "measured"}).step_costs().expected_error())
    assert text.startswith("Do not rely on these figures")
    plain = Scenario(model="Qwen/Qwen3-8B", gpu="H100", costs="measured")
    assert "public runs like it (vLLM, dense, Hopper, one GPU)" in sentence(
        plain.step_costs().expected_error()
    )


@pytest.mark.parametrize(
    "options", [{"disable_hybrid_kv_cache_manager": True}, {"moe_data_parallel_size": 4}]
)
def test_the_most_blocks_are_those_of_a_start_that_takes_the_whole_gpu(options) -> None:
    whole = Scenario(**WINDOWS, **options, gpu_memory_utilization=1.0).budget()
    given = Scenario(**WINDOWS, **options, num_gpu_blocks=99, gpu_memory_utilization=0.5, kv_tokens=10_000)
    assert most_blocks(given) == whole.num_gpu_blocks


def idle(columns: dict[str, object] | None = None, **fields) -> list[str]:
    """What the notes of a short replay say of fields without effect."""
    trace = read("chat", limit=3)
    trace = replace(trace, requests=trace.requests.assign(**(columns or {})))
    scenario = Scenario(**{"costs": "roofline", **fields})
    notes = map(sentence, replay(trace, scenario).notes)
    return [note for note in notes if "no effect" in note]


@pytest.mark.parametrize(
    ("fields", "said", "needed"),
    [
        (
            {"retention": "decode:9"},
            "retention has no effect without eviction priority",
            {"eviction": "priority"},
        ),
        (
            {"eviction_protected": 0.5},
            "eviction_protected has no effect without eviction slru",
            {"eviction": "slru"},
        ),
        (
            {"eviction_prefix_cap": 0.2},
            "eviction_prefix_cap has no effect without eviction cost",
            {"eviction": "cost"},
        ),
        (
            {"admission_quantile": 0.5},
            "admission_quantile has no effect without admission expected",
            {"admission": "expected"},
        ),
        (
            {"max_output_tokens": 900},
            "max_output_tokens has no effect without admission maximum",
            {"admission": "maximum"},
        ),
        (
            {"swap_space_gib": 1.0, "swap_gb_per_s": 9.0},
            "swap_space_gib and swap_gb_per_s have no effect without preemption swap",
            {"preemption": "swap"},
        ),
        (
            {"failing_transfers": 0.1, "kv_offloading_eviction_policy": "arc", "offload_prompt_only": False},
            "kv_offloading_eviction_policy, offload_prompt_only and failing_transfers have no effect without "
            "kv_offloading_size",
            {"kv_offloading_size": 4.0},
        ),
        (
            {"disk_latency_ms": 9.0, "kv_offloading_size": 4.0},
            "disk_latency_ms has no effect without secondary_tiers",
            {"secondary_tiers": "fs"},
        ),
        (
            {"enable_expert_parallel": True},
            "enable_expert_parallel has no effect without a mixture of experts",
            {"model": "Qwen/Qwen3-30B-A3B", "costs": "measured", "tensor_parallel_size": 2},
        ),
        (
            {"enable_expert_parallel": True, "model": "Qwen/Qwen3-30B-A3B", "tensor_parallel_size": 2},
            "enable_expert_parallel has no effect without several GPUs and measured operations",
            {"costs": "measured"},
        ),
        (
            {"enable_expert_parallel": True, "model": "Qwen/Qwen3-30B-A3B"},
            "enable_expert_parallel has no effect without several GPUs and measured operations",
            {"costs": "measured", "tensor_parallel_size": 2},
        ),
        (
            {"host_time_factor": 1.5},
            "host_time_factor has no effect without measured operations",
            {"costs": "measured"},
        ),
        (
            {"gpu_link_gb_per_s": 16.0},
            "gpu_link_gb_per_s has no effect without several GPUs",
            {"tensor_parallel_size": 2},
        ),
    ],
)
def test_a_field_without_effect_is_noted_with_what_it_needs(fields, said, needed) -> None:
    assert idle(**fields) == [f"{said}."]
    assert idle(**{**fields, **needed}) == []


@pytest.mark.parametrize(
    ("fields", "said", "columns"),
    [
        (
            {"isolation": "tenant", "scrub_private_blocks": True},
            "isolation and scrub_private_blocks have no effect without tenants in the trace",
            {"tenant": "t"},
        ),
        (
            {"public_namespaces": "docs"},
            "public_namespaces has no effect without namespaces and public_tokens in the trace",
            {"namespace": "docs", "public_tokens": 1},
        ),
    ],
)
def test_a_field_that_needs_a_column_of_the_trace_is_noted(fields, said, columns) -> None:
    assert idle(**fields) == [f"{said}."]
    assert idle(columns, **fields) == []


def test_all_fields_without_effect_are_in_one_note_and_defaults_are_not(tmp_path) -> None:
    both = idle(retention="decode:9", failing_transfers=0.1)
    assert both == [
        "retention has no effect without eviction priority; failing_transfers has no effect without "
        "kv_offloading_size."
    ]
    Scenario(costs="roofline").save(tmp_path / "scenario.yaml")
    assert idle(**{**Scenario.load(tmp_path / "scenario.yaml").flat(), "costs": "roofline"}) == []


def test_a_fleet_has_the_note_too() -> None:
    scenario = Scenario(costs="roofline", disk_latency_ms=9.0)
    result = replay_fleet(read("chat", limit=3), scenario, FleetSettings())
    assert "disk_latency_ms has no effect without secondary_tiers." in result.notes
