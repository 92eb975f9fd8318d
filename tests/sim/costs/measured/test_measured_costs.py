"""Costs composed of measured operations: what they add up from, and that any cut of steps adds up alike."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.calibration.draw import draw
from pagecast.sim.costs.measured.import_tables import FAMILIES, _file
from pagecast.sim.costs.measured.packing import pack, unpack
from pagecast.sim.costs.measured.tables import paths, table
from pagecast.sim.scenario import Scenario

CHUNK = Batch(0, 0, 0, ((1024, 0),))


def measured(**fields):
    return Scenario(costs="measured", **fields).step_costs()


@pytest.fixture(scope="module")
def costs():
    return measured()


def test_packed_times_come_back_within_a_twentieth_of_a_percent():
    seconds = np.geomspace(1e-7, 1.0, 1000)
    assert np.allclose(unpack(pack(seconds)), seconds, rtol=5.1e-4)
    assert math.isnan(unpack(pack(np.array([np.nan])))[0])


@pytest.mark.parametrize(
    ("version", "source"),
    [("1.3.0rc20", "1.3.0rc9.post1"), ("1.3.0", "1.3.0"), ("1.3.1", "1.3.0.post1"), ("1.2.9", None)],
)
def test_an_operation_comes_from_the_newest_version_that_is_no_newer(tmp_path, version, source):
    family = FAMILIES["gemm"]
    for name in ("1.3.0rc9", "1.3.0rc9.post1", "1.3.0", "1.3.0.post1", "1.10.0", "1.3.0rc21"):
        folder = tmp_path / family.folder / "trtllm" / name
        folder.mkdir(parents=True)
        (folder / f"{family.file}_perf.parquet").touch()
    found = _file(tmp_path, family, "trtllm", version)
    assert (found and found.parent.name) == source


def test_every_table_is_small_and_has_what_a_decoder_takes():
    assert {engine for _, engine in paths()} == {"vllm", "sglang", "trtllm"}
    for (gpu, engine), path in paths().items():
        assert path.stat().st_size < 3_000_000
        facts = table(gpu, engine).facts
        assert {"gemm", "context", "decode"} <= set(facts["families"])
        assert "Apache-2.0" in facts["source"]


def test_a_product_that_was_measured_is_what_the_source_has(costs):
    """Qwen3-8B's output projection, 4,096 x 4,096, of 64 rows on an H200: 13 us in the published table."""
    gemm = table("H200", "vllm").family("gemm")
    at = int(np.flatnonzero(gemm.axes["m"] == 64)[0])
    assert 11e-6 < gemm.of("bfloat16", 4096, 4096)[at] < 15e-6


@given(
    n=st.integers(1, 256),
    mean=st.integers(0, 140_000),
    beyond=st.sampled_from((9, 300, 50_000)),
    first=st.integers(1, 40),
    second=st.integers(1, 40_000),
)
def test_sums_over_any_cut_of_steps_agree(costs, n, mean, beyond, first, second):
    line = costs.decode_line(n)
    ctx, longest = mean * n + n // 2, mean + beyond
    whole = line.ns(ctx, longest, first + second)
    assert whole == line.ns(ctx, longest, first) + line.ns(ctx + first * n, longest + first, second)


@given(
    n=st.integers(1, 64),
    mean=st.integers(0, 9_000),
    beyond=st.sampled_from((0, 300, 50_000)),
    within=st.integers(1, 10**11),
)
def test_the_steps_that_begin_in_time_are_counted_exactly(costs, n, mean, beyond, within):
    line, extra = costs.decode_line(n), 12_345
    ctx, longest = mean * n, mean + beyond
    begun = line.steps_begun(ctx, longest, within, 20_000, extra)

    def before(step):
        return line.ns(ctx, longest, step - 1) + extra * (step - 1) if step > 1 else 0

    assert begun == 1 or before(begun) < within
    assert begun == 20_000 or before(begun + 1) >= within


def test_more_work_takes_longer(costs):
    assert costs.decode_line(64).ns(64 * 512, 512) < costs.decode_line(128).ns(128 * 512, 512)
    assert costs.decode_line(64).ns(64 * 512, 512) < costs.decode_line(64).ns(64 * 4096, 4096)
    assert costs.device_ns(CHUNK) < costs.device_ns(Batch(0, 0, 0, ((1024, 8192),)))
    assert costs.device_ns(CHUNK) < costs.device_ns(Batch(64, 64 * 2048, 2048, ((1024, 0),)))


def test_unequal_contexts_take_longer_where_flash_attention_3_leaves_sms_idle(costs):
    even, uneven = (costs.decode_line(48).ns(48 * 12_000, longest) for longest in (12_010, 60_000))
    attention = even - costs.decode_line(48).ns(0, 0)
    assert 0.1 * attention < uneven - even < 0.16 * attention
    blackwell = measured(gpu="B200").decode_line(48)
    assert blackwell.ns(48 * 12_000, 12_010) == blackwell.ns(48 * 12_000, 60_000)


def test_decode_attention_streams_its_contexts_no_faster_than_memory_does(costs):
    operations = costs.operations
    token = operations.model.kv_bytes_per_token() / operations.gpu.hbm_bytes_per_s
    for n in (1, 32, 256):
        assert operations.decode_seconds(n, np.array([8192.0]))[0] >= 0.999 * n * 8192 * token


def test_a_cached_prefix_costs_less_than_computing_it(costs):
    cached = costs.device_ns(Batch(0, 0, 0, ((1024, 7168),)))
    assert cached < 0.35 * costs.device_ns(Batch(0, 0, 0, ((8192, 0),)))


def test_a_decoding_request_costs_more_beside_a_prompt_only_where_one_kernel_computes_both():
    """FlashAttention on Hopper pads it to a tile; on Blackwell decode has a kernel of its own."""

    def extra(gpu):
        costs = measured(gpu=gpu)
        alone, base = costs.decode_line(64), costs.decode_line(64).ns(0, 0)
        decode = alone.ns(64 * 8192, 8192) - base
        mixed = [costs.device_ns(Batch(64, 64 * ctx, ctx, ((2048, 0),))) for ctx in (0, 8192)]
        return (mixed[1] - mixed[0]) / decode

    assert 1.3 < extra("H200") < 2.0
    assert 0.9 < extra("B200") < 1.1


@pytest.mark.parametrize(
    ("model", "chunk"), [("meta-llama/Llama-2-7b-hf", 64), ("Qwen/Qwen3-8B", 16)], ids=["no groups", "groups"]
)
def test_beside_a_short_chunk_decoding_requests_take_narrow_tiles_on_hopper(model, chunk):
    """FlashAttention 3 takes tiles of 64 rows until a chunk, times the heads of a group, has more."""
    costs = measured(model=model, gpu="H100")
    took = [costs.device_ns(Batch(80, 80 * 700, 820, ((chunk + more, 560),))) for more in (-1, 0, 1, 2)]
    assert took[1] < 1.01 * took[0] and took[3] < 1.01 * took[2]
    assert took[2] > 1.03 * took[1]


def test_lower_clocks_slow_a_step_down_by_its_arithmetic_alone():
    """Where steps are planned ahead: steps of few prompt tokens took what decode steps take."""
    ahead, waiting = (
        measured(model="meta-llama/Llama-2-7b-hf"),
        measured(model="meta-llama/Llama-2-7b-hf", async_scheduling=False),
    )

    def slower(batch):
        return ahead.device_ns(batch) / (waiting.device_ns(batch) - waiting.host.prompt_step * 1e9)

    assert 1.00 <= slower(Batch(80, 80 * 700, 820, ((1, 560),))) < 1.03
    assert slower(Batch(0, 0, 0, ((2048, 0),))) > 1.08
    # Published times of so many rows hold part of it.
    assert 1.02 < slower(Batch(0, 0, 0, ((8192, 0),))) < slower(Batch(0, 0, 0, ((2048, 0),)))


def test_lower_clocks_do_not_slow_down_the_reading_of_experts():
    ahead, waiting = (
        measured(model="Qwen/Qwen3-30B-A3B", async_scheduling=asynchronous) for asynchronous in (True, False)
    )
    batch = Batch(0, 0, 0, ((1024, 0),))
    assert ahead.device_ns(batch) < 1.10 * (waiting.device_ns(batch) - waiting.host.prompt_step * 1e9)


def test_each_group_of_kv_blocks_takes_the_host_of_vllm_longer():
    seven, one = measured(model="google/gemma-3-4b-it"), measured(model="Qwen/Qwen3-4B")
    more = [costs.host_ns(101) - costs.host_ns(1) for costs in (seven, one)]
    assert more[0] - more[1] == pytest.approx(100 * 6 * seven.host.request_group * 1e9, rel=1e-3)
    sglang = measured(model="google/gemma-3-4b-it", engine="sglang")
    assert sglang.host_ns(101) - sglang.host_ns(1) == more[1]


def test_vllm_captures_steps_of_gpt_oss_up_to_1024_tokens():
    prompt = Batch(0, 0, 0, ((1000, 0),))
    costs = {engine: measured(model="openai/gpt-oss-120b", engine=engine) for engine in ("vllm", "sglang")}
    assert costs["vllm"].launch_ns(prompt) < costs["sglang"].launch_ns(prompt)
    larger = Batch(0, 0, 0, ((1025, 0),))
    assert costs["vllm"].launch_ns(larger) > 2 * costs["vllm"].launch_ns(prompt)


SMALL = "meta-llama/Llama-3.2-1B"


def ahead(model=SMALL, **fields):
    return measured(**{"model": model, "gpu": "H200", "engine": "vllm@0.24", **fields})


def test_steps_of_a_small_model_that_are_planned_ahead_wait_for_the_host():
    # Decode steps at contexts of 96 tokens took 1.33, 1.89 and 3.04 ms on an H200 (vLLM 0.24).
    for requests, took_ms in ((1, 1.33), (32, 1.89), (128, 3.04)):
        forecast = ahead().decode_line(requests).ns(96 * requests, 96) / 1e6
        assert forecast == pytest.approx(took_ms, rel=0.08), requests
    # The GPU is done sooner, which synchronous steps show: there the host's time comes on top.
    assert ahead(async_scheduling=False).decode_line(128).ns(96 * 128, 96) < 0.8 * 3.04e6
    # A large model hides the host.
    assert ahead("Qwen/Qwen3-8B").decode_line(1).ns(96, 96) > 4e6
    # Longer contexts take the GPU longer than the host.
    line = ahead().decode_line(64)
    assert line.ns(64 * 100, 100) < line.ns(64 * 6000, 6000)


def test_launches_of_small_models_take_longer_than_their_prompts():
    # Steps with a prompt beside 16 requests took 4.1 to 4.2 ms within CUDA graphs, 7.5 to 8.1 beyond.
    graphed, beyond = (Batch(16, 16 * 600, 700, ((tokens, 0),)) for tokens in (400, 1500))
    costs = ahead()
    assert costs.launch_ns(graphed) / 1e6 == pytest.approx(4.15, rel=0.08) and costs.launch_ns(
        graphed
    ) > costs.device_ns(graphed)
    assert costs.launch_ns(beyond) / 1e6 == pytest.approx(7.8, rel=0.08)


@pytest.mark.parametrize("fields", [{"engine": "sglang"}, {"tensor_parallel_size": 2}])
def test_no_least_time_is_counted_where_none_was_measured(fields):
    at_once, alone = (ahead("Qwen/Qwen3-0.6B", **more).decode_line(256) for more in (fields, {}))
    assert at_once.ns(256 * 96, 96) < 0.9 * alone.ns(256 * 96, 96)


def test_draws_of_a_small_model_are_of_other_hosts():
    lines = [draw(ahead(), index).decode_line(1).ns(96, 96) for index in range(20)]
    assert max(lines) > 1.5 * min(lines)
    large = [draw(ahead("Qwen/Qwen3-8B"), index).decode_line(1).ns(96, 96) for index in range(20)]
    assert max(large) < 1.25 * min(large)


@pytest.mark.parametrize(("model", "most"), [("deepseek-ai/DeepSeek-R1", 1.15), ("openai/gpt-oss-120b", 1.0)])
def test_tensorrt_llm_serves_experts_on_blackwell_no_slower_than_others(model, most):
    """They have its own kernels there; what was published as TensorRT-LLM's took up to thrice as long."""
    steps = [
        measured(model=model, gpu="B200", tensor_parallel_size=8, engine=engine)
        .decode_line(16)
        .ns(32000, 2000)
        for engine in ("trtllm-guaranteed-no-evict", "sglang" if "Deep" in model else "vllm")
    ]
    assert steps[0] < most * steps[1]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_pays_for_its_all_reduces(tp):
    one, more = measured(model="Qwen/Qwen3-32B"), measured(model="Qwen/Qwen3-32B", tensor_parallel_size=tp)
    ratio = one.decode_line(16).ns(16 * 1024, 1024) / more.decode_line(16).ns(16 * 1024, 1024)
    assert 1 < ratio < tp


def test_asynchronous_scheduling_hides_the_host():
    batch = Batch(16, 16 * 900, 900, ((600, 0),))
    exposed, hidden = measured(async_scheduling=False), measured()
    assert exposed.device_ns(batch) > hidden.device_ns(batch)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "Qwen/Qwen3-30B-A3B", "gpu": "H200"},
        {"model": "Qwen/Qwen3-30B-A3B", "tensor_parallel_size": 4, "enable_expert_parallel": True},
        {"model": "mistralai/Mixtral-8x7B-v0.1", "gpu": "H100", "tensor_parallel_size": 2},
        {"model": "openai/gpt-oss-20b", "gpu": "B200"},
        {"model": "deepseek-ai/DeepSeek-V3", "gpu": "H200", "tensor_parallel_size": 8},
        {"model": "meta-llama/Llama-3.1-70B", "gpu": "A100 80GB", "tensor_parallel_size": 4},
        {"model": "meta-llama/Llama-3.1-8B", "gpu": "L40S", "kv_cache_dtype": "fp8"},
        {"model": "meta-llama/Llama-3.1-8B-FP8", "gpu": "H100"},
        {"model": "Qwen/Qwen3-8B-NVFP4", "gpu": "B200", "kv_cache_dtype": "fp8"},
        {"model": "google/gemma-3-27b-it", "gpu": "RTX PRO 6000"},
        {"model": "Qwen/Qwen3-8B", "gpu": "GB300", "engine": "sglang"},
        {"model": "Qwen/Qwen3-8B", "gpu": "B300", "engine": "trtllm"},
    ],
    ids=lambda fields: f"{fields['model']} {fields.get('gpu', 'H200')}",
)
def test_a_step_is_never_faster_than_the_hardware(fields):
    """At least the time of reading the weights that one token touches, and at most 20 times it."""
    costs = measured(**fields)
    model, gpu, tp = costs.operations.model, costs.operations.gpu, costs.operations.tp
    idle = sum(
        ln.params * (1 - ln.active / ln.experts) * model.linear_bits(ln) / 8 for ln in model.linears(tp)
    )
    least_s = (model.weight_bytes(tp) - idle - model.vocab * model.hidden * 2 / tp) / gpu.hbm_bytes_per_s
    taken_s = costs.decode_line(1).ns(128, 128) / 1e9
    assert least_s < taken_s < 20 * least_s


def test_fewer_bits_are_faster():
    plain = measured(model="meta-llama/Llama-3.1-8B", gpu="B200").decode_line(1).ns(1, 1)
    fp8 = measured(model="meta-llama/Llama-3.1-8B-FP8", gpu="B200").decode_line(1).ns(1, 1)
    assert fp8 < plain
    long, kv8 = (measured(gpu="H200", kv_cache_dtype=kind) for kind in ("auto", "fp8"))
    assert kv8.decode_line(64).ns(64 * 8192, 8192) < long.decode_line(64).ns(64 * 8192, 8192)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-2-7b-hf"])
def test_no_product_takes_longer_than_one_of_more_rows(model):
    operations = measured(model=model).operations
    for linear in operations.model.linears(1):
        if not linear.name.startswith("expert_"):
            assert np.all(np.diff(operations._linear_s(linear)) >= 0)
    if operations.model.moe:
        assert np.all(np.diff(operations._experts_s()) >= 0)


def test_a_slow_link_takes_what_it_carries():
    """2,048 rows of 5,120 elements over two GPUs: 21 MB per all-reduce, twice in each of 64 layers."""
    fields = {"model": "Qwen/Qwen3-32B", "gpu": "RTX PRO 6000", "tensor_parallel_size": 2}
    usual, slow = measured(**fields), measured(**fields, gpu_link_gb_per_s=16.0)
    batch = Batch(0, 0, 0, ((2048, 0),))
    least_s = 2 * 64 * 2048 * 5120 * 2 / 16e9
    assert slow.device_ns(batch) > least_s * 1e9
    assert slow.device_ns(batch) > 1.2 * usual.device_ns(batch)
    fast = measured(**fields, gpu_link_gb_per_s=1e3)
    assert fast.device_ns(batch) == pytest.approx(usual.device_ns(batch), rel=1e-6)


def test_a_slow_host_takes_longer_for_synchronous_steps_alone():
    usual, slow = (
        measured(async_scheduling=False, host_time_factor=factor).host_ns(100) for factor in (1.0, 2.0)
    )
    assert slow == 2 * usual
    line = measured(host_time_factor=2.0).decode_line(64)
    assert line.ns(64_000, 1000) == measured().decode_line(64).ns(64_000, 1000)


def test_a_calibration_is_not_for_another_host_or_link():
    assert Scenario(async_scheduling=False).step_costs().name.startswith("vllm-0.24")
    assert Scenario(async_scheduling=False, host_time_factor=1.0).step_costs().name == "measured"
    with pytest.raises(BadInput, match="host_time_factor"):
        Scenario(costs="vllm-0.24-h200-qwen3-8b", host_time_factor=1.5).step_costs()


def test_a_host_that_was_measured_narrows_what_synchronous_steps_may_take():
    def width(costs):
        hosts = [draw(costs, index).host_ns(200) for index in range(40)]
        return max(hosts) / min(hosts)

    unknown = measured(async_scheduling=False)
    known = measured(async_scheduling=False, host_time_factor=1.0)
    assert width(unknown) > 2 * width(known)


MIXTURE = {"model": "Qwen/Qwen3-30B-A3B", "gpu": "RTX PRO 6000", "enable_expert_parallel": True}


def test_ranks_that_share_experts_read_fewer_weights_and_wait_for_the_link():
    alone, shared = measured(**MIXTURE), measured(**MIXTURE, moe_data_parallel_size=2)
    slow = measured(**MIXTURE, moe_data_parallel_size=2, gpu_link_gb_per_s=4.0)
    times = [costs.decode_line(64).ns(64_000, 1000) for costs in (shared, alone)]
    assert 0.5 < times[0] / times[1] < 0.9
    assert slow.device_ns(CHUNK) > 1.3 * shared.device_ns(CHUNK)


def test_ranks_that_share_experts_have_more_room_for_kv():
    blocks = [Scenario(**MIXTURE, moe_data_parallel_size=ranks).blocks() for ranks in (1, 2)]
    expert_bytes = 48 * 128 * 3 * 2048 * 768 * 2
    block_bytes = 16 * 48 * 2 * 4 * 128 * 2
    assert blocks[1] - blocks[0] == pytest.approx(expert_bytes / 2 / block_bytes, rel=0.1)


def test_data_parallel_ranks_are_for_measured_mixtures_alone():
    with pytest.raises(BadInput, match="replicas of Qwen/Qwen3-8B are independent"):
        Scenario(moe_data_parallel_size=2).step_costs()
    with pytest.raises(BadInput, match="moe_data_parallel_size needs measured operations"):
        Scenario(**MIXTURE, moe_data_parallel_size=2, costs="roofline").step_costs()


def test_steps_with_prompts_are_less_certain_than_pure_decode_steps(costs):
    """The level makes up for the first in a usual load, whose time decode steps have 80% of."""
    prompts, decode, load = [], [], []
    for index in range(400):
        drawn = draw(costs, index)
        prompts.append(drawn.device_ns(CHUNK) / costs.device_ns(CHUNK))
        decode.append(drawn.decode_line(32).ns(32_000, 1000) / costs.decode_line(32).ns(32_000, 1000))
        load.append(0.2 * prompts[-1] + 0.8 * decode[-1])

    def width(values):
        low, high = np.percentile(values, (5, 95))
        return high - low

    assert width(prompts) > 1.5 * width(decode)
    assert width(load) < 1.1 * width(decode)


def test_a_process_per_gpu_takes_longer_for_each_request_of_a_synchronous_step():
    """Two machines took 17.8 and 17.7 us for a request of Qwen3-32B on two GPUs."""
    costs = measured(model="Qwen/Qwen3-32B", tensor_parallel_size=2, async_scheduling=False)
    assert costs.host_ns(101) - costs.host_ns(1) == pytest.approx(1.775e6, rel=0.01)
    slow = measured(
        model="Qwen/Qwen3-32B", tensor_parallel_size=2, async_scheduling=False, host_time_factor=2.0
    )
    assert slow.host_ns(101) - slow.host_ns(1) == pytest.approx(3.55e6, rel=0.01)
