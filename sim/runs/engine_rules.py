"""The rules that a recorded run's engine followed, by its `meta.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagecast.sim.core.engines.profile import Profile
from pagecast.sim.core.engines.registry import ENGINES, nearest, profile


def rules_of_run(meta: Mapping[str, Any]) -> Profile:
    """Those that it names as `profile`; else its engine's, of the known version nearest to the recorded one.

    A run that names no engine that is known is taken for the default version of vLLM. Errors: BadInput.
    """
    named = meta.get("profile") or meta.get("config", {}).get("profile")
    if named:
        return profile(str(named))
    engine, version = meta.get("engine"), meta.get("engine_version")
    return nearest(str(engine), str(version or "")) if engine in ENGINES else profile("vllm")
