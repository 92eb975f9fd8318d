"""nano-vLLM, run on the workload of `pagecast bench` with random weights: the peer of the engine's benchmark.

It joins where `import nanovllm` works (put its folder on PYTHONPATH). It needs flash-attn; where that is not
installed its two calls are served by FlashAttention-3 (see flash_peer.py), which is no slower.
"""

import importlib.util
import json
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import flash_peer
import torch
from pagecast.engine.kernel_bench import PagedBatch
from pagecast.sim.machine.models import model as find_model
from torch import Tensor

ATTENTION = "flash-attn"


def present() -> bool:
    """Whether nano-vLLM can be run here."""
    return importlib.util.find_spec("nanovllm") is not None and (
        importlib.util.find_spec("flash_attn") is not None or flash_peer.load()
    )


def install() -> None:
    """Gives nano-vLLM random weights, no tokenizer, and attention where flash-attn is not installed.

    Its workers are new processes: the main module of the benchmark must call this when it is imported there.
    """
    if importlib.util.find_spec("flash_attn") is None:
        _stand_in()
    import nanovllm.engine.llm_engine as engine
    import nanovllm.engine.model_runner as runner

    runner.load_model = _randomise
    engine.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda *_, **__: _Tokenizer())


def seconds(
    model: str, prompts: list[list[int]], outputs: list[int], *, gpus: int = 1, repeat: int = 2
) -> float:
    """The least of `repeat` runs of the workload on so many GPUs, after a warm-up and `install`."""
    from nanovllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        _write_config(model, Path(folder))
        llm = LLM(folder, enforce_eager=False, max_model_len=4096, tensor_parallel_size=gpus)
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in outputs]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    times = []
    for turn in range(repeat):
        # Other ids each time: a prefix cached by the run before would be skipped.
        fresh = [[(token + turn) % 10_000 for token in prompt] for prompt in prompts]
        start = time.perf_counter()
        llm.generate(fresh, params, use_tqdm=False)
        times.append(time.perf_counter() - start)
    return min(times)


class _Tokenizer:
    """Random weights need no words."""

    eos_token_id = -1

    def decode(self, ids: list[int]) -> str:
        return ""


def _randomise(model: Any, path: str) -> None:
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for weight in model.parameters():
        weight.data.normal_(0, 0.02, generator=generator)


def _write_config(name: str, folder: Path) -> None:
    facts = find_model(name)
    a = facts.attention
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": facts.hidden,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": a.heads,
        "head_dim": a.head_dim,
        "num_key_value_heads": a.kv_heads,
        "intermediate_size": facts.intermediate,
        "hidden_act": "silu",
        "vocab_size": facts.vocab,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": facts.tied,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "attention_bias": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _stand_in() -> None:
    """A module `flash_attn` whose two functions that nano-vLLM calls are FlashAttention-3's."""
    global ATTENTION
    ATTENTION = "FlashAttention-3"
    flash_peer.load()

    def varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        max_seqlen_q: int,
        cu_seqlens_q: Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: Tensor,
        softmax_scale: float,
        causal: bool,
        block_table: Tensor | None,
    ) -> Tensor:
        out = torch.empty_like(q)
        lens = None if block_table is None else cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        batch = PagedBatch(cu_seqlens_q, lens, block_table, max_seqlen_q, max_seqlen_k)
        flash_peer.attend(q, k, v, out, batch)
        return out

    starts: dict[int, Tensor] = {}

    def with_kvcache(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> Tensor:
        n, flat = q.shape[0], q.squeeze(1)
        if n not in starts:
            starts[n] = torch.arange(n + 1, dtype=torch.int32, device=q.device)
        out = torch.empty_like(flat)
        longest = block_table.shape[1] * k.shape[1]
        flash_peer.attend(flat, k, v, out, PagedBatch(starts[n], cache_seqlens, block_table, 1, longest))
        return out.unsqueeze(1)

    module: Any = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = varlen, with_kvcache
    sys.modules["flash_attn"] = module
