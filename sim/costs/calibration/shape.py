"""Sizes of model, GPU and engine that the cost terms use: heads, SMs, tiles and graph sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.machine.graphs import capture_sizes
from pagecast.sim.machine.model_config import model_from_config
from pagecast.sim.machine.model_facts import ModelFacts
from pagecast.sim.machine.models import known_models
from pagecast.sim.machine.models import model as find_model

FA3 = "FlashAttention 3"
CPU = "CPU"  # the "GPU" of a run that was recorded without one


@dataclass(frozen=True, slots=True)
class TileShape:
    """How work is cut into tiles.

    `kv_heads` and `group` (query heads to one KV head) are of one GPU; `sms` its multiprocessors;
    `graph_sizes` the token counts that CUDA graphs were captured for (empty: none); `tile_schedule`
    whether attention's tiles are spread over the SMs as FlashAttention 3 does it; `prompt_graphs` whether
    steps with prompts are padded to graph sizes too (vLLM's piecewise graphs). Where they are not, prompt
    attention is a launch of its own, and steps with prompts are padded to `prompt_sizes`, of graphs for such
    steps; the kernels of larger ones are launched one by one.
    """

    kv_heads: int
    group: int
    sms: int
    graph_sizes: tuple[int, ...]
    tile_schedule: bool
    prompt_graphs: bool = True
    prompt_sizes: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON."""
        sizes = {"graph_sizes": list(self.graph_sizes), "prompt_sizes": list(self.prompt_sizes)}
        return {**asdict(self), **sizes}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> TileShape:
        """The opposite of `as_dict`."""
        sizes = {name: tuple(fields.get(name, ())) for name in ("graph_sizes", "prompt_sizes")}
        return cls(**{**fields, **sizes})

    @property
    def padded_prompts(self) -> tuple[int, ...]:
        """The token counts that steps with prompts are padded to."""
        return self.graph_sizes if self.prompt_graphs else self.prompt_sizes

    def check(self, where: str) -> None:
        """Errors: BadInput naming a field that can't be."""
        sizes = {"kv_heads": self.kv_heads, "group": self.group, "sms": self.sms}
        for name in ("graph_sizes", "prompt_sizes"):
            sizes |= {f"{name} {number}": size for number, size in enumerate(getattr(self, name))}
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise BadInput(f"{where}: {name} is {value!r}, must be a whole number of at least 1")


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
    return TileShape(
        kv_heads=kv_heads,
        group=max(1, heads // kv_heads),
        sms=_sms(meta, where),
        graph_sizes=graph_sizes(meta),
        tile_schedule=str(config.get("attention", "")).startswith(FA3),
        prompt_graphs=meta.get("engine") != "pagecast",
        prompt_sizes=tuple(sorted(config.get("prompt_graph_sizes") or ())),
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
    kind = str((described.get("architectures") or [""])[0]).removesuffix("ForCausalLM").lower()
    config = {"model_type": kind or "llama", **described}
    facts = model_from_config(config, str(meta.get("model_name") or "a model of its own"), where)
    for name in known_models():
        known = find_model(name)
        if identity(known) == identity(facts):
            return known
    return facts


def identity(facts: ModelFacts) -> dict[str, Any]:
    """The facts that step times hang on; two models that agree in them cost the same."""
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
    listed = config.get("cuda_graph_sizes")
    if isinstance(listed, list):
        return tuple(sorted(int(size) for size in listed))
    if meta.get("engine") != "vllm" or config.get("cuda_graphs") in (None, "none"):
        return ()
    return tuple(capture_sizes(int(config.get("max_num_seqs", 256))))
