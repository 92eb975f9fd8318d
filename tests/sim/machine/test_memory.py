"""The HBM budget: block counts of real engines, what each limit means, and what does not fit."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import KvKind
from pagecast.sim.machine.block_layout import block_layout, model_layout
from pagecast.sim.machine.gpus import GIB, gpu
from pagecast.sim.machine.memory import UNCERTAIN_BYTES, BudgetOptions, HbmBudget, hbm_budget
from pagecast.sim.machine.model_facts import KvGroup
from pagecast.sim.machine.models import known_models, model
from pagecast.sim.scenario import Scenario

QWEN = model("Qwen/Qwen3-8B")


@dataclass(frozen=True)
class Start:
    """A start of vLLM that someone published: the KV cache it found room for, in GiB."""

    model: str
    gpu: str
    kv_gib: float
    options: dict
    source: str
    tp: int = 1
    total_gib: float | None = None  # where the driver's figure differs from the table's
    version: tuple[int, int] = (0, 24)


STARTS = [
    Start(
        "Qwen/Qwen3-8B",
        "RTX 4090",
        6.03,
        {"gpu_memory_utilization": 0.92, "max_num_batched_tokens": 2048, "max_model_len": 32768},
        "vLLM 0.24.0, journal of a router study on two RTX 4090: 43,888 tokens",
    ),
    Start(
        "Qwen/Qwen3-8B",
        "RTX 4090",
        5.08,
        {"gpu_memory_utilization": 0.92, "max_num_batched_tokens": 2048, "max_model_len": 32768},
        "the same journal, its first start: num_gpu_blocks 2312",
    ),
    Start(
        "Qwen/Qwen3-8B",
        "RTX 5090",
        12.23,
        {"gpu_memory_utilization": 0.92, "max_num_batched_tokens": 2048, "max_model_len": 32768},
        "the same study, RTX 5090: 89,040 tokens",
    ),
    Start(
        "Qwen/Qwen3-8B",
        "RTX 4090",
        6.37,
        {"gpu_memory_utilization": 0.9764, "max_num_batched_tokens": 2048, "max_model_len": 16384},
        "vLLM 0.21, a 24 GB GeForce, LMCache issue 3430: 46,368 tokens",
        version=(0, 21),
    ),
    Start(
        "Qwen/Qwen2.5-1.5B",
        "H200",
        120.53,
        {"max_num_seqs": 1024},
        "vLLM 0.19.1 with its defaults, a benchmark's log: 4,513,888 tokens",
        version=(0, 19),
    ),
    Start(
        "openai/gpt-oss-20b",
        "A100 80GB",
        36.56,
        {"gpu_memory_utilization": 0.65, "max_num_batched_tokens": 2048},
        "vLLM 0.19.0, myoceane.fr, vLLM on A100",
        version=(0, 19),
    ),
    Start(
        "Qwen/Qwen3-8B",
        "A100 40GB",
        18.69,
        {"max_num_batched_tokens": 2048, "max_model_len": 40960},
        "vLLM 0.9.2, driver 535, a deployment journal: 8,505 blocks",
        total_gib=39.39,
        version=(0, 9),
    ),
]


def predicted(start: Start) -> float:
    facts = gpu(start.gpu)
    if start.total_gib:
        facts = replace(facts, hbm_bytes=round(start.total_gib * GIB))
    runner = "auto" if start.version >= (0, 24) else "v1"
    budget = hbm_budget(
        model(start.model),
        facts,
        BudgetOptions(tensor_parallel_size=start.tp, model_runner=runner, **start.options),
    )
    graphs = sum(i.bytes for i in budget.items if i.name == "CUDA graphs" and i.counted)
    return (budget.kv_bytes + (0 if start.version >= (0, 21) else graphs)) / GIB  # counted since 0.21


@pytest.mark.parametrize("start", STARTS, ids=lambda s: f"{s.model} {s.gpu} x{s.tp} {s.kv_gib}")
def test_public_starts_lie_within_the_stated_uncertainty(start: Start) -> None:
    assert abs(predicted(start) - start.kv_gib) * GIB < UNCERTAIN_BYTES


def test_the_errors_on_public_starts_do_not_lean_one_way_by_much() -> None:
    errors = [predicted(start) - start.kv_gib for start in STARTS]
    assert abs(sum(errors) / len(errors)) < 0.4


# Starts of vLLM 0.19 on H100 (79.19 GiB), one per row: facts from the logs of llm-d-planner's accuracy study
# (github.com/llm-d-incubation/llm-d-planner, accuracy/results/v0.19.0/logs, Apache-2.0). `left_out` says why
# a start is not compared.
H100_STARTS = pd.read_csv(Path(__file__).parent / "starts_vllm_0_19_h100.csv", keep_default_na=False)


def errors_of_h100_starts() -> pd.DataFrame:
    """Predicted less logged GiB of weights and KV cache, and the relative error of tokens per GiB."""
    rows = []
    for start in H100_STARTS[H100_STARTS.left_out == ""].itertuples(index=False):
        budget = hbm_budget(
            model(start.model),
            replace(gpu("H100 SXM"), hbm_bytes=round(79.19 * GIB)),
            BudgetOptions(
                tensor_parallel_size=start.tensor_parallel_size,
                kv_cache_dtype=start.kv_cache_dtype,
                max_model_len=start.max_model_len,
                gpu_memory_utilization=start.gpu_memory_utilization,
                max_num_seqs=1024,
                model_runner="v1",
            ),
        )
        items = {item.name: item.bytes / GIB for item in budget.items}
        kv_gib = budget.kv_bytes / GIB + items["CUDA graphs"]  # vLLM counts the graphs since 0.21
        tokens_per_gib = budget.kv_tokens / (budget.kv_bytes / GIB)
        rows.append(
            {
                "model": start.model,
                "vision": start.vision == 1,
                "weights": items["weights"] - start.weights_gib,
                "kv": kv_gib - start.kv_gib,
                "tokens_per_gib": tokens_per_gib / (start.kv_tokens / start.kv_gib) - 1,
                "kv_tokens": tokens_per_gib * kv_gib / start.kv_tokens - 1,
            }
        )
    return pd.DataFrame(rows)


def test_public_starts_on_h100_are_predicted() -> None:
    errors = errors_of_h100_starts()
    text = errors[~errors.vision]
    assert len(errors) == 49
    assert text.weights.abs().max() < 0.15
    assert text.kv.abs().max() < 0.4
    # A vision tower's activations are not counted.
    assert errors[errors.vision].weights.between(-0.6, 0.15).all()
    assert errors[errors.vision].kv.between(-0.2, 0.6).all()
    # The logged GiB have two decimals, which is 0.2% of the smallest.
    assert errors.tokens_per_gib.abs().max() < 0.002


# Starts of models of 2026 that someone published: KV tokens of the log's "GPU KV cache size", or KV blocks.
# With `kv_gib`, the memory that it says is available, only what fits in it is compared. `rules`: the version
# whose rules are taken, the oldest known for older ones. `outlier`: why one is off by 5%, or by 1% where
# the memory is logged.
STARTS_2026 = pd.read_csv(Path(__file__).parent / "starts_2026.csv", keep_default_na=False, dtype=str)
GIVEN = (
    "tensor_parallel_size",
    "moe_data_parallel_size",
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
)


def error_of_2026_start(start) -> float:
    options = {name: json.loads(start[name]) for name in GIVEN if start[name]}
    if start.prefix_caching:
        options["enable_prefix_caching"] = start.prefix_caching == "yes"
    if start.drafts:
        options["speculative_config"] = start.drafts
    names = {"model": start.model, "gpu": start.gpu, "kv_cache_dtype": start.kv_cache_dtype}
    scenario = Scenario.make({"engine": f"vllm@{start.rules}", **names, **options})
    facts = scenario.loaded()
    if start.checkpoint_gib:
        facts = replace(facts, checkpoint_bytes=round(float(start.checkpoint_gib) * GIB))
    given = scenario.budget_options(enforce_eager=start.enforce_eager == "yes")
    if not start.kv_gib:
        budget = hbm_budget(facts, scenario.card(), given)
        if start.kv_blocks:
            return (budget.num_gpu_blocks + 1) / int(start.kv_blocks) - 1
        return budget.kv_tokens / int(start.kv_tokens) - 1
    layout, longest = given.layout(facts, given.block_size), scenario.max_model_len
    blocks = int(float(start.kv_gib) * GIB / layout.block_bytes)
    each = sum(
        s.most_blocks(given.held_tokens, longest) if s.window else s.blocks_of(longest) for s in layout.specs
    )
    return blocks * longest / each / int(start.kv_tokens) - 1


def test_public_starts_of_models_of_2026_are_predicted() -> None:
    errors = STARTS_2026.apply(error_of_2026_start, axis=1).abs()
    assert len(errors) == 28
    assert errors[STARTS_2026.outlier == ""].max() < 0.05 and errors.median() < 0.02
    # What fits in the memory that a log says: with draft layers and their states too.
    assert errors[(STARTS_2026.kv_gib != "") & (STARTS_2026.outlier == "")].max() < 0.01


@pytest.mark.parametrize(
    ("name", "card", "dtype", "kept"),
    [
        ("deepseek-ai/DeepSeek-V3.2", "H200", "fp8", "fp8_ds_mla"),
        ("deepseek-ai/DeepSeek-V3.2", "H200", "auto", "auto"),
        ("deepseek-ai/DeepSeek-V3.2", "B200", "fp8", "fp8"),
        ("deepseek-ai/DeepSeek-V3.2", "RTX PRO 6000", "auto", "fp8_ds_mla"),
        ("deepseek-ai/DeepSeek-V3", "H200", "fp8", "fp8"),
    ],
)
def test_latents_are_packed_as_the_engine_packs_them(name, card, dtype, kept) -> None:
    given = {"model": name, "gpu": card, "kv_cache_dtype": dtype}
    given |= {"tensor_parallel_size": 8, "max_model_len": 8192}
    scenario = Scenario.make(given)
    assert scenario.kv_dtype == kept
    asked = model_layout(model(name), scenario.block_size, kv_cache_dtype=kept)
    assert scenario.layout().block_bytes == asked.block_bytes
    assert ("packs latents by itself" in " ".join(scenario.budget().notes)) == (kept != dtype)
    assert Scenario.make({**given, "engine": "trtllm"}).kv_dtype == dtype


def test_a_kv_dtype_that_the_engine_takes_on_one_gpu_is_said() -> None:
    options = BudgetOptions(tensor_parallel_size=8)
    notes = " ".join(hbm_budget(model("zai-org/GLM-5.2-FP8"), gpu("B200"), options).notes)
    assert "keeps this model's KV in fp8" in notes


def test_all_public_starts_together() -> None:
    """KV tokens, or the memory for them: 3% in the median and 8% in nine of ten, of 84 starts."""
    older = errors_of_h100_starts().kv_tokens.abs()
    single = pd.Series([abs(predicted(start) / start.kv_gib - 1) for start in STARTS])
    errors = pd.concat([older, single, STARTS_2026.apply(error_of_2026_start, axis=1).abs()])
    assert len(errors) == 84
    assert errors.median() < 0.005 and errors.quantile(0.9) < 0.08


@pytest.mark.parametrize("measured", [49_609, 49_838])
def test_qwen3_8b_on_the_h200_has_vllms_block_count(measured: int) -> None:
    budget = hbm_budget(
        QWEN,
        gpu("H200"),
        BudgetOptions(
            gpu_memory_utilization=0.9,
            max_num_batched_tokens=8192,
            max_num_seqs=256,
            block_size=16,
            max_model_len=131_072,
        ),
    )
    assert budget.num_gpu_blocks == pytest.approx(measured - 1, rel=0.005)
    names = {item.name for item in budget.items}
    assert names >= {"weights", "activations", "CUDA graphs", "libraries", "KV cache", "margin"}


def test_items_add_up_to_the_gpu_for_every_model_that_fits() -> None:
    fitting = 0
    for name in known_models():
        if model(name).weight_bytes() > 120e9:
            with pytest.raises(BadInput, match="leaves no room"):
                hbm_budget(model(name), gpu("H200"))
            continue
        budget = hbm_budget(model(name), gpu("H200"))
        fitting += 1
        assert sum(item.bytes for item in budget.items) == budget.total_bytes
        assert budget.kv_bytes == (budget.num_gpu_blocks + 1) * budget.layout.block_bytes
        assert all(item.bytes > 0 for item in budget.items if item.name != "margin")
    assert fitting > 50


def test_hybrid_layers_are_grouped_as_vllm_groups_them() -> None:
    # Gemma 3 27B in vLLM 0.11: 109.86 GiB of KV gave 89,994 blocks, and it warned of 8 padding layers
    # (10 full and 52 windowed layers: seven groups of ten).
    layout = block_layout(model("google/gemma-3-27b").kv_groups(), 16, 2)
    assert (layout.layers, layout.groups) == (10, 7)
    assert 109.86 * GIB / layout.block_bytes == pytest.approx(89_994, abs=6)
    # 12 windowed and 12 full layers of gpt-oss: two groups of twelve, the windowed ones first.
    assert block_layout(model("openai/gpt-oss-20b").kv_groups(), 16, 2).windows == (128, 0)


def test_two_gpus_without_multicast_are_within_the_uncertainty() -> None:
    meta = Path(__file__).parents[1] / "runs" / "recorded" / "vllm-h200-qwen3-32b-tp2-azure" / "meta.json"
    run = json.loads(meta.read_text())
    options = {
        name: run["config"][name] for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    }
    budget = hbm_budget(
        model("Qwen/Qwen3-32B"), gpu("H200"), BudgetOptions(tensor_parallel_size=2, **options)
    )
    assert abs(budget.num_gpu_blocks - run["usable_blocks"]) < budget.uncertain_blocks
    assert budget.num_gpu_blocks == pytest.approx(run["usable_blocks"], rel=0.02)


def test_capacity_of_a_windowed_model_is_that_of_vllms_log() -> None:
    # gpt-oss-20b on two H100, vLLM 0.19: 59.32 GiB held 323,972 blocks of two groups, and 316.07 requests
    # of 8,192 tokens, which hold 512 blocks in one group and 513 in the other.
    layout = block_layout(model("openai/gpt-oss-20b").kv_groups(2), 16, 2)
    assert 59.32 * GIB / layout.block_bytes == pytest.approx(323_972, abs=40)
    budget = hbm_budget(
        model("openai/gpt-oss-20b"),
        gpu("H100 SXM"),
        BudgetOptions(tensor_parallel_size=2, max_model_len=8192),
    )
    assert budget.kv_tokens / budget.num_gpu_blocks == pytest.approx(316.07 * 8192 / 323_972, rel=1e-5)


def test_hybrid_models_become_groups_of_what_their_layers_keep() -> None:
    def kinds(name: str, **options) -> list[tuple[str, int]]:
        return [(spec.kind.value, spec.window) for spec in model_layout(model(name), 16, **options).specs]

    assert kinds("google/gemma-3-27b") == [("sliding_window", 1024)] * 6 + [("full_attention", 0)]
    assert kinds("openai/gpt-oss-20b") == [("sliding_window", 128), ("full_attention", 0)]
    llama_4 = [("chunked_local_attention", 8192)] * 3 + [("full_attention", 0)]
    assert kinds("meta-llama/Llama-4-Scout-17B-16E") == llama_4
    assert kinds("deepseek-ai/DeepSeek-V3") == [("mla_attention", 0)]
    assert kinds("google/gemma-3-27b", disable_hybrid_kv_cache_manager=True) == [("full_attention", 0)]


@pytest.mark.parametrize(("tp", "tokens"), [(1, 544), (2, 544), (4, 272)])
def test_a_block_of_a_recurrent_model_is_as_large_as_a_state(tp: int, tokens: int) -> None:
    # vLLM's log of Qwen3-Next: attention block size 544 tokens, mamba page size padded by 1.49%.
    facts = model("Qwen/Qwen3-Next-80B-A3B")
    layout = model_layout(facts, 16, tensor_parallel_size=tp)
    assert layout.block_size == tokens
    assert [spec.kind.value for spec in layout.specs] == ["mamba"] * 3 + ["full_attention"]
    state = facts.state_bytes(tp) / 36
    assert layout.block_bytes / layout.layers / state - 1 == pytest.approx(0.0149, abs=1e-4)
    assert layout.blocks_of(3000) == 3 + -(-3000 // tokens)


def test_layers_with_less_kv_per_token_get_blocks_of_more_tokens() -> None:
    even = block_layout((KvGroup(0, 4, 512), KvGroup(64, 4, 128, KvKind.WINDOW)), 16, 2)
    assert [spec.block_size for spec in even.specs] == [16, 64]
    padded = block_layout((KvGroup(0, 4, 512), KvGroup(64, 4, 200, KvKind.WINDOW)), 16, 2)
    assert [spec.block_size for spec in padded.specs] == [16, 16]


def test_scales_per_token_and_head_are_counted() -> None:
    plain = budget_for(kv_cache_dtype="int8").layout.block_bytes
    scaled = budget_for(kv_cache_dtype="int8_per_token_head").layout.block_bytes
    assert scaled - plain == 36 * 16 * 8 * 2 * 4  # layers, tokens, KV heads, two scales of 4 bytes


@given(tokens=st.integers(1, 5000), size=st.sampled_from([1, 8, 16, 64]))
def test_a_sequence_never_needs_fewer_blocks_than_its_tokens(tokens: int, size: int) -> None:
    layout = block_layout(model("google/gemma-2-2b").kv_groups(), size, 2)
    full, windowed = -(-tokens // size), -(-min(tokens, 4096) // size)
    assert full + windowed <= layout.blocks_of(tokens) <= 2 * full
    assert layout.blocks_of(tokens) <= full + windowed + 1


def budget_for(**options) -> HbmBudget:
    return hbm_budget(QWEN, gpu("H100 SXM"), BudgetOptions(**options))


def test_the_lesser_limit_wins_and_is_named() -> None:
    alone = budget_for(gpu_memory_utilization=0.9)
    assert budget_for().num_gpu_blocks == alone.num_gpu_blocks
    both = budget_for(gpu_memory_utilization=0.9, free_gpu_memory_fraction=0.5)
    assert both.num_gpu_blocks < alone.num_gpu_blocks
    assert both.limit == "free_gpu_memory_fraction 0.5"
    few = budget_for(gpu_memory_utilization=0.9, free_gpu_memory_fraction=0.5, kv_tokens=10_000)
    assert (few.num_gpu_blocks, few.kv_tokens, few.limit) == (625, 10_000, "kv_tokens 10000")


def test_tokens_beyond_the_memory_are_cut_to_what_fits() -> None:
    budget = budget_for(kv_tokens=10**9)
    assert budget.limit == "free memory" and budget.num_gpu_blocks * 16 < 500_000


def test_more_of_anything_else_means_fewer_blocks() -> None:
    base = budget_for().num_gpu_blocks
    assert budget_for(max_num_batched_tokens=32_768).num_gpu_blocks < base
    assert budget_for(gpu_memory_utilization=0.8).num_gpu_blocks < base
    assert budget_for(kv_cache_dtype="fp8").num_gpu_blocks == pytest.approx(2 * base, rel=0.001)
    assert budget_for(block_size=32).num_gpu_blocks == pytest.approx(base / 2, rel=0.001)
    assert budget_for(tensor_parallel_size=2).num_gpu_blocks > 2 * base  # half the weights, half a token's KV


def test_eager_mode_keeps_no_graphs() -> None:
    names = {item.name for item in budget_for(enforce_eager=True).items}
    assert "CUDA graphs" not in names and "compilation" not in names


def test_the_three_bytes_per_token_are_apart_and_in_order() -> None:
    figures = budget_for(sequence_tokens=1000).bytes_per_token
    assert figures.theoretical == 147_456
    assert figures.allocated == pytest.approx(147_456 * (1000 + 7.5) / 1000, rel=1e-5)
    assert figures.theoretical < figures.allocated <= figures.admissible < 1.02 * figures.theoretical


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "google/gemma-3-27b", "deepseek-ai/DeepSeek-V2-Lite"])
@given(tokens=st.integers(16, 20_000))
def test_admission_by_the_admissible_figure_never_overfills(name: str, tokens: int) -> None:
    budget = hbm_budget(model(name), gpu("H200"), BudgetOptions(sequence_tokens=tokens))
    figures = budget.bytes_per_token
    assert figures.theoretical < figures.allocated <= figures.admissible
    admitted = budget.kv_bytes / figures.admissible
    assert admitted <= budget.num_gpu_blocks * budget.layout.block_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5; it must lie above 0 and at most 1"),
        ({"free_gpu_memory_fraction": 0}, "free_gpu_memory_fraction is 0"),
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
        ({"kv_tokens": 0}, "kv_tokens is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"sequence_tokens": 0}, "sequence_tokens is 0"),
        ({"gpu_memory_utilization": 0.1}, "leaves no room for a KV cache on H100 SXM"),
        ({"kv_cache_dtype": "fp5"}, "kv_cache_dtype 'fp5' is unknown"),
        ({"model_runner": "v3"}, "model_runner is 'v3'; it must be auto, v1 or v2"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size 0"),
        (
            {
                "kv_cache_dtype": "fp8_per_token",
            },
            "int8_per_token_head",
        ),
    ],
)
def test_impossible_budgets_are_refused_in_one_line(options: dict, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        budget_for(**options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (
            {"block_size": 1_000_000},
            "a block of 1,000,000 tokens takes 137.33 GiB, and gpu_memory_utilization",
        ),
        (
            {"max_num_batched_tokens": 100_000_000},
            "activations of a step of 100,000,000 tokens take 8392.37 GiB; lower max_num_batched_tokens",
        ),
        ({"max_num_batched_tokens": 100_000_000, "block_size": 1_000_000}, "lower max_num_batched_tokens"),
        ({"max_num_batched_tokens": 100_000, "gpu_memory_utilization": 0.1}, "raise the limit or tensor"),
        ({"block_size": 64, "gpu_memory_utilization": 0.1}, "raise the limit or tensor_parallel_size"),
    ],
)
def test_what_takes_the_room_is_named(options: dict, cause: str) -> None:
    with pytest.raises(BadInput) as caught:
        hbm_budget(QWEN, gpu("H200"), BudgetOptions(**options))
    assert cause in str(caught.value) and "leaves -8" not in str(caught.value)


def test_a_block_size_that_leaves_one_block_is_named_and_a_lower_one_fits() -> None:
    with pytest.raises(BadInput, match="for 2 of them or more"):
        hbm_budget(QWEN, gpu("H200"), BudgetOptions(block_size=500_000))
    assert hbm_budget(QWEN, gpu("H200"), BudgetOptions(block_size=250_000)).num_gpu_blocks == 2


def test_recorded_runs_of_the_h200_had_these_blocks(shared: Path) -> None:
    options = ("gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs", "max_model_len")
    for meta in (shared / "groundtruth").glob("vllm-*-h200-qwen3-8b/*/meta.json"):
        run = json.loads(meta.read_text())
        if run["num_gpu_blocks"] < 10_000:  # set by hand
            continue
        budget = hbm_budget(
            QWEN, gpu("H200"), BudgetOptions(**{name: run["config"][name] for name in options})
        )
        assert budget.num_gpu_blocks == pytest.approx(run["usable_blocks"], rel=0.005)
