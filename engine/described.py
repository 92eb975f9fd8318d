"""Facts of the engine in a recorded run: model, GPU, versions, and the options that step times depend on."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pagecast import __version__
from pagecast.engine.ngram import lookup_lengths
from pagecast.engine.spec import ModelSpec
from pagecast.kernels.code_digest import code_digest

if TYPE_CHECKING:
    from pagecast.engine.engine import Engine

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_DRIVER = Path("/proc/driver/nvidia/version")


def described(engine: Engine) -> dict[str, Any]:
    """Fields of `meta.json` that are the engine's own, whatever it serves."""
    loaded, limits = engine.loaded, engine.limits
    on_gpu = loaded.device.type == "cuda"
    return {
        "engine": "pagecast",
        "engine_version": __version__,
        "gpu": torch.cuda.get_device_name(loaded.device) if on_gpu else "CPU",
        "gpu_id": gpu_id(loaded.device) if on_gpu else None,
        "driver": driver() if on_gpu else None,
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "kernels": code_digest() if on_gpu else None,
        "model": model_config(loaded.spec),
        "model_name": loaded.spec.facts.name,
        "weights": "random" if loaded.options.random_weights else "as published",
        "usable_blocks": limits.num_blocks,
        "end_s": "when the step was committed and its tokens handed out",
        "config": {
            "tensor_parallel_size": engine.options.tensor_parallel_size,
            **_sharing(engine),
            **limits.options(),
            "attention": loaded.backend,
            "cuda_graph_sizes": engine.loop.runner.batches.graphs,
            "prompt_graph_sizes": engine.loop.runner.batches.prompt_graphs,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            **({"kv_cache_dtype": engine.options.kv_cache_dtype} if engine.options.fp8_kv else {}),
            "enforce_eager": engine.options.enforce_eager,
            "gpu_memory_utilization": engine.options.gpu_memory_utilization,
            "num_blocks": engine.options.num_blocks,
            **_speculation(engine),
            **_host_tier(engine),
        },
    }


def _sharing(engine: Engine) -> dict[str, Any]:
    """How several GPUs share the model; nothing for one."""
    shard = engine.loaded.model.shard
    return {} if shard.size == 1 else {"enable_expert_parallel": shard.by_expert, "all_reduce": shard.kind}


def model_config(spec: ModelSpec) -> dict[str, Any]:
    """A model's sizes in the words of its `config.json`."""
    facts = spec.facts
    a = facts.attention
    return {
        "model_type": facts.model_type,
        "hidden_size": facts.hidden,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "intermediate_size": facts.intermediate,
        "vocab_size": facts.vocab,
        "max_position_embeddings": facts.max_position,
        "tie_word_embeddings": facts.tied,
        "dtype": _DTYPES.get(facts.dtype, facts.dtype),
        **({"quantization_config": {"quant_method": "fp8"}} if spec.fp8 else {}),
        **_experts(spec),
    }


def _speculation(engine: Engine) -> dict[str, Any]:
    """How its requests speculate; nothing where they do not."""
    config = engine.options.speculation
    if config is None:
        return {}
    shortest, longest = lookup_lengths(config)
    bounds = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    return {"speculative_config": {**config.model_dump(mode="json", exclude_defaults=True), **bounds}}


def _host_tier(engine: Engine) -> dict[str, Any]:
    """Its host tier in vLLM's words, and the blocks that it has room for; nothing where there is none."""
    host = engine.limits.host
    if host is None:
        return {}
    return {"kv_offloading_size": engine.options.kv_offloading_size, "kv_offloading": host.recorded()}


def _experts(spec: ModelSpec) -> dict[str, Any]:
    """The sizes of its mixtures of experts; nothing for a dense model."""
    moe = spec.facts.moe
    if moe is None:
        return {}
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.active,
        "moe_intermediate_size": moe.intermediate,
        "mlp_only_layers": sorted(set(range(spec.facts.layers)) - spec.mixtures.layers),
        "norm_topk_prob": spec.mixtures.normalised,
    }


def gpu_id(device: torch.device) -> str | None:
    """Tells one GPU from others of its type: the beginning of its UUID; None where the driver hides it."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return str(uuid).removeprefix("GPU-")[:8] if uuid else None


@cache
def driver() -> str | None:
    """The NVIDIA driver's version; None where nobody tells."""
    if _DRIVER.is_file():
        words = _DRIVER.read_text(encoding="utf-8").split()
        return next((word for word in words if word.count(".") and word[0].isdigit()), None)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        fields = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return fields[0] if fields else None


@cache
def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
