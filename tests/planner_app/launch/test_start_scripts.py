"""Start scripts in the style of public guides, each read right in every field."""

from dataclasses import dataclass, field

import pytest
from pagecast.planner_app.launch.launch import read_launch
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario


@dataclass(frozen=True)
class Guide:
    """A file of a guide, and what it must be read into."""

    name: str
    text: str
    title: str
    fields: dict
    gpus: int = 1
    replicas: int = 1
    notes: tuple[str, ...] = ()
    beside: dict[str, str] = field(default_factory=dict)


GUIDES = [
    Guide(
        "serve.sh",
        """#!/usr/bin/env bash
set -euo pipefail
# Chat on one node.
MODEL=meta-llama/Llama-3.1-8B-Instruct
MAX_LEN=${MAX_LEN:-16384}
pip install -q "vllm==0.33.0"
export VLLM_LOGGING_LEVEL=INFO
CUDA_VISIBLE_DEVICES=0,1 vllm serve "${MODEL}" \\
    --tensor-parallel-size 2 \\
    --max-model-len $MAX_LEN --max_num_seqs=128 \\
    --gpu-memory-utilization 0.95 \\
    --served-model-name 'chat model' \\
    --port 8000 > server.log 2>&1 &
sleep 60; curl localhost:8000/health
""",
        "vllm@0.33",
        {
            "model": "meta-llama/Llama-3.1-8B-Instruct",
            "engine": "vllm@0.33",
            "tensor_parallel_size": 2,
            "max_model_len": 16384,
            "max_num_seqs": 128,
            "gpu_memory_utilization": 0.95,
        },
        gpus=2,
    ),
    Guide(
        "arrays.sh",
        """ARGS=(
  --model Qwen/Qwen3-30B-A3B
  --data-parallel-size 4 --enable-expert-parallel
  --max-model-len 32k
  --speculative-config '{"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 3}'
)
ARGS+=(--no-enable-prefix-caching)
nohup python3 -m vllm.entrypoints.openai.api_server "${ARGS[@]}" &
""",
        "vllm",
        {
            "model": "Qwen/Qwen3-30B-A3B",
            "engine": "vllm@0.33",
            "moe_data_parallel_size": 4,
            "enable_expert_parallel": True,
            "max_model_len": 32000,
            "enable_prefix_caching": False,
            "speculative_config": '{"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 3}',
        },
        gpus=4,
        notes=("how many drafts are accepted", "4 data-parallel ranks"),
    ),
    Guide(
        "docker.sh",
        """docker run -d --name vllm --runtime nvidia --gpus '"device=0,1"' \\
  -v ~/.cache/huggingface:/root/.cache/huggingface -e HF_TOKEN=$HF_TOKEN \\
  -p 8000:8000 --ipc=host \\
  vllm/vllm-openai:v0.24.0 \\
  --model Qwen/Qwen3-8B --quantization fp8 -tp 2 --enforce-eager   # first try
""",
        "vllm@0.24",
        {"model": "Qwen/Qwen3-8B-FP8", "engine": "vllm@0.24", "tensor_parallel_size": 2},
        gpus=2,
        notes=("not modelled, though a forecast may depend on it: --enforce-eager",),
    ),
    Guide(
        "config.sh",
        "vllm serve --config vllm.yaml --max-num-batched-tokens 4096\n",
        "vllm",
        {
            "model": "Qwen/Qwen3-8B",
            "engine": "vllm@0.33",
            "max_num_batched_tokens": 4096,
            "max_loras": 4,
            "kv_offloading_size": 16.0,
            "offload_prompt_only": False,
        },
        beside={
            "vllm.yaml": (
                "model: Qwen/Qwen3-8B\nmax-num-batched-tokens: 2048\nenable-lora: true\nmax_loras: 4\n"
                "uvicorn-log-level: warning\nkv-offloading-size: 16\nkv-transfer-config:\n"
                "  kv_connector: OffloadingConnector\n  kv_role: kv_both\n"
                "  kv_connector_extra_config: {offload_prompt_only: false}\n"
            )
        },
    ),
    Guide(
        "deployment.yaml",
        """apiVersion: v1
kind: Service
metadata: {name: llama}
spec: {ports: [{port: 80, targetPort: 8000}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: llama}
spec:
  replicas: 3
  template:
    spec:
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
      containers:
      - name: proxy
        image: nginx:1.27
      - name: vllm
        image: vllm/vllm-openai:v0.28.1
        command: ["/bin/sh", "-c"]
        args:
        - |
          vllm serve $MODEL_NAME --trust-remote-code \\
            --block-size 32 --kv-cache-dtype fp8
        env:
        - {name: MODEL_NAME, value: mistralai/Mistral-7B-Instruct-v0.3}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: hf, key: token}}
        resources: {limits: {nvidia.com/gpu: "1"}}
""",
        "vllm@0.28",
        {
            "model": "mistralai/Mistral-7B-Instruct-v0.3",
            "engine": "vllm@0.28",
            "gpu": "H100 SXM",
            "block_size": 32,
            "kv_cache_dtype": "fp8",
        },
        replicas=3,
        notes=("3 equal replicas",),
    ),
    Guide(
        "statefulset.yml",
        """kind: StatefulSet
metadata: {name: qwen}
spec:
  serviceName: qwen
  template:
    spec:
      containers:
      - name: server
        image: registry.local/mirror/vllm-openai:v0.31.0-cu130
        env: [{name: SEQS, value: "64"}]
        args: [--model, Qwen/Qwen3-8B, "--max-num-seqs=$(SEQS)", --scheduling-policy, priority]
""",
        "vllm@0.31",
        {
            "model": "Qwen/Qwen3-8B",
            "engine": "vllm@0.31",
            "max_num_seqs": 64,
            "scheduling_policy": "priority",
        },
    ),
    Guide(
        "sglang.sh",
        """export CUDA_VISIBLE_DEVICES=0
uv pip install "sglang[all]==0.5.23"
python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --host 0.0.0.0 \\
  --tp 2 --mem-fraction-static 0.85 --chunked-prefill-size 4096 --max-running-requests 256 \\
  --schedule-policy lpm --schedule-conservativeness 0.3 --page-size 64 --context-length 32768 \\
  --enable-mixed-chunk --disable-overlap-schedule --log-level warning --attention-backend fa3
""",
        "sglang@0.5.23",
        {
            "model": "meta-llama/Llama-3.1-8B-Instruct",
            "engine": "sglang@0.5.23",
            "tensor_parallel_size": 2,
            "gpu_memory_utilization": 0.85,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 256,
            "scheduling_policy": "lpm",
            "schedule_conservativeness": 0.3,
            "block_size": 64,
            "max_model_len": 32768,
            "enable_mixed_chunk": True,
            "async_scheduling": False,
        },
        gpus=2,
        notes=("--attention-backend fa3", "takes 2 GPUs and may use 1 here"),
    ),
    Guide(
        "sglang_docker.sh",
        """docker run --gpus all --shm-size 32g -p 30000:30000 \\
    --env "HF_TOKEN=<secret>" --ipc=host lmsysorg/sglang:v0.5.23-cu129 \\
    sglang serve --model Qwen/Qwen3-8B --disable-radix-cache --chunked-prefill-size -1
""",
        "sglang@0.5.23",
        {
            "model": "Qwen/Qwen3-8B",
            "engine": "sglang@0.5.23",
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
        },
    ),
    Guide(
        "trtllm.sh",
        """cat > ./extra.yaml <<EOF
enable_attention_dp: false
kv_cache_config:
  free_gpu_memory_fraction: 0.85
  dtype: fp8
  tokens_per_block: 64
  enable_partial_reuse: false
scheduler_config:
  capacity_scheduler_policy: MAX_UTILIZATION
  context_chunking_policy: EQUAL_PROGRESS
cuda_graph_config:
  enable_padding: true
EOF
mpirun -n 1 --allow-run-as-root trtllm-llmapi-launch \\
trtllm-serve serve "nvidia/Llama-3.1-8B-Instruct-FP8" --backend pytorch --tp_size 2 \\
  --max_batch_size 256 --max_num_tokens 4096 --kv_cache_free_gpu_memory_fraction 0.9 \\
  --enable_chunked_prefill --extra_llm_api_options ./extra.yaml
""",
        "trtllm",
        {
            "model": "nvidia/Llama-3.1-8B-Instruct-FP8",
            "engine": "trtllm-max-utilization@1.2",
            "tensor_parallel_size": 2,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 4096,
            "free_gpu_memory_fraction": 0.85,
            "enable_chunked_prefill": True,
            "kv_cache_dtype": "fp8",
            "block_size": 64,
            "partial_reuse": "off",
            "context_chunking_policy": "equal_progress",
        },
        gpus=2,
        notes=("cuda_graph_config {'enable_padding': True}",),
    ),
    Guide(
        "pod.yaml",
        """kind: Pod
metadata: {name: trt}
spec:
  containers:
  - name: trt
    image: nvcr.io/nvidia/tensorrt-llm/release:1.2.0
    command: [trtllm-serve]
    args: [/models/Qwen3-8B, --max_seq_len, "8192"]
    resources: {limits: {nvidia.com/gpu: 1}}
""",
        "trtllm@1.2",
        {"model": "Qwen3-8B", "engine": "trtllm-guaranteed-no-evict@1.2", "max_model_len": 8192},
        notes=("/models/Qwen3-8B is not here; it is taken for Qwen3-8B",),
    ),
    Guide(
        "compose.yaml",
        """services:
  redis: {image: "redis:7"}
  llm:
    image: vllm/vllm-openai:latest
    environment: [VLLM_ATTENTION_BACKEND=FLASHINFER]
    command: --model Qwen/Qwen3-8B --kv-cache-memory-bytes 8G
""",
        "vllm",
        {"model": "Qwen/Qwen3-8B", "engine": "vllm@0.33", "num_gpu_blocks": 3639},
        notes=("VLLM_ATTENTION_BACKEND of the environment",),
    ),
]


@pytest.mark.parametrize("guide", GUIDES, ids=[guide.name for guide in GUIDES])
def test_a_guides_script_is_read_right_in_every_field(guide, tmp_path):
    for name, text in {guide.name: guide.text, **guide.beside}.items():
        (tmp_path / name).write_text(text)
    launch = read_launch(f"@{tmp_path / guide.name}")
    assert launch.title == guide.title
    assert launch.fields == guide.fields
    assert (launch.gpus, launch.replicas) == (guide.gpus, guide.replicas)
    read, *notes = launch.notes
    assert f"{guide.title} is read: " in read
    notes = [note for note in notes if "the rules here are those of" not in note]
    assert len(notes) == len(guide.notes), notes
    for note, part in zip(notes, guide.notes, strict=True):
        assert part in note
    Scenario.make(launch.fields).limits()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ls -l", "nothing starts an engine; known are vllm serve"),
        ("echo vllm serve M", "nothing starts an engine"),
        ("vllm serve $MODEL", r"line 1: the model is \$MODEL, and nothing there sets it"),
        ("vllm serve M --max-model-len $LEN", r"--max-model-len is \$LEN, and nothing there sets \$LEN"),
        ("vllm serve M --max-num-seqs many", "--max-num-seqs is 'many': give a whole number"),
        ("A=1\nvllm serve 'M", "line 2: no closing quotation"),
        ("vllm serve", "the engine is given no model"),
        ("vllm serve M --speculative-config '{a}'", "--speculative-config is no JSON"),
        ("trtllm-serve disaggregated -c c.yaml", "no single engine"),
        ("vllm serve M --config none.yaml", "none.yaml: no such file; it is the --config of"),
        (
            "vllm serve M --max-num-seqs 1\nsglang serve --model M",
            "starts 2 different engines; give one command",
        ),
    ],
)
def test_a_script_that_cannot_be_read_says_where_and_what_to_do(text, problem):
    with pytest.raises(BadInput, match=problem):
        read_launch(text)


def test_one_of_several_containers_is_named(tmp_path):
    path = tmp_path / "two.yaml"
    containers = "".join(
        f"  - {{name: {name}, image: 'vllm/vllm-openai:v0.33.0', args: [{model}]}}\n"
        for name, model in (("big", "Qwen/Qwen3-8B"), ("small", "Qwen/Qwen3-0.6B"))
    )
    path.write_text(f"kind: Pod\nmetadata: {{name: p}}\nspec:\n  containers:\n{containers}")
    with pytest.raises(BadInput, match=r"starts 2 different engines; name one as @.*two.yaml#NAME"):
        read_launch(f"@{path}")
    assert read_launch(f"@{path}#small").fields["model"] == "Qwen/Qwen3-0.6B"
    path.write_text("{{- if .Values.x }}\nkind: Pod\n")
    with pytest.raises(BadInput, match=r"line 1: .*give a manifest, with templates filled in"):
        read_launch(f"@{path}")


def test_equal_starts_are_replicas():
    text = "".join(
        f"CUDA_VISIBLE_DEVICES={gpu} vllm serve Qwen/Qwen3-8B --port 800{gpu} --max-num-seqs 8 &\n"
        for gpu in range(2)
    )
    launch = read_launch(text)
    assert launch.replicas == 2
    assert "2 equal replicas" in launch.notes[-1]


def test_a_version_whose_rules_are_not_followed_is_named():
    note = read_launch("docker run vllm/vllm-openai:v0.99.0 --model Qwen/Qwen3-8B").notes[-1]
    assert "vllm@0.99 is started, which is not known; rules and defaults are those of vLLM 0.33" in note
