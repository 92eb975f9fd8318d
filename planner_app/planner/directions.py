"""The direction in which each figure is better, for the gate and for sweeps.

Names come in two forms: a summary's `ttft_s.p99`, and the flat `ttft_p99_s` of tables of trials.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_MORE = (
    "completed",
    "input_tokens",
    "output_tokens",
    "output_tokens_per_s",
    "prefill_avoided_s",
    "reused_prefix_tokens",
    "eligible_prefix_tokens",
    "token_hit_rate",
    "prompt_tokens_by_source.exact",
    "prompt_tokens_by_source.partial",
    "prompt_tokens_by_source.host",
    "prompt_tokens_by_source.disk",
    "offloading.*_hit_tokens",
    "offloading.*_hit_rate",
    "offloading.requests_with_*_hit",
    "partial_reuse.tokens",
    "speculation.acceptance_rate",
    "speculation.mean_acceptance_length",
    "speculation.num_accepted_tokens",
    "peak.uncached_tokens_per_s_at_peak",
    "isolation.hit_tokens*",
    "admissible_concurrency",
    "static_concurrency",
    "num_gpu_blocks",
)
_LESS = (
    "rejected",
    "rejected_at_any_load",
    "unserved",
    "rejected_reasons.*",
    "cancelled",
    "makespan_s",
    "steps",
    "bytes_per_sequence",
    "peak_kv_usage",
    "evicted_blocks",
    "preemptions",
    "recomputed_tokens",
    "failed_allocations",
    "*_s.*",
    "*_mean_s",
    "*_p[0-9][0-9]_s",
    "*_max_s",
    "prompt_tokens_by_source.missed",
    "offloading.evicted_host_blocks",
    "offloading.refused_*",
    "offloading.lost_*",
    "offloading.*_wait_s",
    "swap.*_tokens",
    "scrubbing.*",
    "rollout.forced_miss_tokens",
    "rollout.old_blocks_at_end",
    "rollout.old_blocks_gone_after_s",
    "isolation.lost_hit_*",
    "gpus",
    "gpu_hours",
    "usd_per_*",
)


def more_is_better(name: str) -> bool | None:
    """Whether more of a figure is better; None where neither more nor less of it is, or nobody has said."""
    if any(fnmatchcase(name, pattern) for pattern in _MORE):
        return True
    return False if any(fnmatchcase(name, pattern) for pattern in _LESS) else None
