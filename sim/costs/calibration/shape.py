"""Shape of a recorded run: the sizes of its model, GPU and engine, from its `meta.json`."""

from __future__ import annotations

from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.families.paged_triton import PAGED_TRITON
from pagecast.sim.costs.families.registry import family_of
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.machine.graphs import capture_sizes
from pagecast.sim.machine.model_config import model_from_config
from pagecast.sim.machine.model_facts import ModelFacts
from pagecast.sim.machine.models import known_models, recorded_config
from pagecast.sim.machine.models import model as find_model

CPU = "CPU"  # the "GPU" of a run that was recorded without one


def shape_of(meta: dict[str, Any], where: str) -> TileShape:
    """The shape that a run's `meta.json` describes. Errors: BadInput naming what it lacks."""
    facts = model_of(meta, where)
    config = meta.get("config", {})
    tp = int(config.get("tensor_parallel_size", 1))
    kv_heads = facts.local_kv_heads(tp)
    try:
        facts.kv_element_bytes(str(config.get("kv_cache_dtype") or "auto"))
    except BadInput as error:
        raise BadInput(f"{where}: config: {error}") from None
    heads = max(1, facts.attention.heads // tp)
    kernels = family_of(str(meta.get("engine")), str(config.get("attention", "")))
    sizes = graph_sizes(meta)
    own = tuple(sorted(config.get("prompt_graph_sizes") or ()))
    return TileShape(
        family=kernels.name,
        kv_heads=kv_heads,
        group=max(1, heads // kv_heads),
        sms=_sms(meta, where),
        graph_sizes=sizes,
        prompt_sizes=own if kernels is PAGED_TRITON else sizes,
    )


def _sms(meta: dict[str, Any], where: str) -> int:
    """Multiprocessors of the GPU that a run names. Errors: BadInput."""
    if not isinstance(meta.get("gpu"), str):
        raise BadInput(f"{where}: 'gpu' is {meta.get('gpu')!r}, must name the GPU")
    if meta["gpu"] == CPU:
        return 1
    try:
        return find_gpu(meta["gpu"]).sms
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def model_of(meta: dict[str, Any], where: str) -> ModelFacts:
    """The model of a run: the known one of that shape, or one of its own. Errors: BadInput."""
    described = meta.get("model")
    if isinstance(described, str) and described in known_models():
        return find_model(described)
    if not isinstance(described, dict):
        raise BadInput(f"{where}: 'model' must hold the model's config.json")
    facts = model_from_config(
        recorded_config(described), str(meta.get("model_name") or "a model of its own"), where
    )
    for name in known_models():
        listed_model = find_model(name)
        if identity(listed_model) == identity(facts):
            return listed_model
    return facts


def identity(facts: ModelFacts) -> dict[str, Any]:
    """The facts that step times depend on. Two models with equal facts have equal step costs."""
    a = facts.attention
    return {
        "hidden": facts.hidden,
        "layers": facts.layers,
        "intermediate": facts.intermediate,
        "heads": a.heads,
        "kv_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "vocab": facts.vocab,
        "weight_dtype": facts.weight_dtype,
        "experts": facts.moe.experts if facts.moe else 0,
    }


def graph_sizes(meta: dict[str, Any]) -> tuple[int, ...]:
    """Token counts a step is padded to: as recorded in `config.cuda_graph_sizes`, or vLLM's defaults."""
    config = meta.get("config", {})
    sizes = config.get("cuda_graph_sizes")
    if isinstance(sizes, list):
        return tuple(sorted(int(size) for size in sizes))
    if meta.get("engine") != "vllm" or config.get("cuda_graphs") in (None, "none"):
        return ()
    return tuple(capture_sizes(int(config.get("max_num_seqs", 256))))
