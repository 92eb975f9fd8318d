"""KV groups of a recorded run, as its `meta.json` lists them."""

from __future__ import annotations

from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import GroupSpec, KvKind
from pagecast.sim.runs.recorded import RecordedRun

_FIELDS = ("block_size", "window", "chunk", "latent", "state")


def recorded_groups(run: RecordedRun) -> tuple[GroupSpec, ...]:
    """The groups under `kv_groups`; none where it is absent, or one group keeps every token.

    Each is an object with perhaps a `block_size` (the engine's where absent), a `window` or a `chunk` in
    tokens, `latent` or `state`. Errors: BadInput naming the entry at fault.
    """
    listed = run.meta.get("kv_groups")
    if listed is None:
        return ()
    where = f"{run.folder}/meta.json: kv_groups"
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise BadInput(f"{where} is {str(listed)[:60]!r}, must be a list of objects")
    size = run.meta.get("config", {}).get("block_size")
    groups = tuple(_group(one, size, f"{where}[{number}]") for number, one in enumerate(listed))
    return () if groups == (GroupSpec(KvKind.FULL, size),) else groups


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
        return GroupSpec(KvKind.STATE, size)
    if window and chunk:
        raise BadInput(f"{where}: has a window and a chunk; give one of them")
    if window or chunk:
        return GroupSpec(KvKind.WINDOW if window else KvKind.CHUNK, size, window or chunk)
    return GroupSpec(KvKind.LATENT if fields.get("latent") else KvKind.FULL, size)
