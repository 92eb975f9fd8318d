"""Roofline costs: what must hold for any model and GPU, and how far recorded vLLM steps are from them."""

import gzip
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.roofline import Efficiencies, Roofline
from pagecast.sim.machine.gpus import gpu
from pagecast.sim.machine.models import model

QWEN = Roofline(model("Qwen/Qwen3-8B"), gpu("H200"))
MS = 1e6
SET_UPS = [
    ("Qwen/Qwen3-8B", "H200", 1),
    ("meta-llama/Llama-3.1-70B", "H100", 4),
    ("deepseek-ai/DeepSeek-V3", "H200", 8),
    ("openai/gpt-oss-120b", "H100", 1),
    ("google/gemma-3-27b", "A100 80GB", 1),
    ("mistralai/Mixtral-8x7B-v0.1", "MI300X", 1),
    ("facebook/opt-125m", "T4", 1),
]


def costs_of(name: str, on: str, tp: int = 1, **options) -> Roofline:
    return Roofline(model(name), gpu(on), tensor_parallel_size=tp, **options)


@pytest.fixture(scope="module", params=SET_UPS, ids=lambda s: f"{s[0]} {s[2]}x{s[1]}")
def costs(request: pytest.FixtureRequest) -> Roofline:
    return costs_of(*request.param)


def test_a_decode_step_is_never_faster_than_reading_what_it_must(costs: Roofline) -> None:
    facts, tp = costs.model, costs.tensor_parallel_size
    experts = sum(ln.params * (ln.experts - ln.active) / ln.experts for ln in facts.linears(tp))
    fraction = facts.linear_bits(facts.linears(tp)[-1]) / 8
    weights = facts.weight_bytes(tp) - facts.embedding_params * facts.dtype_bytes - experts * fraction
    floor_s = weights / costs.gpu.hbm_bytes_per_s
    assert costs.decode_line(1).ns(1000, 1000) > floor_s * 1e9
    more = costs.decode_line(16).ns(16 * 100_000, 100_000) - costs.decode_line(16).ns(16 * 50_000, 50_000)
    full = [g for g in facts.kv_groups(tp) if not g.window]
    kv = sum(g.layers * g.elements_per_token for g in full) * facts.kv_element_bytes() * 16 * 50_000
    assert more > kv / costs.gpu.hbm_bytes_per_s * 1e9


def test_more_work_takes_more_time(costs: Roofline) -> None:
    decode = [costs.decode_line(n).ns(1000 * n, 1000) for n in (1, 2, 8, 64, 256)]
    assert decode == sorted(decode) and decode[0] < decode[-1]
    prefill = [costs.device_ns(Batch(0, 0, 0, ((n, 0),))) for n in (1, 64, 512, 4096, 8192)]
    assert prefill == sorted(prefill) and prefill[1] < prefill[-1]
    context = [costs.device_ns(Batch(0, 0, 0, ((512, c),))) for c in (0, 4096, 60_000)]
    assert context == sorted(context)


def test_a_prompt_chunk_never_makes_a_decode_step_cheaper(costs: Roofline) -> None:
    for n in (1, 9, 33, 200):
        alone = costs.decode_line(n).ns(3000 * n, 3000)
        joined = costs.device_ns(Batch(n, 3000 * n, 3000, ((1, 0),)))
        assert joined >= alone
        if costs.model.moe is None:  # past what launching costs, one more row is nearly free
            floor = costs.model.layers * costs.efficiencies.launch_layer_s * 1e9
            assert joined <= max(floor, alone * 1.05) + 1e5


@given(
    n=st.integers(1, 256),
    ctx=st.integers(1, 100_000),
    chunks=st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 50_000)), min_size=1, max_size=5),
)
def test_the_order_of_chunks_does_not_matter_and_times_are_whole(n: int, ctx: int, chunks: list) -> None:
    one = QWEN.device_ns(Batch(n, n * ctx, ctx, tuple(chunks)))
    assert one == QWEN.device_ns(Batch(n, n * ctx, ctx, tuple(reversed(chunks))))
    assert isinstance(one, int) and one > 0
    fresh = Roofline(QWEN.model, QWEN.gpu)
    assert fresh.device_ns(Batch(n, n * ctx, ctx, tuple(chunks))) == one


def test_splitting_a_prompt_into_chunks_costs_more_than_one_pass() -> None:
    whole = QWEN.device_ns(Batch(0, 0, 0, ((8192, 0),)))
    halves = sum(QWEN.device_ns(Batch(0, 0, 0, ((4096, c),))) for c in (0, 4096))
    assert whole < halves < 1.1 * whole


def test_attention_that_half_fills_the_last_round_of_tiles_is_slower_per_token() -> None:
    # 8 KV heads: 16 requests fill 128 of 132 multiprocessors once, 17 need a second round.
    per_token = {n: QWEN.decode_line(n).per_ctx for n in (16, 17, 33)}
    assert per_token[17] > 1.3 * per_token[16]
    assert per_token[33] == pytest.approx(per_token[16], rel=0.03)


def test_tensor_parallelism_is_faster_but_pays_for_its_all_reduces() -> None:
    one, four = (costs_of("Qwen/Qwen3-32B", "H100", tp) for tp in (1, 4))
    ratio = one.decode_line(8).ns(8000, 1000) / four.decode_line(8).ns(8000, 1000)
    assert 2 < ratio < 4
    slow = costs_of("Qwen/Qwen3-32B", "L40S", 4).decode_line(1).ns(1000, 1000)
    fast_link = costs_of("Qwen/Qwen3-32B", "L40S", 4, efficiencies=Efficiencies(pcie_latency_s=1e-6))
    assert slow - fast_link.decode_line(1).ns(1000, 1000) == pytest.approx(2 * 64 * 29e-6 * 1e9, rel=0.01)


def test_narrower_weights_and_kv_are_faster() -> None:
    plain, fp8 = costs_of("Qwen/Qwen3-32B", "H100"), costs_of("Qwen/Qwen3-32B-FP8", "H100")
    assert fp8.decode_line(1).ns(100, 100) < 0.65 * plain.decode_line(1).ns(100, 100)
    assert fp8.device_ns(Batch(0, 0, 0, ((8192, 0),))) < 0.75 * plain.device_ns(Batch(0, 0, 0, ((8192, 0),)))
    small = costs_of("Qwen/Qwen3-8B", "H200", kv_cache_dtype="fp8")
    assert small.decode_line(16).per_ctx == pytest.approx(QWEN.decode_line(16).per_ctx / 2, rel=1e-3)


def test_a_mixture_reads_more_experts_as_the_batch_grows() -> None:
    mixture = costs_of("Qwen/Qwen3-30B-A3B", "H200")
    dense = costs_of("Qwen/Qwen3-4B", "H200")

    def growth(costs: Roofline) -> float:
        return costs.decode_line(32).ns(32, 1) / costs.decode_line(1).ns(1, 1)

    assert growth(mixture) > 2.5 * growth(dense)


def test_short_windows_do_not_grow_with_context() -> None:
    gemma = costs_of("google/gemma-3-27b", "H200")
    full = 10 / 62 * gemma.model.kv_bytes_per_token() / (4.8e12 * gemma.efficiencies.kv_stream)
    assert gemma.decode_line(64).per_ctx / 1e15 == pytest.approx(full, rel=0.03)


def test_host_work_grows_with_requests_and_arrivals_cost_something() -> None:
    assert QWEN.host_ns(100) > QWEN.host_ns(1) > 0
    assert QWEN.arrival_ns(500) > 0
    assert "one H200" in sentence(QWEN.expected_error())


@pytest.mark.parametrize(("tp", "dtype"), [(0, "auto"), (3, "auto"), (1, "fp3")])
def test_set_ups_that_cannot_be_are_refused(tp: int, dtype: str) -> None:
    with pytest.raises(BadInput):
        costs_of("Qwen/Qwen3-8B", "H200", tp, kv_cache_dtype=dtype)


# -- against recorded vLLM steps ---------------------------------------------------------------------


def recorded(folder: Path) -> Iterator[tuple[dict, float]]:
    """Steps of a synchronous run with work after them, and the seconds to the next one's start."""
    with gzip.open(folder / "steps.jsonl.gz", "rt") as lines:
        steps = [json.loads(line) for line in lines]
    for step, following in pairwise(steps):
        seconds = following["start_s"] - step["start_s"]
        idle = following["start_s"] - step["end_s"] > 0.005
        if step.get("run") == following.get("run") and (step["decode_n"] or step["prefill"]) and not idle:
            yield step, seconds


@pytest.mark.parametrize(
    ("run", "decode", "mixed"),
    [  # most that the summed time of a run's steps is off: a little above what MEASURED_ERRORS says
        ("sweep", 0.02, 0.02),
        ("azure_conv", 0.04, 0.03),
        ("azure_conv_repeat2", 0.06, 0.04),
        ("azure_conv_repeat3", 0.05, 0.04),
        ("mooncake_conv", 0.03, 0.02),
        ("azure_priority_tight", 0.03, 0.10),
    ],
)
def test_summed_step_times_are_within_the_stated_error(shared, run, decode, mixed) -> None:
    totals = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for step, seconds in recorded(shared / "groundtruth" / "vllm-0.24.0-h200-qwen3-8b" / run):
        n, chunks = step["decode_n"], tuple(map(tuple, step["prefill"]))
        if chunks:
            device = QWEN.device_ns(Batch(n, step["decode_ctx"], step["decode_max"], chunks))
        else:
            device = QWEN.decode_line(n).ns(step["decode_ctx"], step["decode_max"])
        total = totals[bool(chunks)]
        total[0] += (device + QWEN.host_ns(n + len(chunks))) / 1e9
        total[1] += seconds
    for with_chunks, bound in ((False, decode), (True, mixed)):
        predicted, measured = totals[with_chunks]
        assert predicted / measured - 1 == pytest.approx(0, abs=bound)


def test_a_step_of_experts_without_a_graph_takes_as_long_as_its_launches() -> None:
    """50 ms for 48 layers, whether it has 600 tokens or 1,500: as recorded of Qwen3-30B-A3B on an H200."""
    mixture = costs_of("Qwen/Qwen3-30B-A3B", "H200")
    small, large = (mixture.device_ns(Batch(0, 0, 0, ((tokens, 0),))) for tokens in (600, 1500))
    assert small == large == pytest.approx(50e6, rel=0.01)
    assert mixture.device_ns(Batch(0, 0, 0, ((500, 0),))) < 0.6 * small


def test_the_error_of_a_mixture_of_experts_is_the_one_that_was_measured():
    mixture = sentence(Roofline(model("Qwen/Qwen3-30B-A3B"), gpu("H200")).expected_error())
    assert "-18 to -1% in mean TPOT" in mixture
    assert "-96% in mean TTFT near saturation" in mixture
    dense = sentence(Roofline(model("Qwen/Qwen3-8B"), gpu("H200")).expected_error())
    assert "allow 25%" in dense
    assert "mixture" not in dense.lower()
