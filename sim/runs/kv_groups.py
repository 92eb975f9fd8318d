"""KV groups of a recorded run, as its `meta.json` lists them or as they follow from its model."""

from __future__ import annotations

from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import GroupSpec, KvKind
from pagecast.sim.costs.calibration.shape import model_of
from pagecast.sim.machine.block_layout import model_layout
from pagecast.sim.runs.recorded import RecordedRun

_FIELDS = ("block_size", "window", "chunk", "latent", "state", "exported", "drafts")


def recorded_groups(run: RecordedRun) -> tuple[GroupSpec, ...]:
    """The groups under `kv_groups`; where it is absent, those that vLLM makes of the model's layers.

    Empty: one group keeps every token. Each entry is an object with perhaps a `block_size` (the engine's
    where absent), a `window` or a `chunk` in tokens, `latent` or `state`, and `drafts` where it has the
    drafter's layers (`drafter_groups`). Errors: BadInput naming the entry at fault.
    """
    entries = run.meta.get("kv_groups")
    if entries is None:
        return _groups_of_model(run)
    where = f"{run.folder}/meta.json: kv_groups"
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise BadInput(f"{where} is {str(entries)[:60]!r}, must be a list of objects")
    config = run.meta.get("config", {})
    size = config.get("block_size")
    groups = tuple(_group(one, size, f"{where}[{number}]") for number, one in enumerate(entries))
    if config.get("enable_prefix_caching"):
        drafts = (config.get("speculative_config") or {}).get("num_speculative_tokens", 0)
        groups = tuple(
            GroupSpec.checkpoints(group.block_size, drafts, group.exported)
            if group.kind is KvKind.STATE
            else group
            for group in groups
        )
    return () if groups == (GroupSpec(KvKind.FULL, size),) else groups


def drafter_groups(run: RecordedRun) -> tuple[int, ...]:
    """The numbers of the groups that have the drafter's layers; the groups are known to be right."""
    entries = run.meta.get("kv_groups") or ()
    return tuple(number for number, fields in enumerate(entries) if fields.get("drafts"))


def _groups_of_model(run: RecordedRun) -> tuple[GroupSpec, ...]:
    config = run.meta.get("config", {})
    if run.meta.get("engine") != "vllm" or not isinstance(run.meta.get("model"), dict | str):
        return ()
    layout = model_layout(
        model_of(run.meta, f"{run.folder}/meta.json"),
        int(config.get("block_size", 16)),
        tensor_parallel_size=int(config.get("tensor_parallel_size", 1)),
        kv_cache_dtype=str(config.get("kv_cache_dtype") or "auto"),
        disable_hybrid_kv_cache_manager=bool(config.get("disable_hybrid_kv_cache_manager", False)),
    )
    return () if layout.plain else layout.specs


def _group(fields: dict[str, Any], block_size: int, where: str) -> GroupSpec:
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        raise BadInput(f"{where}: {unknown[0]!r} is not known; fields are {', '.join(_FIELDS)}")

    def whole(name: str, default: int) -> int:
        value = fields.get(name)
        if value is None:
            return default
        if type(value) is not int or value < 1:
            raise BadInput(f"{where}: {name!r} is {value!r}, must be a whole number of at least 1")
        return value

    size, window, chunk = whole("block_size", block_size), whole("window", 0), whole("chunk", 0)
    if fields.get("state"):
        return GroupSpec(KvKind.STATE, size, exported=whole("exported", 0))
    if window and chunk:
        raise BadInput(f"{where}: has a window and a chunk; give one of them")
    if window or chunk:
        return GroupSpec(KvKind.WINDOW if window else KvKind.CHUNK, size, window or chunk)
    return GroupSpec(KvKind.LATENT if fields.get("latent") else KvKind.FULL, size)
