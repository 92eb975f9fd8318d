"""Profiles: bundles of rules that make the scheduler behave as a known engine does."""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.core.errors import BadInput


@dataclass(frozen=True)
class Profile:
    """How an engine schedules and caches.

    `mixed`: prompts and decodes share a step (chunked prefill); otherwise a step is one or the other.
    `publish_at_schedule`: full blocks can be found from the plan that computes them on; otherwise from
    its commit. `unfindable_first`: freed blocks without published content are reused before all others.
    `whole_prompt`: admission allocates the whole known sequence at once, not chunk by chunk.
    """

    name: str
    mixed: bool
    publish_at_schedule: bool
    unfindable_first: bool
    whole_prompt: bool
    summary: str


VLLM = Profile(
    name="vllm",
    mixed=True,
    publish_at_schedule=True,
    unfindable_first=True,
    whole_prompt=False,
    summary="vLLM v1 (0.24 to 0.33): chunked prefill in mixed batches, running requests first, "
    "preemption by recompute, newest first",
)
NANO_VLLM = Profile(
    name="nano-vllm",
    mixed=False,
    publish_at_schedule=False,
    unfindable_first=False,
    whole_prompt=True,
    summary="nano-vLLM: a step prefills or decodes; waiting prompts go first; blocks are published "
    "when their step is committed",
)
PROFILES = {profile.name: profile for profile in (VLLM, NANO_VLLM)}


def profile(name: str) -> Profile:
    """The profile of that name. Errors: BadInput, with the names there are."""
    try:
        return PROFILES[name]
    except KeyError:
        raise BadInput(f"profile {name!r} is not known; choose one of {', '.join(PROFILES)}") from None
