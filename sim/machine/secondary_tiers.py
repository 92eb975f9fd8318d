"""Secondary tiers: what is behind the host tier, as vLLM's `secondary_tiers` says it.

Source: vllm/v1/kv_offload/tiering/factory.py and tiering/fs/manager.py (0.24).
"""

from __future__ import annotations

import json
from typing import Any

FILE_SYSTEM = "fs"
_FIELDS = ("type", "root_dir", "n_read_threads", "n_write_threads")


def read_secondary_tiers(text: str) -> tuple[dict[str, Any], ...]:
    """Reads `fs`, or a JSON list with one tier of this type. Errors: ValueError naming the field."""
    if text == FILE_SYSTEM:
        return ({"type": FILE_SYSTEM},)
    if not text.lstrip().startswith("["):
        raise ValueError('it must be fs, or a list as JSON: [{"type": "fs", "root_dir": "/cache"}]')
    tiers = json.loads(text)
    if len(tiers) != 1:
        raise ValueError(f"it has {len(tiers)} tiers; one behind the host tier is simulated")
    _check_tier(tiers[0])
    return tuple(tiers)


def _check_tier(tier: Any) -> None:
    if not isinstance(tier, dict):
        raise ValueError(f"a tier is {tier!r}; it must be an object with a type")
    if tier.get("type") != FILE_SYSTEM:
        raise ValueError(f"a tier has the type {tier.get('type')!r}; fs is simulated")
    for name in tier:
        if name not in _FIELDS:
            raise ValueError(f"a tier has the field {name!r}; a tier of the type fs has {', '.join(_FIELDS)}")
    for name in ("n_read_threads", "n_write_threads"):
        if type(tier.get(name, 1)) is not int or tier.get(name, 1) < 1:
            raise ValueError(f"{name} is {tier[name]!r}; it must be a whole number of at least 1")
