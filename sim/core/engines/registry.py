"""Engines by name and version, as users choose them: `vllm@0.33`."""

from __future__ import annotations

from functools import lru_cache

from pagecast.sim.core.engines import DEFAULT_ENGINE
from pagecast.sim.core.engines.nano_vllm.profile import NANO_VLLM
from pagecast.sim.core.engines.own import OWN
from pagecast.sim.core.engines.profile import Profile
from pagecast.sim.core.engines.sglang.profile import SGLANG
from pagecast.sim.core.engines.trtllm.profile import TRTLLM
from pagecast.sim.core.engines.version_order import nearest_version
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.errors import BadInput

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (VLLM.at(DEFAULT_ENGINE.partition("@")[2]), NANO_VLLM, SGLANG, *TRTLLM)
}
ENGINES: dict[str, Profile] = {**PROFILES, "trtllm": TRTLLM[0], OWN.name: OWN}
"""What may be chosen: the profiles, TensorRT-LLM by its engine's name, and our own engine."""


@lru_cache(maxsize=64)  # a scenario asks again and again
def profile(text: str) -> Profile:
    """The rules of NAME or NAME@VERSION. Errors: BadInput with the names, or the versions, there are."""
    name, _, version = text.partition("@")
    if name not in ENGINES:
        raise BadInput(f"engine {name!r} is not known; choose one of {', '.join(ENGINES)}")
    return ENGINES[name].at(version) if version else ENGINES[name]


def engine_texts() -> list[str]:
    """All engines and versions, the newest of each first."""
    texts = [found.at(version).text for found in ENGINES.values() for version in reversed(found.known)]
    return list(dict.fromkeys(texts))


def nearest(name: str, version: str | None) -> Profile:
    """The rules of an engine in the known version nearest to one that ran. Errors: BadInput."""
    found = profile(name)
    return found.at(nearest_version(version, found.known)) if version else found
