"""Settings of the scheduler that most servers leave alone, for random scenarios.

`tune(spec, seed)`, `limit_queue(spec, seed)` and `share_context(spec, seed)` add options to `config`, by
their names in vLLM.
"""

from __future__ import annotations

import random
from typing import Any

Spec = dict[str, Any]

ADAPTIVE = "long_prefill_token_threshold_adaptive"  # since 0.31


def tune(spec: Spec, seed: int) -> Spec:
    """Draws what bounds chunks, steps and admissions: two or three options at a time."""
    draw = random.Random(f"settings {seed}")
    config = spec["config"]
    longest = max(request["input_tokens"] for request in spec["requests"])
    chosen = draw.sample(("threshold", "watermark", "reserve", "whole", "tokens", "interval"), 2)
    if draw.randrange(2):
        chosen.append("threshold")
    if "threshold" in chosen:
        most = min(config["max_model_len"], draw.choice((longest, longest // 2, longest // 4, 8)))
        config["long_prefill_token_threshold"] = 1 + draw.randrange(max(most, 1))
    if "watermark" in chosen:
        config["watermark"] = draw.choice((0.01, 0.05, 0.1, 0.1, 0.25, 0.5))
    if "reserve" in chosen:
        config["scheduler_reserve_full_isl"] = False
    if "interval" in chosen:
        config["prefill_schedule_interval"] = draw.choice((2, 2, 3, 5, 16))
    if "whole" in chosen:
        config["enable_chunked_prefill"] = False
        budget = max(config["max_num_batched_tokens"], config["max_model_len"])
        config["max_num_batched_tokens"] = budget + draw.choice((0, 0, 10, longest))
    elif "tokens" in chosen and "speculative_config" not in config:
        least = config["max_num_seqs"]
        tokens = config["max_num_batched_tokens"] // draw.choice((1, 2, 3))
        config["max_num_scheduled_tokens"] = max(least, tokens)
        config["max_num_batched_tokens"] += draw.choice((0, 0, 5))
    if "threshold" in chosen and draw.randrange(3) == 0:
        config[ADAPTIVE] = True
    return spec


def as_known(spec: Spec, version: str) -> Spec:
    """The specification without an option that this version of vLLM does not have."""
    if ADAPTIVE not in spec["config"] or [int(part) for part in version.split(".")[:2]] >= [0, 31]:
        return spec
    return {**spec, "config": {name: value for name, value in spec["config"].items() if name != ADAPTIVE}}


def limit_queue(spec: Spec, seed: int) -> Spec:
    """Draws how many requests, and how many tokens of prompts, may be unfinished."""
    draw = random.Random(f"queue {seed}")
    kind = draw.randrange(3)
    if kind != 1:
        spec["config"]["max_num_queued_reqs"] = draw.choice((1, 2, 4, 8, 16))
    if kind != 0:
        total = sum(request["input_tokens"] for request in spec["requests"])
        spec["config"]["max_num_queued_tokens"] = 1 + draw.randrange(max(total // 4, 1))
    return spec


def share_context(spec: Spec, seed: int) -> Spec:
    """Draws how many GPUs share a sequence's tokens. `block_size` counts those of a block on all of them."""
    draw = random.Random(f"ranks {seed}")
    config = spec["config"]
    fitting = [ranks for ranks in (2, 4, 8) if config["block_size"] % ranks == 0]
    config["decode_context_parallel_size"] = draw.choice(fitting) if fitting else 1
    return spec
