"""Table of model configurations: what pagecast makes of each, beside what the engine and transformers say.

    python tests/benchmarks/model_sizes.py FOLDER [--markdown] [--draft-tokens N]

FOLDER has one folder for each model, called ORGANISATION--NAME, with its `config.json` (and
`hf_quant_config.json`). Run it where vLLM 0.33 and transformers 5.24 can be imported, on any CPU. Per model:

- bytes of a token's caches, the groups of layers and the bytes of a block, by vLLM's own classes and its own
  planning code (`engine_specs.py`);
- parameters of the model that transformers builds without memory (PyTorch's meta device), weighed with the
  formats of the checkpoint's description by a reader of its own.

`--draft-tokens`: with the checkpoint's draft layers loaded and so many tokens drafted; weights are left out
then.

`not compared`: transformers does not know the model, so that its weights stand unchecked.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from engine_specs import groups_of, specs_of, token_bytes
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.block_layout import model_layout
from pagecast.sim.machine.drafting import holding_states, with_draft_layers
from pagecast.sim.machine.model_facts import ModelFacts
from pagecast.sim.machine.models import model

GIB = 1 << 30
_MODEL_TYPES = {
    "kimi_k2": "deepseek_v3",
    "minimax_m3": "minimax_m3_vl",
    "mimo": "qwen2",
    "deepseek_ref": "deepseek_v4",
}
_BITS = {"FP8": 8, "NVFP4": 4.5, "W4A16_NVFP4": 4.5, "MXFP8": 8.25, "MXFP4": 4.25, "fp4": 4.25}
_KINDS = {
    "FullAttentionSpec": "full_attention",
    "MLAAttentionSpec": "mla_attention",
    "SlidingWindowSpec": "sliding_window",
    "SlidingWindowMLASpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local_attention",
    "MambaSpec": "mamba",
    "CircularBufferSpec": "mamba",
}


class Row(NamedTuple):
    """One model: pagecast's figures, and how far the independent ones are from them in percent."""

    name: str
    params: float = 0.0
    weights_gib: float = 0.0
    weights_error: float | None = None
    token_bytes: int = 0
    token_error: float | None = None
    groups: str = ""
    refused: str = ""


def main() -> int:
    """Prints the table, and how many rows are off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--draft-tokens", type=int, default=0)
    asked = parser.parse_args()
    drafts = asked.draft_tokens
    rows = [
        row(folder, drafts) for folder in sorted(asked.folder.iterdir()) if (folder / "config.json").exists()
    ]
    print("\n".join(markdown(rows) if asked.markdown else (str(each) for each in rows)))
    off = [each.name for each in rows if is_off(each)]
    print(
        f"{len(rows)} models, {sum(bool(each.refused) for each in rows)} refused, off: {off}", file=sys.stderr
    )
    return 1 if off else 0


def is_off(each: Row) -> bool:
    """Whether a figure is more than 3% off, or the groups differ."""
    if each.refused:
        return False
    return "differ" in each.groups or any(
        abs(e) > 3 for e in (each.weights_error, each.token_error) if e is not None
    )


def row(folder: Path, draft_tokens: int = 0) -> Row:
    """The row of the model in a folder."""
    name = folder.name.replace("--", "/")
    config = json.loads((folder / "config.json").read_text())
    beside = folder / "hf_quant_config.json"
    scheme = json.loads(beside.read_text()) if beside.exists() else None
    try:
        facts = model(str(folder))
    except BadInput as error:
        return Row(name, refused=str(error).removeprefix(f"{folder}/config.json: "))
    if draft_tokens:
        facts = holding_states(with_draft_layers(facts), draft_tokens, 0)
    dtype = "auto" if facts.attention.compressed else "bf16"
    specs = specs_of(config, draft_tokens)
    there = token_bytes(specs)
    weights = None if draft_tokens else meta_bytes(config, scheme)
    return Row(
        name,
        facts.params / 1e9,
        facts.weight_bytes() / GIB,
        None if weights is None else 100 * (facts.weight_bytes() / weights - 1),
        facts.kv_bytes_per_token(dtype),
        100 * (facts.kv_bytes_per_token(dtype) / there - 1),
        _groups(facts, specs, dtype),
    )


def _groups(facts: ModelFacts, specs: dict[str, Any], dtype: str) -> str:
    """How many groups, and whether vLLM's planning makes the same of the same size."""
    layout = model_layout(facts, 16, kv_cache_dtype=dtype)
    own = sorted((spec.kind.value, spec.block_size) for spec in layout.specs)
    engine, block_bytes = groups_of(specs)
    same = (
        own == sorted((_KINDS[name], size) for name, size, _ in engine) and block_bytes == layout.block_bytes
    )
    return f"{len(own)}{'' if same else ' differ'}"


def markdown(rows: list[Row]) -> list[str]:
    """The table of the documentation."""
    lines = [
        "| model | parameters, 10^9 | weights, GiB | error | bytes per token | error | groups |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        if each.refused:
            lines.append(f"| {each.name} | refused: {each.refused} | | | | | |")
            continue
        weights, token = (
            "not compared" if error is None else f"{error + 0.0:.1f}%".replace("-0.0", "0.0")
            for error in (each.weights_error, each.token_error)
        )
        lines.append(
            f"| {each.name} | {each.params:,.1f} | {each.weights_gib:,.1f} | {weights} "
            f"| {each.token_bytes:,} | {token} | {each.groups} |"
        )
    return lines


# -- weights by transformers, and by a reader of checkpoints' descriptions that is not pagecast's


def meta_bytes(config: dict[str, Any], beside: dict[str, Any] | None) -> float | None:
    """Bytes of the parameters that transformers makes; None where it does not know the model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    plain = json.loads(json.dumps(config))
    for part in (plain, plain.get("text_config") or {}):
        part.pop("quantization_config", None)
        part.pop("auto_map", None)
        part["model_type"] = _MODEL_TYPES.get(part.get("model_type"), part.get("model_type"))
    if plain["model_type"] == "minimax_m3_vl" and "text_config" not in plain:
        plain = {"model_type": "minimax_m3_vl", "text_config": {**plain, "model_type": "minimax_m3_vl_text"}}
    if plain["model_type"] not in CONFIG_MAPPING:
        return None
    whole = CONFIG_MAPPING[plain["model_type"]].from_dict(plain)
    made = None
    for kind in (AutoModelForImageTextToText, AutoModelForCausalLM):
        try:
            with torch.device("meta"):
                made = kind.from_config(whole)
            break
        except ValueError:
            continue
    if made is None:
        return None
    towers = "vision_config" in config
    bits_of = _scheme(config, beside)
    total = 0.0
    for name, parameter in made.named_parameters():
        if not towers and re.search(r"visi|visual|projector", name):
            continue  # made of transformers' own defaults
        total += parameter.numel() * bits_of(name, parameter.dim()) / 8
    return total


def _scheme(config: dict[str, Any], beside: dict[str, Any] | None) -> Any:
    """Bits of a parameter by its name in transformers."""
    scheme = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if scheme is None and beside is not None:
        scheme = beside.get("quantization", beside)
    if scheme is None:
        return lambda name, dims: 16
    listed = scheme.get("quantized_layers") or {}
    left_out = [
        each
        for key in ("ignore", "exclude_modules", "modules_to_not_convert")
        for each in scheme.get(key) or []
        if not (listed and scheme.get("quant_method") == "fp8")
    ]
    base = _bits(scheme)
    short = {_short(name): _BITS[each["quant_algo"]] for name, each in listed.items() if "mtp" not in name}
    expert = config.get("expert_dtype")
    plain = {_short(each) for each in left_out if not each.startswith("re:") and "mtp" not in each}

    def bits(name: str, dims: int) -> float:
        if dims < 2 or re.search(
            r"embed|lm_head|norm|conv|router|visi|visual|projector|compressor\.(kv|gate)", name
        ):
            return 16
        if re.search(r"mlp\.gate\.|mixer\.gate\.|weights_proj|position_bias|_hc\.|hc_head|sinks", name):
            return 32 if "hc" in name else 16
        spelled = _spellings(name)
        if listed:
            for each in spelled:
                for key in (each, each.rsplit(".", 1)[0]):
                    if key in short:
                        return short[key]
            return base if scheme.get("quant_method") == "fp8" else 16
        if any(_named(each, plain, left_out) for each in spelled):
            return 16
        if "experts" in name and "shared" not in name and expert:
            return _BITS[expert]
        if scheme.get("quant_method") == "mxfp4" and "experts" not in name:
            return 16
        return base

    return bits


def _bits(scheme: dict[str, Any]) -> float:
    groups = scheme.get("config_groups")
    if groups and scheme.get("quant_method") != "fp8":
        weights = next(iter(groups.values()))["weights"]
        size = weights.get("group_size")
        if weights["num_bits"] == 4:
            extra = {("float", 16): 0.5, ("float", 32): 0.25}.get((weights["type"], size))
            return 4 + (16 / size if extra is None else extra)
        return 8
    if scheme.get("quant_method") == "mxfp4":
        return 4.25
    return _BITS.get(scheme.get("quant_algo") or "FP8", 8)


def _short(name: str) -> str:
    """A module's name from its layer on."""
    found = re.search(r"layers\.([\d*]+.*)", name)
    return found[1] if found else name


def _spellings(name: str) -> list[str]:
    """Names that checkpoints give to a parameter of transformers' model."""
    short = _short(name).removesuffix(".weight")
    names = [short]
    if "experts." in short and "shared" not in short:
        before, after = short.split("experts.", 1)
        part = {"gate_up_proj": "gate_proj", "up_proj": "up_proj"}.get(after, after)
        names += [f"{before}experts.0.{part}", f"{before}experts.0.{'w2' if 'down' in part else 'w1'}"]
    names += [each.replace("mlp.", "block_sparse_moe.") for each in names]
    names += [each.replace("mlp.", "ffn.").replace("self_attn.", "attn.") for each in names]
    names += [each.replace("gate_up_proj", "gate_proj") for each in names]
    names += [each.replace("forget_gate.", "") for each in names]
    return [*names, *(each.rsplit(".", 1)[0] for each in names if "experts" in each)]


def _named(name: str, plain: set[str], left_out: list[str]) -> bool:
    above = {name, *(name[: match.start()] for match in re.finditer(r"\.", name))}
    if above & plain or set(name.split(".")) & plain:
        return True
    for each in left_out:
        if each.startswith("re:"):
            if any(re.match(each[3:], f"{before}layers.{name}") for before in ("", "model.")):
                return True
        elif "*" in each and "mtp" not in each and fnmatch.fnmatch(name, _short(each).rstrip("*") + "*"):
            return True
    return False


if __name__ == "__main__":
    raise SystemExit(main())
