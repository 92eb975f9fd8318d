"""Host tier of a recorded run, as its `meta.json` describes it."""

from __future__ import annotations

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.tier_spec import HostTierSpec, OffloadingPolicy
from pagecast.sim.runs.recorded import RecordedRun


def host_tier_of(run: RecordedRun) -> HostTierSpec | None:
    """The host tier of a run: `config.kv_offloading`, with the options of vLLM's connector by their names.

    `cpu_blocks` says how many offloaded blocks there is room for. Errors: BadInput naming the option.
    """
    config = run.meta.get("config", {})
    options = config.get("kv_offloading")
    if not options:
        return None
    where = f"{run.folder}/meta.json: config: kv_offloading"
    if not isinstance(options, dict):
        raise BadInput(f"{where} is {str(options)[:60]!r}, must be an object")

    def whole(name: str, default: int) -> int:
        value = options.get(name, default)
        if type(value) is not int or value < 0:
            raise BadInput(f"{where}: {name!r} is {value!r}, must be a whole number of at least 0")
        return value

    tiers = options.get("secondary_tiers") or []
    if not isinstance(tiers, list) or any(not isinstance(tier, dict) for tier in tiers):
        raise BadInput(f"{where}: 'secondary_tiers' is {str(tiers)[:60]!r}, must be a list of objects")
    if [tier.get("type") for tier in tiers] not in ([], ["fs"]):
        raise BadInput(f"{where}: 'secondary_tiers' is {str(tiers)[:60]!r}; one of the type fs is supported")
    names = ("eviction_policy", "offload_prompt_only")
    policy = OffloadingPolicy(
        **{name: options[name] for name in names if name in options},
        store_threshold=whole("store_threshold", 0),
        kv_load_failure_policy=config.get("kv_load_failure_policy", "recompute"),
    )
    return HostTierSpec(whole("cpu_blocks", 0), whole("block_size_factor", 1), policy, disk=bool(tiers))
