"""A record of vLLM's own defaults, without a GPU: a row per model and GPU, as vLLM's argument code has them.

    python tests/differential/record_defaults.py > rows.json

runs with the interpreter that has vLLM (see README.md). The platform is made to say that a GPU is there.
`tests/sim/test_defaults.py` compares the rows, which lie in `tests/sim/recorded_defaults`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

from pagecast.sim.machine.gpus import GPUS  # noqa: E402
from vllm import platforms  # noqa: E402
from vllm.engine import arg_utils  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402

MODELS = {
    "Qwen/Qwen3-8B": "Qwen3ForCausalLM",
    "Qwen/Qwen3-30B-A3B": "Qwen3MoeForCausalLM",
    "meta-llama/Llama-3.1-8B": "LlamaForCausalLM",
    "mistralai/Mistral-7B-v0.3": "MistralForCausalLM",
    "google/gemma-3-27b": "Gemma3ForCausalLM",
    "deepseek-ai/DeepSeek-V3": "DeepseekV3ForCausalLM",
    "openai/gpt-oss-20b": "GptOssForCausalLM",
    "Qwen/Qwen3-Next-80B-A3B": "Qwen3NextForCausalLM",
    "facebook/opt-125m": "OPTForCausalLM",
    "microsoft/Phi-3-mini-4k": "Phi3ForCausalLM",
}


class PretendedGpu:
    """The platform, with a GPU of another name and memory."""

    def __init__(self, platform: Any) -> None:
        self.platform, self.name, self.memory_bytes = platform, "", 0

    def get_device_name(self, device_id: int = 0) -> str:
        return self.name

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return self.memory_bytes

    def is_cpu(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.platform, name)


def defaults(arguments: EngineArgs, model_config: Any) -> tuple[float, int, int, int, bool]:
    """What a server takes: fraction of memory, requests, tokens of a step, longest sequence, caching."""
    arguments.max_model_len = model_config.max_model_len
    arguments._set_default_chunked_prefill_and_prefix_caching_args(model_config)
    arguments._set_default_max_num_seqs_and_batched_tokens_args(
        UsageContext.OPENAI_API_SERVER, model_config, SimpleNamespace(use_batched_dp_moe=False)
    )
    assert arguments.max_num_seqs and arguments.max_num_batched_tokens
    return (
        arguments.gpu_memory_utilization,
        arguments.max_num_seqs,
        arguments.max_num_batched_tokens,
        model_config.max_model_len,
        bool(arguments.enable_prefix_caching),
    )


def main() -> None:
    """Prints the rows."""
    registry._run_in_subprocess = lambda inspect: inspect()  # a process for each model would take long
    pretended = PretendedGpu(platforms.current_platform)
    arg_utils.current_platform = pretended
    configs = json.loads((ROOT / "sim" / "machine" / "models.json").read_text())
    rows = []
    for model, architecture in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            config = {**configs[model], "architectures": [architecture]}
            Path(folder, "config.json").write_text(json.dumps(config))
            model_config = EngineArgs(model=folder, skip_tokenizer_init=True).create_model_config()
            for gpu in GPUS:
                pretended.name, pretended.memory_bytes = gpu.name, gpu.hbm_bytes
                rows.append([model, gpu.name, *defaults(EngineArgs(model=folder), model_config)])
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
