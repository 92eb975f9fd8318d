"""Models by name or folder: a table of common models, or any transformers `config.json`.

`model("Qwen/Qwen3-8B")`, `model("llama-3.1-8b-instruct")`, `model("./my-model")` or
`model("./my-model/config.json")`. The table (`models.json`) holds the same fields as `config.json`, so
there is one way from either to a `ModelFacts`.

    >>> from pagecast.sim.machine.models import model
    >>> model("qwen3-8b").name, model("qwen3-8b").layers
    ('Qwen/Qwen3-8B', 36)
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.documents import read_json
from pagecast.sim.machine.drafting import draft_bytes
from pagecast.sim.machine.model_config import model_from_config
from pagecast.sim.machine.model_facts import ModelFacts

__all__ = ["ModelFacts", "known_models", "model"]

_MOST_BYTES = 32 << 20
_FOLDER_HINT = "give a folder that holds the model's config.json"
_QUANTISED = {
    "fp8": "fp8",
    "fp8-dynamic": "fp8",
    "awq": "int4",
    "gptq": "int4",
    "gptq-int4": "int4",
    "gptq-int8": "int8",
    "int4": "int4",
    "int8": "int8",
    "w4a16": "int4",
    "w8a8": "int8",
    "fp4": "nvfp4",
    "quantized.w4a16": "int4",
    "quantized.w8a16": "int8",
    "quantized.w8a8": "int8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
}


def model(name: str, *, assume_dense: bool = False) -> ModelFacts:
    """The model called `name`, or the one whose `config.json` (or its folder) lies at that path.

    Of a folder, `hf_quant_config.json` and the size in `model.safetensors.index.json` count too. A recorded
    run's `meta.json` may stand for the `config.json` that it holds. `assume_dense`: fields that matter and
    that pagecast does not know are left out with a note.

    A name may leave out the organisation and fine-tune endings (`-Instruct`, `-it`), and may end in a
    weight format (`-FP8`, `-AWQ`, `-GPTQ-Int4`). Errors: `BadInput` for an unknown name, with the nearest
    ones, and for a file that can't be read, naming the field.
    """
    path, is_folder = _as_path(name)
    if is_folder or path.suffix == ".json":
        return _from_file(path / "config.json" if is_folder else path, assume_dense)
    match = _lookup(name)
    if match is not None:
        return match
    plain, dtype = _split_format(name.lower())
    facts = _lookup(plain) if dtype else None
    if facts is not None and dtype:
        return _in_format(facts, name, dtype)
    raise BadInput(f"unknown model {name!r}; {_nearest(name)}")


def _in_format(facts: ModelFacts, name: str, dtype: str) -> ModelFacts:
    """The model with all of its matrices in `dtype`, which is a guess where checkpoints leave some out."""
    notes = facts.notes
    if dtype not in ("fp8", "int8"):
        notes += (
            f"all matrices are taken to be in {dtype}: checkpoints often leave attention and others out; "
            "give the checkpoint's folder",
        )
    return replace(facts, name=name, weight_dtype=dtype, quantized="all", weight_bits=(), notes=notes)


def recorded_config(described: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of a model as a recorded run's `meta.json` describes it, with a `model_type`."""
    kind = str((described.get("architectures") or [""])[0]).removesuffix("ForCausalLM").lower()
    return {"model_type": kind or "llama", **described}


def _as_path(name: str) -> tuple[Path, bool]:
    """`name` as a path, and whether a folder lies there."""
    try:
        path = Path(name).expanduser()
        return path, path.is_dir()
    except (RuntimeError, OSError, ValueError) as error:  # no such home, too long, a zero byte
        raise BadInput(f"model {name[:200]!r}: no usable path ({error}); {_FOLDER_HINT}") from None


def known_models() -> tuple[str, ...]:
    """Names of the table of common models."""
    return tuple(_table())


def _lookup(name: str) -> ModelFacts | None:
    for key in (_key(name), _key(_untuned(name))):
        listed_name = _keys().get(key)
        if listed_name is not None:
            return _facts(listed_name)
    return None


@cache
def _facts(name: str) -> ModelFacts:
    return model_from_config(_table()[name], name, f"table of models, {name}")


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = files("pagecast.sim.machine").joinpath("models.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


@cache
def _keys() -> dict[str, str]:
    keys: dict[str, str] = {}
    for name in _table():
        for spelling in (name, _untuned(name)):
            keys.setdefault(_key(spelling), name)
    return keys


def _key(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "", name.lower().rsplit("/", 1)[-1])
    return plain.removeprefix("meta").removeprefix("nvidia")


def _untuned(name: str) -> str:
    """`name` without its organisation and fine-tune endings, wherever these stand."""
    plain = name.lower().rsplit("/", 1)[-1]
    return re.sub(r"[-_](instruct|chat|it|hf|base|pt|thinking|bf16)(?=[-_]|$)", "", plain)


def _split_format(name: str) -> tuple[str, str | None]:
    for ending in sorted(_QUANTISED, key=len, reverse=True):
        if name.endswith(("-" + ending, "_" + ending)):
            return name[: -len(ending) - 1], _QUANTISED[ending]
    return name, None


def _nearest(name: str) -> str:
    close = get_close_matches(_key(_untuned(name)), _keys(), n=6, cutoff=0.55)
    near = list(dict.fromkeys(_keys()[key] for key in close))[:3]
    return (f"nearest: {', '.join(near)}; or " if near else "") + _FOLDER_HINT


def _from_file(path: Path, assume_dense: bool) -> ModelFacts:
    config = read_json(path, _MOST_BYTES, "give a transformers config.json or its folder")
    if not isinstance(config, dict):
        raise BadInput(f"{path}: holds a {type(config).__name__}, not an object; give a config.json")
    if isinstance(config.get("model"), dict):
        config = recorded_config(config["model"])
    facts = model_from_config(
        config,
        path.parent.name or path.stem,
        str(path),
        quantization=_beside(path, "hf_quant_config.json"),
        assume_dense=assume_dense,
    )
    return _sized_by_index(facts, path)


def _beside(path: Path, name: str) -> dict[str, Any] | None:
    """What a file beside `path` holds; None where there is none."""
    other = path.parent / name
    if path.name != "config.json" or not other.is_file():
        return None
    content = read_json(other, _MOST_BYTES, "it comes with the checkpoint")
    if not isinstance(content, dict):
        raise BadInput(
            f"{other}: holds a {type(content).__name__}, not an object; it comes with the checkpoint"
        )
    return content


def _sized_by_index(facts: ModelFacts, path: Path) -> ModelFacts:
    """The model with the checkpoint's size, where its index says it."""
    index = _beside(path, "model.safetensors.index.json")
    metadata = index.get("metadata") if index else None
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if index is None or size is None:
        return facts
    if isinstance(size, bool) or not isinstance(size, (int, float)) or size <= 0:
        raise BadInput(f"{path.parent / 'model.safetensors.index.json'}: metadata.total_size must be above 0")
    names = index.get("weight_map")
    if not isinstance(names, dict) or not any(_is_draft(name, facts.layers) for name in names):
        return replace(facts, checkpoint_bytes=int(size))
    if facts.draft_layers:
        return replace(facts, checkpoint_bytes=int(size) - draft_bytes(facts))
    note = "the checkpoint has draft layers, which count as loaded: engines load them only to draft"
    return replace(facts, checkpoint_bytes=int(size), notes=(*facts.notes, note))


def _is_draft(name: str, layers: int) -> bool:
    match = re.search(r"(^|\.)mtp\.|(?:^|\.)(?:model|language_model)\.layers\.(\d+)\.", name)
    return match is not None and (match[2] is None or int(match[2]) >= layers)
