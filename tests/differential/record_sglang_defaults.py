"""A record of SGLang's own defaults, without a GPU: a row per model, GPU and number of GPUs.

    python tests/differential/record_sglang_defaults.py > rows.json

runs with the interpreter that has SGLang (see README.md). The platform is made to say that a GPU is there;
then `ServerArgs` resolves itself. `tests/sim/test_defaults.py` compares the rows, which lie in
`tests/sim/recorded_defaults`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]

import sglang_stubs  # noqa: E402, F401
import torch  # noqa: E402
from pagecast.sim.machine.gpus import GPUS, Gpu  # noqa: E402
from sglang.srt import utils  # noqa: E402
from sglang.srt.arg_groups import memory_hook  # noqa: E402
from sglang.srt.arg_groups.overrides import resolved_view  # noqa: E402
from sglang.srt.runtime_context import override_platform  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

MODELS = {
    "Qwen/Qwen3-8B": "Qwen3ForCausalLM",
    "Qwen/Qwen3-30B-A3B": "Qwen3MoeForCausalLM",
    "meta-llama/Llama-3.1-8B": "LlamaForCausalLM",
    "mistralai/Mistral-7B-v0.3": "MistralForCausalLM",
    "google/gemma-3-27b": "Gemma3ForConditionalGeneration",
    "deepseek-ai/DeepSeek-V3": "DeepseekV3ForCausalLM",
    "openai/gpt-oss-20b": "GptOssForCausalLM",
    "Qwen/Qwen3-Next-80B-A3B": "Qwen3NextForCausalLM",
    "facebook/opt-125m": "OPTForCausalLM",
    "microsoft/Phi-3-mini-4k": "Phi3ForCausalLM",
}
MIB = 1 << 20


def capability(gpu: Gpu) -> tuple[int, int]:
    """The compute capability that decides defaults."""
    if gpu.hopper:
        return 9, 0
    if gpu.blackwell:
        return (10, 0) if gpu.data_center_blackwell else (12, 0)
    return (8, 0) if gpu.name.startswith("A100") else (8, 9)


def defaults(folder: str, gpu: Gpu, gpus: int) -> list[float]:
    """What a server takes: fraction of memory, tokens of a chunk, tokens of a page."""
    now = capability(gpu)
    torch.cuda.get_device_capability = lambda *device: now
    memory_hook.get_device_memory_capacity = lambda device=None: gpu.hbm_bytes / MIB
    facts = {
        "is_cuda": True,
        "is_sm90": now[0] == 9,
        "is_sm100": now[0] == 10,
        "is_sm100_or_sm110": now[0] == 10,
        "is_sm120": now[0] == 12,
        "is_blackwell": now[0] in (10, 12),
        "is_hopper_with_cuda_12_3": now[0] == 9,
        "has_flashinfer": True,
        "device_sm": 10 * now[0] + now[1],
        "device_capability": now,
    }
    with override_platform(**facts):
        arguments = ServerArgs(model_path=folder, device="cuda", tp_size=gpus)
        arguments.resolve_once()
        own = resolved_view(arguments)
        return [own.mem_fraction_static, own.chunked_prefill_size, own.page_size]


def main() -> None:
    """Prints the rows."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    utils.is_cuda = lambda: True
    configs = json.loads((ROOT / "sim" / "machine" / "models.json").read_text())
    rows = []
    for model, architecture in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            config = {**configs[model], "architectures": [architecture]}
            config.pop("quantization_config", None)  # libraries of the GPU check it
            Path(folder, "config.json").write_text(json.dumps(config))
            for gpu in GPUS:
                if gpu.name.startswith("MI"):
                    continue  # AMD's defaults are of another platform
                for gpus in (1, 4):
                    try:
                        rows.append([model, gpu.name, gpus, *defaults(folder, gpu, gpus)])
                    except Exception as error:
                        print(model, gpu.name, gpus, type(error).__name__, str(error)[:200], file=sys.stderr)
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
