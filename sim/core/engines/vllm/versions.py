"""vLLM's rules by version: what changed in its decisions since 0.24, and the version that changed it.

Source: vllm/v1/core and vllm/config/vllm.py of the versions below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
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
# Each version with what it changed.
_CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("0.24", {}),
    (
        "0.26",
        {
            "pads_joining": True,
            "leaves_computed": True,
            "names_partial": True,
            "names_ends": True,
            "stores_endings": True,
            "stores_prompt_ends": True,
            "counts_pending": True,
            "loads_without_lookahead": True,
            "forgets_after_stores": True,
        },
    ),
    (
        "0.28",
        {
            "skips_after_idle_victim": False,
            "slots_per_request": True,
            "passes_over_stale": True,
            "stores_computed": True,
            "stores_short_segments": True,
            "promotions_pend": True,
            "misses_failed": True,
            "forgets_with_plan": True,
            "encodes_ahead": True,
        },
    ),
    (
        "0.30",
        {
            "pads_cached": True,
            "keeps_boundaries": True,
            "spares_computed": True,
            "leaves_last_token": True,
            "ends_windows": True,
            "drops_marked": True,
            "counts_offers": True,
            "falls_back_to_recent": True,
            "holds_repeats": True,
        },
    ),
    (
        "0.31",
        {
            "passed_over_stay_ahead": False,
            "by_request": True,
            "reserves_drafts": 1,
            "spares_lone_prompt": True,
        },
    ),
    (
        "0.33",
        {
            "goes_on_after_own_preemption": True,
            "counts_running_adapters": True,
            "publishes_output": True,
            "lookahead_keys": True,
            "room_for_lookahead": True,
            "trims_computed": True,
            "sees_whole_prompt": True,
            "names_ends": False,
            "clips_max_tokens": True,
            "keeps_below": True,
            "offers_again": True,
            "stores_whole_blocks": True,
            "by_place": True,
            "reserves_drafts": 2,
            "polls_stores": True,
            "keeps_interval": True,
            "exports_states": True,
            "finds_states": True,
            "passes_over_unencoded": True,
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


def _changed(rules: VllmRules, changes: Mapping[str, Any]) -> VllmRules:
    """The rules with some fields of theirs, or of the rules that they consist of, set otherwise."""
    parts = (rules, rules.drafting, rules.windows, rules.offload, rules.encoder)
    unknown = changes.keys() - {field.name for part in parts for field in fields(part)}
    assert not unknown, f"no rule is named {sorted(unknown)}"

    def of(part: Any) -> dict[str, Any]:
        return {field.name: changes[field.name] for field in fields(part) if field.name in changes}

    return replace(
        rules,
        drafting=replace(rules.drafting, **of(rules.drafting)),
        windows=replace(rules.windows, **of(rules.windows)),
        offload=replace(rules.offload, **of(rules.offload)),
        encoder=replace(rules.encoder, **of(rules.encoder)),
        **of(rules),
    )
