"""Start-up logs: what an engine found at its start, beside what is predicted."""

import json

import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.launch.startup_log import read_log
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario

GRAPHS = "'cudagraph_capture_sizes': [1, 2, 4, 8, 16], 'max_cudagraph_capture_size': 16"
VLLM_24 = """\
(APIServer pid=1) INFO 07-01 10:00:00 [api_utils.py:337] vLLM server version 0.24.0, serving model \
Qwen/Qwen3-8B
(APIServer pid=1) INFO 07-01 10:00:00 [api_utils.py:273] non-default args: {'model_tag': 'Qwen/Qwen3-8B', \
'port': 8001, 'model': 'Qwen/Qwen3-8B', 'max_num_seqs': 64, 'gpu_memory_utilization': 0.85, \
'kv_transfer_config': KVTransferConfig(kv_connector='NixlConnector', kv_role='kv_both'), 'dtype': \
torch.float32}
(APIServer pid=1) INFO 07-01 10:00:05 [model.py:1725] Using max model len 40960
(APIServer pid=1) INFO 07-01 10:00:06 [scheduler.py:253] Chunked prefill is enabled with \
max_num_batched_tokens=2048.
(EngineCore pid=9) INFO 07-01 10:00:09 [core.py:115] Initializing a V1 LLM engine (v0.24.0) with config: \
model='Qwen/Qwen3-8B', speculative_config=None, max_seq_len=40960, tensor_parallel_size=1, \
kv_cache_dtype=auto, enable_prefix_caching=True, compilation_config={'mode': 3, GRAPHS}
(EngineCore pid=9) INFO 07-01 10:00:20 [gpu_model_runner.py:5256] Model loading took 15.27 GiB \
memory and 3.1 seconds
(EngineCore pid=9) INFO 07-01 10:00:40 [gpu_worker.py:509] Available KV cache memory: 50.91 GiB
(EngineCore pid=9) INFO 07-01 10:00:40 [kv_cache_utils.py:2146] GPU KV cache size: 370,672 tokens
(EngineCore pid=9) INFO 07-01 10:00:40 [kv_cache_utils.py:2148] \
Maximum concurrency for 40,960 tokens per request: 9.05x
(EngineCore pid=9) INFO 07-01 10:00:50 [gpu_model_runner.py:6657] Graph capturing finished in 9 \
secs, took 0.55 GiB
+-- NVIDIA H100 80GB HBM3 --+
""".replace("GRAPHS", GRAPHS)
VLLM_33 = """\
\x1b[0;36m(APIServer pid=1)\x1b[0;0m INFO 11-01 10:00:00 [startup.py:38]
 \u2584\u2584 \u2584\u2588 \u2588     \u2588     \u2588 \u2580\u2584\u2580 \u2588  version 0.33.0
  \u2588\u2584\u2588\u2580 \u2588     \u2588     \u2588     \u2588  model   Qwen/Qwen3-8B
(APIServer pid=1) INFO 11-01 10:00:00 [startup.py:96] non-default args: {'model': 'Qwen/Qwen3-8B', \
'tensor_parallel_size': 2, 'max_model_len': 10001, 'novelty': True, 'stream_interval': 4, \
'mode': <CompilationMode.VLLM_COMPILE: 3>}
(EngineCore pid=9) INFO 11-01 10:00:40 [kv_cache_utils.py:1146] GPU KV cache size: 715,071 tokens, \
Maximum concurrency for 10,001 tokens per request: 71.50x
"""
SGLANG = """\
[2026-11-01 10:00:00] server_args={'model_path': 'meta-llama/Llama-3.1-8B-Instruct', 'tp_size': 2, \
'page_size': 16, \
'mem_fraction_static': 0.83, 'schedule_policy': 'lpm', 'disable_radix_cache': False, 'context_length': None, \
'cuda_graph_config': {'decode': 1}, 'schedule_conservativeness': 1.0, 'radix_eviction_policy': 'lru'}
[2026-11-01 10:00:09 TP0] Load weight end. elapsed=5.00 s, type=LlamaForCausalLM, avail mem=70.00 \
GB, mem usage=7.51 GB.
[2026-11-01 10:00:10 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 901120, K size: \
27.50 GB, V size: 27.50 GB
[2026-11-01 10:00:10 TP0] Memory pool end. avail mem=11.90 GB
[2026-11-01 10:00:20 TP0] max_total_num_tokens=901120, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=2048, context_len=131072, available_gpu_mem=11.90 GB
"""
TRTLLM = """\
[TensorRT-LLM] TensorRT LLM version: 1.2.0
[11/01/2026-10:00:00] [TRT-LLM] [I] LLM Args: TorchLlmArgs(model='Qwen/Qwen3-8B', tensor_parallel_size=1, \
kv_cache_config=KvCacheConfig(enable_block_reuse=True, free_gpu_memory_fraction=0.85, tokens_per_block=32, \
max_tokens=None, dtype='auto'), enable_chunked_prefill=True, backend='pytorch')
[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 128 [window size=4096], tokens per block=32, \
primary blocks=129, secondary blocks=0, max sequence length=4096
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.56 GiB for max tokens in paged KV cache (4128).
[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 128 [window size=4096], tokens per block=32, \
primary blocks=11000, secondary blocks=0, max sequence length=4096
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 48.34 GiB for max tokens in paged KV cache (352000).
[11/01/2026-10:00:30] [TRT-LLM] [I] max_seq_len=4096, max_num_requests=64, max_num_tokens=8192, \
max_batch_size=64
"""
VLLM_10 = """\
(APIServer pid=1) INFO 09-01 10:00:05 [api_server.py:1805] vLLM API server version 0.10.1.1
(APIServer pid=1) INFO 09-01 10:00:05 [utils.py:326] non-default args: {'model': 'Qwen/Qwen3-8B', \
'max_model_len': 8192}
(EngineCore_0 pid=9) INFO 09-01 10:00:40 [kv_cache_utils.py:849] GPU KV cache size: 379,824 tokens
(EngineCore_0 pid=9) INFO 09-01 10:00:40 [kv_cache_utils.py:853] Maximum concurrency for 8,192 tokens per \
request: 46.37x
"""
SGLANG_4 = """\
[2025-07-01 10:00:00] server_args=ServerArgs(model_path='Qwen/Qwen3-8B', dtype='auto', \
mem_fraction_static=0.88, max_running_requests=None, tp_size=1, page_size=1, disable_radix_cache=False)
[2025-07-01 10:00:10] KV Cache is allocated. #tokens: 374000, K size: 25.70 GB, V size: 25.70 GB
[2025-07-01 10:00:20] max_total_num_tokens=374000, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=2048, context_len=40960
"""
TRTLLM_CPP = """\
[TensorRT-LLM] TensorRT LLM version: 1.1.0
[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 64 [window size=2048], tokens per block=32, \
primary blocks=8000, secondary blocks=100, max sequence length=2048
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 35.16 GiB for max tokens in paged KV cache (256000).
"""
CASES = {
    "vllm-0.10": (
        VLLM_10,
        "0.10",
        {"model": "Qwen/Qwen3-8B", "engine": "vllm@0.24", "max_model_len": 8192},
        23738,
    ),
    "sglang-0.4": (
        SGLANG_4,
        None,
        {
            "model": "Qwen/Qwen3-8B",
            "engine": "sglang@0.5.23",
            "gpu_memory_utilization": 0.88,
            "tensor_parallel_size": 1,
            "block_size": 1,
            "max_num_batched_tokens": 8192,
            "max_prefill_tokens": 16384,
            "max_num_seqs": 2048,
            "max_model_len": 40960,
        },
        374000,
    ),
    "trtllm, without its arguments": (TRTLLM_CPP, "1.1", {"engine": "trtllm-guaranteed-no-evict@1.2"}, 8000),
    "vllm-0.24": (
        VLLM_24,
        "0.24",
        {
            "model": "Qwen/Qwen3-8B",
            "engine": "vllm@0.24",
            "gpu": "H100 SXM",
            "max_num_seqs": 64,
            "gpu_memory_utilization": 0.85,
            "max_model_len": 40960,
            "max_num_batched_tokens": 2048,
            "tensor_parallel_size": 1,
            "kv_cache_dtype": "auto",
            "enable_prefix_caching": True,
        },
        23166,
    ),
    "vllm-0.33": (
        VLLM_33,
        "0.33",
        {"model": "Qwen/Qwen3-8B", "engine": "vllm@0.33", "tensor_parallel_size": 2, "max_model_len": 10001},
        44758,
    ),
    "sglang": (
        SGLANG,
        None,
        {
            "model": "meta-llama/Llama-3.1-8B-Instruct",
            "engine": "sglang@0.5.23",
            "tensor_parallel_size": 2,
            "block_size": 16,
            "gpu_memory_utilization": 0.83,
            "scheduling_policy": "lpm",
            "schedule_conservativeness": 1.0,
            "radix_eviction_policy": "lru",
            "max_num_batched_tokens": 8192,
            "max_prefill_tokens": 16384,
            "max_num_seqs": 2048,
            "max_model_len": 131072,
        },
        56320,
    ),
    "trtllm": (
        TRTLLM,
        "1.2",
        {
            "model": "Qwen/Qwen3-8B",
            "engine": "trtllm-guaranteed-no-evict@1.2",
            "tensor_parallel_size": 1,
            "block_size": 32,
            "free_gpu_memory_fraction": 0.85,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "kv_cache_dtype": "auto",
            "max_model_len": 4096,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
        },
        11000,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_log_tells_options_version_and_blocks(case, tmp_path):
    text, version, fields, blocks = CASES[case]
    path = tmp_path / "server.log"
    path.write_text(text)
    log = read_log(str(path))
    assert (log.version, log.fields) == (version, fields)
    scenario = Scenario.make(log.fields)
    assert log.blocks(scenario) == blocks
    assert log.measured(scenario).num_gpu_blocks == blocks
    assert any(f"KV blocks: the log says {blocks:,}, we predict " in line for line in log.compared(scenario))


def test_every_figure_of_the_start_is_set_beside_ours(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(VLLM_24)
    log = read_log(str(path))
    budget = Scenario.make(log.fields).budget()
    percent = 100 * (budget.num_gpu_blocks / 23166 - 1)
    lines = log.compared(Scenario.make(log.fields))
    assert lines[0] == (
        f"{path}: KV blocks: the log says 23,166, we predict {budget.num_gpu_blocks:,} ({percent:+.1f}%)"
    )
    assert [line.split(": ")[1] for line in lines[1:]] == [
        "KV cache, GiB",
        "weights, GiB",
        "CUDA graphs, GiB",
        "CUDA graphs",
    ]
    assert "the log says 15.27, we predict 15.27 (-0.0%)" in lines[2] or "(+0.0%)" in lines[2]
    assert "the log has 5 sizes to 16, we predict 19 to 128" in lines[4]
    assert log.notes[0] == f"{path}: not modelled, though a forecast may depend on it: --dtype torch.float32"
    assert "KV transfer by NixlConnector" in log.notes[1]


def test_options_of_another_version_and_blocks_set_by_hand_are_told(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(VLLM_33.replace("'novelty'", "'num_gpu_blocks_override': 101, 'novelty'"))
    log = read_log(str(path))
    assert log.notes[0] == f"{path}: not known, and left out: novelty, mode"
    assert "--stream-interval 4" in log.notes[1]
    assert log.fields["num_gpu_blocks"] == 100
    assert log.blocks(Scenario.make(log.fields)) is None
    assert log.compared(Scenario.make(log.fields)) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty; give the log of an engine's start"),
        ('{"a": 1}', "is JSON, not a log"),
        (
            "INFO [loggers.py:259] Engine 000: Avg prompt throughput: 1",
            "is the log of a running vllm without its start",
        ),
        ("[2026] Decode batch, #running-req: 3", "is the log of a running sglang without its start"),
        ("GET /index.html 200", "is no start-up log of .* it begins with 'GET /index.html 200'"),
    ],
)
def test_what_is_no_start_up_log_is_told_what_it_is(text, problem, tmp_path):
    path = tmp_path / "server.log"
    path.write_text(text)
    with pytest.raises(BadInput, match=problem):
        read_log(str(path))


def test_a_folder_has_logs_of_equal_starts(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(BadInput, match="none of its 1 files is the start-up log"):
        read_log(str(tmp_path))
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text(VLLM_33)
    assert read_log(str(tmp_path)).where == str(tmp_path / "b.log")
    (tmp_path / "c.log").write_text(VLLM_24)
    with pytest.raises(BadInput, match=r"logs of 2 different starts; give one of .*b\.log, .*c\.log"):
        read_log(str(tmp_path))


def test_a_replay_takes_the_logs_blocks_and_says_what_differs(tmp_path, capsys):
    path = tmp_path / "server.log"
    path.write_text(VLLM_24)
    command = ["replay", "chat", "--limit", "3", "--log", str(path)]
    assert run([*command, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("KV blocks: the log says 23,166" in note for note in notes)
    assert run([*command, "--out", str(tmp_path / "out"), "--max-num-seqs", "2"]) == 0
    kept = Scenario.load(tmp_path / "out" / "scenario.yaml")
    assert (kept.num_gpu_blocks, kept.gpu, kept.max_num_seqs) == (23166, "H100 SXM", 2)
    assert run([*command, "--out", str(tmp_path / "own"), "--num-gpu-blocks", "500"]) == 0
    assert Scenario.load(tmp_path / "own" / "scenario.yaml").num_gpu_blocks == 500
    path.write_text("INFO GPU KV cache size: 715,072 tokens\n")
    capsys.readouterr()
    assert run(command) == 2
    assert "the log names no model; give --model" in capsys.readouterr().err
    assert run([*command, "--model", "Qwen/Qwen3-8B", "--json"]) == 0
    assert "the log names no GPU; H200 is taken" in capsys.readouterr().out
