"""vLLM's rules by version: what changed in its decisions since 0.24, and the version that changed it.

Source: vllm/v1/core and vllm/config/vllm.py of the versions below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagecast.sim.core.drafter import RESERVED, DraftingRules
from pagecast.sim.core.encoder import FIRST_ENCODER, EncoderRules
from pagecast.sim.core.memory.window_rules import DENSE, WindowRules
from pagecast.sim.core.tiers.offload_rules import FIRST_RULES, OffloadRules


@dataclass(frozen=True)
class VllmRules:
    """Where versions decide otherwise; the defaults are 0.24's.

    `drafting`, `windows`, `offload`, `encoder`: where requests speculate, where layers keep different
    tokens, with a host tier, and with images. `skips_after_idle_victim`: under the policy priority, a
    victim that had no tokens in this step makes the running pass skip the request that comes next.
    `goes_on_after_own_preemption`: a request that preempted itself does not end the running pass.
    `counts_running_adapters`: the adapters of all running requests count against `max_loras`, also of those
    that sit the step out.
    `passed_over_stay_ahead`: requests that were passed over stay ahead of those preempted later; else
    only those that hold blocks do, which are asked first. `passes_over_stale`: with speculation, a
    preempted request whose last step is not committed is passed over; else it ends the waiting pass.
    `spares_computed`: nobody is preempted whose blocks would be kept for a step in flight; the running
    pass ends instead. `clips_max_tokens`: the server lowers a `max_tokens` beyond the model's length
    (renderers/params.py); before, it refuses the request.
    `spares_lone_prompt`: the threshold of long prompts is not for a request that is alone.
    `keeps_interval`: the interval of prompts is kept without data parallelism too.
    `finds_states`: what is known of prefix caching of recurrent states is compared (`aligned.py`).
    `exports_states`: a block holds the state at a boundary within a prompt
    (`MambaSpec.num_prefill_checkpoint_blocks`).
    """

    drafting: DraftingRules = RESERVED
    windows: WindowRules = DENSE
    offload: OffloadRules = FIRST_RULES
    encoder: EncoderRules = FIRST_ENCODER
    skips_after_idle_victim: bool = True
    goes_on_after_own_preemption: bool = False
    counts_running_adapters: bool = False
    passed_over_stay_ahead: bool = True
    clips_max_tokens: bool = False
    passes_over_stale: bool = False
    spares_computed: bool = False
    spares_lone_prompt: bool = False
    keeps_interval: bool = False
    exports_states: bool = False
    finds_states: bool = False


OLDEST = VllmRules()
# Each version with the fields that it changed, those of `drafting`, `windows` and so on under that name.
_CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("0.24", {}),
    (
        "0.26",
        {
            "drafting": {"pads_joining": True},
            "windows": {"leaves_computed": True, "names_partial": True, "names_ends": True},
            "offload": {
                "stores_endings": True,
                "stores_prompt_ends": True,
                "counts_pending": True,
                "loads_without_lookahead": True,
                "forgets_after_stores": True,
            },
        },
    ),
    (
        "0.28",
        {
            "skips_after_idle_victim": False,
            "passes_over_stale": True,
            "drafting": {"slots_per_request": True},
            "offload": {
                "stores_computed": True,
                "stores_short_segments": True,
                "promotions_pend": True,
                "misses_failed": True,
                "forgets_with_plan": True,
            },
            "encoder": {"encodes_ahead": True},
        },
    ),
    (
        "0.30",
        {
            "spares_computed": True,
            "drafting": {"pads_cached": True},
            "windows": {"keeps_boundaries": True},
            "offload": {
                "leaves_last_token": True,
                "ends_windows": True,
                "drops_marked": True,
                "counts_offers": True,
                "falls_back_to_recent": True,
            },
            "encoder": {"holds_repeats": True},
        },
    ),
    (
        "0.31",
        {
            "passed_over_stay_ahead": False,
            "spares_lone_prompt": True,
            "offload": {"by_request": True, "reserves_drafts": 1},
        },
    ),
    (
        "0.33",
        {
            "goes_on_after_own_preemption": True,
            "counts_running_adapters": True,
            "clips_max_tokens": True,
            "keeps_interval": True,
            "exports_states": True,
            "finds_states": True,
            "drafting": {
                "publishes_output": True,
                "lookahead_keys": True,
                "room_for_lookahead": True,
                "trims_computed": True,
            },
            "windows": {"sees_whole_prompt": True, "names_ends": False, "keeps_below": True},
            "offload": {
                "offers_again": True,
                "stores_whole_blocks": True,
                "by_place": True,
                "reserves_drafts": 2,
                "polls_stores": True,
            },
            "encoder": {"passes_over_unencoded": True},
        },
    ),
)

VERSIONS: tuple[str, ...] = tuple(version for version, _ in _CHANGES)
"""The versions whose decisions were compared, oldest first."""


def rules_of(version: str) -> VllmRules:
    """The rules of a version, one of `VERSIONS`."""
    rules = VllmRules()
    for _, changes in _CHANGES[: VERSIONS.index(version) + 1]:
        rules = _changed(rules, changes)
    return rules


def _changed(rules: Any, changes: Mapping[str, Any]) -> Any:
    """The rules with some fields set otherwise. Changes of a field are made to the rules that it has."""
    fields = {
        name: _changed(getattr(rules, name), change) if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    return replace(rules, **fields)
