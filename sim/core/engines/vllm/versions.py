"""vLLM's rules by version: what changed in its decisions since 0.24, and the version that changed it.

Source: vllm/v1/core and vllm/config/vllm.py of the versions below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagecast.sim.core.drafter import DraftingRules
from pagecast.sim.core.memory.window_rules import WindowRules


@dataclass(frozen=True)
class VllmRules(DraftingRules, WindowRules):
    """Where versions decide otherwise, beside `DraftingRules` and `WindowRules`; the defaults are 0.24's.

    `skips_after_idle_victim`: under the policy priority, a victim that had no tokens in this step makes the
    running pass skip the request that comes next. `goes_on_after_own_preemption`: a request that preempted
    itself does not end the running pass. `counts_running_adapters`: the adapters of all running requests
    count against `max_loras`, also of those that sit the step out. `passed_over_stay_ahead`: requests that
    were passed over stay ahead of those preempted later. `clips_max_tokens`: the server lowers a `max_tokens`
    beyond the model's length (renderers/params.py); before, it refuses the request.
    """

    skips_after_idle_victim: bool = True
    goes_on_after_own_preemption: bool = False
    counts_running_adapters: bool = False
    passed_over_stay_ahead: bool = True
    clips_max_tokens: bool = False


OLDEST = VllmRules()
# Each version with what it changed.
_CHANGES: tuple[tuple[str, dict[str, bool]], ...] = (
    ("0.24", {}),
    ("0.26", {"pads_joining": True, "leaves_computed": True, "names_tails": True, "names_ends": True}),
    ("0.28", {"skips_after_idle_victim": False, "slots_per_request": True}),
    ("0.30", {"pads_cached": True, "keeps_boundaries": True}),
    ("0.31", {"passed_over_stay_ahead": False}),
    (
        "0.33",
        {
            "goes_on_after_own_preemption": True,
            "counts_running_adapters": True,
            "publishes_output": True,
            "lookahead_keys": True,
            "room_for_lookahead": True,
            "sees_whole_prompt": True,
            "names_ends": False,
            "clips_max_tokens": True,
        },
    ),
)

VERSIONS: tuple[str, ...] = tuple(version for version, _ in _CHANGES)
"""The versions whose decisions were compared, oldest first."""


def rules_of(version: str) -> VllmRules:
    """The rules of a version, one of `VERSIONS`."""
    rules = VllmRules()
    for _, changes in _CHANGES[: VERSIONS.index(version) + 1]:
        rules = replace(rules, **changes)
    return rules
