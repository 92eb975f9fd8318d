"""The profiles of all engines, by name."""

from __future__ import annotations

from pagecast.sim.core.engines.nano_vllm.profile import NANO_VLLM
from pagecast.sim.core.engines.profile import Profile
from pagecast.sim.core.engines.sglang.profile import SGLANG
from pagecast.sim.core.engines.trtllm.profile import TRTLLM
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.errors import BadInput

PROFILES: dict[str, Profile] = {profile.name: profile for profile in (VLLM, NANO_VLLM, SGLANG, *TRTLLM)}


def profile(name: str) -> Profile:
    """The profile of that name. Errors: BadInput, with the names there are."""
    try:
        return PROFILES[name]
    except KeyError:
        raise BadInput(f"profile {name!r} is not known; choose one of {', '.join(PROFILES)}") from None
