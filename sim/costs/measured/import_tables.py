"""Import of NVIDIA's published operation times: one compact table per GPU and engine.

    pip download --no-deps aiconfigurator-core==0.12.0 && unzip aiconfigurator_core-*.whl
    python -m pagecast.sim.costs.measured.import_tables aiconfigurator_core/systems

The source holds parquet files `data/GPU/FAMILY/ENGINE/VERSION/OPERATION_perf.parquet` with one measured shape
per row and latencies in milliseconds. A table keeps the families that a decoder step is composed of, on a
dense grid per kernel configuration (see `packing`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pagecast.sim.costs.measured.latent import PREFIXED_TOKENS
from pagecast.sim.costs.measured.packing import pack

SOURCE = "aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0)"
# Folder of the source, and the name of that GPU here.
GPUS = {
    "a100_sxm": "A100 80GB",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
    "h100_sxm": "H100 SXM",
    "h200_sxm": "H200",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX PRO 6000",
}
# The engine's version of each table; an operation that it lacks comes from the newest older one.
VERSIONS = {"vllm": "0.24.0", "sglang": "0.5.14", "trtllm": "1.3.0rc20"}
OLDER = {"a100_sxm": {"vllm": "0.14.0", "sglang": "0.5.10", "trtllm": "1.0.0"}}


@dataclass(frozen=True)
class SourceFamily:
    """Operations of one kind: which columns tell kernels apart, and which are swept.

    `keys` and `axes` map our names to the source's columns; `only` keeps rows with one of the given values.
    `kernels`: so many, one after another, make up the operation.
    """

    folder: str
    file: str
    keys: dict[str, str]
    axes: dict[str, str]
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    kernels: int = 1


_HEADS = {
    "kv_dtype": "kv_cache_dtype",
    "heads": "num_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "window": "window_size",
}
_MLA = {"kv_dtype": "kv_cache_dtype", "gemm_dtype": "gemm_type", "heads": "num_heads"}
_SPARSE = {"architecture": "architecture", **_MLA}
_DELTA = {"key_heads": "num_k_heads", "value_heads": "num_v_heads"}
FAMILIES = {
    "gemm": SourceFamily("gemm", "gemm", {"dtype": "gemm_dtype", "n": "n", "k": "k"}, {"m": "m"}),
    "context": SourceFamily(
        "attention", "context_attention", _HEADS, {"batch": "batch_size", "tokens": "isl"}
    ),
    "decode": SourceFamily(
        "attention", "generation_attention", _HEADS, {"batch": "batch_size", "context": "step"}
    ),
    "mla_context": SourceFamily(
        "mla", "mla_context_module", _MLA, {"batch": "batch_size", "tokens": "isl"}, {"step": (0,)}
    ),
    "mla_decode": SourceFamily(
        "mla", "mla_generation_module", _MLA, {"batch": "batch_size", "context": "step"}
    ),
    "sparse_context": SourceFamily(
        "sparse_attention",
        "dsa_context_module",
        _SPARSE,
        {"batch": "batch_size", "tokens": "isl"},
        {"step": (0,)},
    ),
    "sparse_prefix": SourceFamily(
        "sparse_attention",
        "dsa_context_module",
        _SPARSE,
        {"context": "step"},
        {"batch_size": (1,), "isl": (PREFIXED_TOKENS,)},
    ),
    "sparse_decode": SourceFamily(
        "sparse_attention", "dsa_generation_module", _SPARSE, {"batch": "batch_size", "context": "step"}
    ),
    "delta_context": SourceFamily(
        "linear_attention",
        "gdn",
        _DELTA,
        {"tokens": "seq_len"},
        {"phase": ("context",), "batch_size": (1,)},
        2,
    ),
    "delta_decode": SourceFamily(
        "linear_attention", "gdn", _DELTA, {"batch": "batch_size"}, {"phase": ("generation",)}, 2
    ),
    "moe": SourceFamily(
        "moe",
        "moe",
        {
            "dtype": "moe_dtype",
            "hidden": "hidden_size",
            "inter": "inter_size",
            "active": "topk",
            "experts": "num_experts",
            "tp": "moe_tp_size",
            "ep": "moe_ep_size",
            "routing": "distribution",
        },
        {"tokens": "num_tokens"},
    ),
    "all_reduce": SourceFamily(
        "comm", "custom_allreduce", {"gpus": "num_gpus", "mode": "backend"}, {"elements": "message_size"}
    ),
}
_DEFAULTS: dict[str, Any] = {
    "window_size": 0,
    "head_dim": 128,
    "kv_cache_dtype": "bfloat16",
    "backend": "graph",
}


def main() -> int:
    """Writes a table for every GPU and engine that the source has."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("systems", type=Path, help="the folder aiconfigurator_core/systems of the wheel")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tables")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for folder, gpu in GPUS.items():
        for engine, version in VERSIONS.items():
            release = OLDER.get(folder, {}).get(engine, version)
            path = _write(options.systems / "data" / folder, gpu, engine, release, options.out)
            if path:
                sys.stdout.write(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB\n")
    return 0


def _write(source: Path, gpu: str, engine: str, version: str, out: Path) -> Path | None:
    """One table; None where the source has no matrix products of this engine on this GPU."""
    arrays: dict[str, Any] = {}
    facts: dict[str, Any] = {"gpu": gpu, "engine": engine, "version": version, "source": SOURCE}
    families: dict[str, Any] = {}
    for name, family in FAMILIES.items():
        source_file = _file(source, family, engine, version)
        if source_file is None:
            continue
        keys, axes, values = _grid(pd.read_parquet(source_file), family)
        if not keys:
            continue
        families[name] = {"version": source_file.parent.name, "keys": keys, "axes": axes}
        arrays[name] = pack(values)
    if "gemm" not in families:
        return None
    facts["families"] = families
    path = out / f"{gpu.lower().replace(' ', '-')}.{engine}.npz"
    np.savez_compressed(path, meta=np.frombuffer(json.dumps(facts).encode(), np.uint8), **arrays)
    return path


def _file(source: Path, family: SourceFamily, engine: str, version: str) -> Path | None:
    """The operation's file of the newest version that is no newer than `version`."""
    folder = source / family.folder / engine
    for each in sorted(folder.glob("*"), key=lambda path: _order(path.name), reverse=True):
        path = each / f"{family.file}_perf.parquet"
        if _order(each.name) <= _order(version) and path.is_file():
            return path
    return None


def _order(version: str) -> tuple[tuple[int, ...], float, int]:
    """Orders versions as 1.3.0rc20, 1.3.0rc20.post1, 1.3.0, 1.3.0.post1, 1.3.1.

    Errors: ValueError for another form.
    """
    parts = re.fullmatch(r"(\d+(?:\.\d+)*)(?:\.?rc(\d+))?(?:\.?post(\d+))?", version)
    if parts is None:
        raise ValueError(f"{version!r} is no version such as 1.3.0, 1.3.0rc20 or 1.3.0.post1")
    release, candidate, post = parts.groups()
    return tuple(map(int, release.split("."))), float(candidate or inf), int(post or 0)


def _grid(frame: pd.DataFrame, family: SourceFamily) -> tuple[list[list[Any]], dict[str, list[int]], Any]:
    """The configurations, the swept values, and the time in seconds of each combination (or NaN)."""
    rows: Any = frame.assign(**{name: value for name, value in _DEFAULTS.items() if name not in frame})
    for column, values in family.only.items():
        if column in frame:
            rows = rows[rows[column].isin(values)]
    if "backend" in family.keys.values():
        rows = rows.assign(backend=rows["backend"].str.rpartition("_")[2])
    if "distribution" in family.keys.values():
        rows = _routing(rows)
    keys, axes = list(family.keys.values()), list(family.axes.values())
    if "kernel_source" in rows:  # layers that use an earlier layer's choice of tokens are not told apart
        rows = rows[~rows["kernel_source"].astype(str).str.contains("skip_indexer")]
    if family.kernels > 1:
        rows = rows.groupby([*keys, *axes, "kernel_source"], as_index=False)["latency"].min()
        whole = rows.groupby([*keys, *axes])["latency"].transform("size") == family.kernels
        rows = rows[whole].groupby([*keys, *axes], as_index=False)["latency"].sum()
    rows = rows.groupby([*keys, *axes], as_index=False)["latency"].min()
    configurations = rows[keys].drop_duplicates().sort_values(keys)
    swept = [sorted(rows[column].unique()) for column in axes]
    index = pd.MultiIndex.from_frame(configurations)
    at = [index.get_indexer(pd.MultiIndex.from_frame(rows[keys]))]
    at += [np.searchsorted(values, rows[column]) for column, values in zip(axes, swept, strict=True)]
    times = np.full((len(index), *map(len, swept)), np.nan)
    times[tuple(at)] = rows["latency"].to_numpy() / 1e3
    shapes = [[_plain(value) for value in row] for row in configurations.itertuples(index=False)]
    grids = {name: [int(value) for value in values] for name, values in zip(family.axes, swept, strict=True)}
    return shapes, grids, times


def _routing(rows: Any) -> Any:
    """Routing as `balanced` or `skewed`: the steeper power law where the source has both."""
    steepest = max(rows["distribution"])
    two_kinds = rows[rows["distribution"].isin(("balanced", steepest))]
    return two_kinds.assign(
        distribution=np.where(two_kinds["distribution"] == "balanced", "balanced", "skewed")
    )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


if __name__ == "__main__":
    raise SystemExit(main())
