"""Options that nobody chose are those of the engine's own code, and as the documentation says."""

import json
import lzma
from pathlib import Path

import pytest
from pagecast.engine.options import Options
from pagecast.sim.core.engines.registry import ENGINES, nearest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import GPUS
from pagecast.sim.scenario import Scenario

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("recorded_defaults")
PAGE = (ROOT / "docs" / "defaults.md").read_text(encoding="utf-8")
NAMES = ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


@pytest.mark.parametrize("path", sorted(RECORDED.glob("vllm-*.json.xz")), ids=lambda path: path.name)
def test_defaults_of_vllm_are_those_that_its_own_code_gave(path):
    """Every GPU with ten models; recorded by tests/differential/record_defaults.py."""
    version = path.name.removeprefix("vllm-").removesuffix(".json.xz")
    rows = json.loads(lzma.decompress(path.read_bytes()))
    assert len({model for model, *_ in rows}) == 10
    for model, gpu, *wanted in rows:
        scenario = Scenario(engine=f"vllm@{version}", model=model, gpu=gpu)
        own = [getattr(scenario, name) for name in (*NAMES, "enable_prefix_caching")]
        assert own == wanted, (model, gpu)


def test_defaults_of_sglang_are_those_that_its_own_code_gave():
    """NVIDIA's GPUs, one and four, with ten models; tests/differential/record_sglang_defaults.py."""
    rows = json.loads(lzma.decompress((RECORDED / "sglang-0.5.23.json.xz").read_bytes()))
    assert len(rows) == 620
    for model, gpu, gpus, *wanted in rows:
        scenario = Scenario(engine="sglang", model=model, gpu=gpu, tensor_parallel_size=gpus)
        own = [getattr(scenario, name) for name in (NAMES[0], NAMES[2], "block_size")]
        assert own == wanted, (model, gpu, gpus)


def shown(gpu: str) -> str:
    """The row of a GPU in the table of the page."""

    def cells(engine: str, *names: str, **fields) -> list[str]:
        scenario = Scenario(engine=engine, gpu=gpu, **fields)
        return [f"{getattr(scenario, name):,}" for name in names]

    chunk = "max_num_batched_tokens"
    columns = [
        gpu,
        *cells("vllm@0.24", "max_num_seqs", chunk),
        *cells("vllm@0.33", chunk),
        *cells("sglang", chunk, "gpu_memory_utilization"),
        *cells("sglang", "gpu_memory_utilization", tensor_parallel_size=4),
        *cells("sglang", "block_size"),
    ]
    return f"| {' | '.join(columns)} |"


@pytest.mark.parametrize("gpu", [gpu.name for gpu in GPUS])
def test_the_page_has_the_defaults_of_each_gpu(gpu):
    assert shown(gpu) in PAGE


def test_the_page_has_the_defaults_that_are_the_same_everywhere():
    scenario = Scenario(engine="trtllm")
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "free_gpu_memory_fraction"):
        assert f"| `{name}` | {getattr(scenario, name):,} |" in PAGE
    assert scenario.partial_reuse == "copy" and scenario.trtllm is not None
    assert not scenario.trtllm.chunked_context


def test_what_is_chosen_stays_and_what_is_not_follows_the_gpu_and_the_version():
    scenario = Scenario(engine="vllm@0.24", gpu="B200", max_num_seqs=64)
    assert (scenario.max_num_seqs, scenario.max_num_batched_tokens) == (64, 8192)
    newer = scenario.changed(engine="vllm@0.28.1")
    assert (newer.engine, newer.max_num_seqs, newer.max_num_batched_tokens) == ("vllm@0.28", 64, 16_384)
    smaller = newer.changed(gpu="L4")
    assert (smaller.max_num_batched_tokens, smaller.changed(max_num_seqs=None).max_num_seqs) == (2048, 256)
    assert "max_num_seqs" not in newer.defaults


def test_limits_of_vllm_bound_each_other():
    assert Scenario(max_num_batched_tokens=100).max_num_seqs == 100
    assert Scenario(max_num_seqs=2, max_model_len=1000).max_num_batched_tokens == 2000


def test_a_saved_scenario_leaves_open_what_the_version_decides(tmp_path):
    Scenario(gpu="L4").save(tmp_path / "scenario.yaml")
    again = Scenario.load(tmp_path / "scenario.yaml", gpu="H200")
    assert (again.engine, again.max_num_seqs) == ("vllm@0.33", 1024)


def test_our_own_engine_takes_its_own_defaults():
    own = Options()
    for name, value in Scenario(engine="pagecast").defaults.items():
        if name not in ("max_model_len", "partial_reuse"):
            assert getattr(own, name) == value, name


def test_a_cache_that_holds_no_longest_sequence_is_vllms_start_up_error():
    with pytest.raises(BadInput, match=r"vLLM 0\.33 does not start: .*max seq len \(40960\)") as error:
        Scenario(gpu="L4").limits()
    assert "5.62 GiB KV cache is needed" in str(error.value)
    fits = int(str(error.value).split("maximum model length is ")[1].split(":")[0])
    assert Scenario(gpu="L4", max_model_len=fits).limits().max_model_len == fits
    with pytest.raises(BadInput, match="does not start"):
        Scenario(gpu="L4", max_model_len=fits + 16).limits()
    sglang = Scenario(gpu="L4", engine="sglang", gpu_memory_utilization=0.8)  # which cuts long requests
    assert sglang.limits().num_blocks < sglang.max_model_len


@pytest.mark.parametrize(
    ("version", "taken"), [("0.19.0", "0.24"), ("0.27", "0.26"), ("0.32.1", "0.31"), ("0.99", "0.33")]
)
def test_a_version_that_is_not_known_is_refused_with_the_nearest(version, taken):
    with pytest.raises(BadInput, match=f"nearest: vllm@{taken}"):
        Scenario(engine=f"vllm@{version}")
    assert nearest("vllm", version).text == f"vllm@{taken}"


def test_every_engine_has_defaults_for_what_is_open():
    needed = {"block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"}
    for name in ENGINES:
        assert needed <= Scenario(engine=name).defaults.keys(), name
