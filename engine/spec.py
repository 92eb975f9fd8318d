"""Specification of the served model: its sizes, and the rest that `config.json` defines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagecast.engine.fp8_weights import Fp8Weights, fp8_weights
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.model_facts import ModelFacts
from pagecast.sim.machine.models import model as find_facts

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class Mixtures:
    """Which layers are mixtures of experts, and whether the weights of a token's experts add up to one."""

    layers: frozenset[int] = frozenset()
    normalised: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model the engine can run. `folder` is None where only its sizes are known (random weights).

    `rope` holds `rope_type`, `rope_theta` and the parameters of its scaling; `eos_ids` end a text. `fp8`: how
    the projections are fp8; None where they are not.
    """

    facts: ModelFacts
    folder: Path | None
    norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=dict)
    eos_ids: frozenset[int] = frozenset()
    mixtures: Mixtures = Mixtures()
    fp8: Fp8Weights | None = None

    @classmethod
    def find(cls, model: str) -> ModelSpec:
        """The model in a transformers folder, or one known by name (its sizes only).

        Errors: BadInput for an unknown name, an unreadable file, or an architecture the engine can't run.
        """
        facts = find_facts(model)
        folder = Path(model).expanduser()
        if folder.is_file():
            folder = folder.parent
        if not folder.is_dir():
            _check(facts, {}, model)
            return cls(facts, None, mixtures=_mixtures(facts, {}, model), fp8=_fp8(facts, {}, model))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        _check(facts, config, str(folder / "config.json"))
        return cls(
            facts,
            folder,
            norm_eps=_norm_eps(config, str(folder / "config.json")),
            rope=_rope(config),
            eos_ids=_eos_ids(folder, config),
            mixtures=_mixtures(facts, config, str(folder / "config.json")),
            fp8=_fp8(facts, config, str(folder / "config.json")),
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer in tokens, the token itself included; None: sees everything."""
        return tuple(window or None for window in self.facts.attention.windows)


def _check(facts: ModelFacts, config: Mapping[str, Any], where: str) -> None:
    if facts.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise BadInput(f"{where}: the engine can't run model_type {facts.model_type!r}; it runs {known}")
    if facts.weight_dtype not in ("bf16", "fp16", "fp32", "fp8"):
        raise BadInput(
            f"{where}: weights are {facts.weight_dtype}; the engine runs bf16, fp16, fp32 and fp8 weights"
        )
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise BadInput(f"{where}: hidden_act is {act!r}; the engine knows silu only")


def _fp8(facts: ModelFacts, config: Mapping[str, Any], where: str) -> Fp8Weights | None:
    """How its weights are fp8; None where they are not. By name alone: in blocks."""
    if facts.weight_dtype != "fp8":
        return None
    return fp8_weights(config["quantization_config"], where) if config else Fp8Weights()


def _mixtures(facts: ModelFacts, config: Mapping[str, Any], where: str) -> Mixtures:
    """Layers with experts. A model known by name alone has them in every layer, as all such models here."""
    moe = facts.moe
    if moe is None:
        return Mixtures()
    dense = set(config.get("mlp_only_layers") or ())
    step = int(config.get("decoder_sparse_step") or 1)
    layers = frozenset(i for i in range(facts.layers) if i not in dense and (i + 1) % step == 0)
    if len(layers) != moe.layers:
        raise BadInput(f"{where}: {moe.layers} of {facts.layers} layers have experts; which is not known")
    # Mixtral always scales the weights; Qwen3 says so, and its published mixtures all do.
    normalised = facts.model_type == "mixtral" or not config or bool(config.get("norm_topk_prob", False))
    return Mixtures(layers, normalised)


def _norm_eps(config: Mapping[str, Any], where: str) -> float:
    epsilon = config.get("rms_norm_eps", 1e-6)
    if not isinstance(epsilon, int | float):
        raise BadInput(f"{where}: rms_norm_eps is {epsilon!r}; it must be a number")
    return float(epsilon)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    # Newer files have `rope_parameters`; older ones `rope_theta` beside `rope_scaling`.
    scaling = config.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        scaling = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    rope = {key: value for key, value in scaling.items() if value is not None}
    rope.setdefault("rope_theta", config.get("rope_theta") or DEFAULT_ROPE_THETA)
    rope["rope_type"] = str(rope.get("rope_type") or rope.get("type") or "default")
    return rope


def _eos_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    path = folder / "generation_config.json"
    ids = config.get("eos_token_id")
    if path.is_file():
        try:
            generation = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadInput(f"{path}: not JSON ({error})") from None
        if not isinstance(generation, dict):
            raise BadInput(f"{path}: holds no object; give one, as transformers writes it, or leave it out")
        if generation.get("eos_token_id") is not None:
            ids = generation["eos_token_id"]
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])
