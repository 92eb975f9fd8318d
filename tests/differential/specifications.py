"""Random scenarios for a scheduler, each made from a seed by whole-number arithmetic alone.

The standard library is all this needs, and equal seeds give equal specifications on every machine: no
logarithm or sine, whose last digit may differ, is drawn from. A specification is a plain object:

- `config`: scheduler options by their names in vLLM, and `usable_blocks`.
- `cost`: a step takes `step_us` + `token_us` per token computed + `context_ns` per token of context.
- `requests`: in order of arrival, with `arrival_us`, `input_tokens` and `output_tokens`, and where they
  matter `priority`, `salt`, `spans` (the prompt as pieces [content, offset, length]; without it the prompt
  is unique), `output_content` (the text that the output is, so that later prompts can quote it) and
  `stop_after` (the output ends early, after this many tokens, which no plan can know).
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

from extra_keys import encode, tell_apart
from host_tier import add_disk, fail_loads, fail_reads, offload, stop_early
from settings import limit_queue, share_context, tune
from speculation import place_drafter, speculate

Spec = dict[str, Any]

OUTPUTS = 10_000  # content ids of quoted outputs begin here
TAILS = 20_000  # and those of what a prompt has for itself here


def cancel(spec: Spec, seed: int) -> Spec:
    """Lets clients go away at any time: `cancel_after_us`, from the submission on."""
    draw = random.Random(f"cancelled {seed}")
    for request in spec["requests"]:
        if draw.randrange(3) == 0:
            request["cancel_after_us"] = draw.choice((0, 1_000, 20_000, 100_000)) + draw.randrange(100_000)
    return spec


FEW_REQUESTS = 16  # keep what is recorded of scenarios with features small
FEATURES = {
    "speculation": speculate,
    "keys": tell_apart,
    "offloading": offload,
    "disk": add_disk,
    "failing": fail_loads,
    "unreadable": fail_reads,
    "stops": stop_early,
    "cancelled": cancel,
    "tuned": tune,
    "queued": limit_queue,
    "ranks": share_context,
    "encoder": encode,
    "drafter": place_drafter,
}


def specification(seed: int, *features: str) -> Spec:
    """The scenario of a seed: small enough to run in a second, tight enough to preempt.

    `features`: what is added to it, by names in `FEATURES`. Such a scenario has fewer requests.
    """
    spec = Draw(seed).specification()
    if features:
        spec["requests"] = spec["requests"][:FEW_REQUESTS]
    for feature in features:
        spec = FEATURES[feature](spec, seed)
    return spec


def checksum(spec: Spec) -> str:
    """A digest that tells whether two specifications are the same."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Draw:
    """One seed's choices, drawn in order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.block_size = self.choice(1, 2, 4, 8, 16, 16, 16, 32, 64, 128)
        self.longest = min(self.choice(6, 24, 60, 150, 400), 40 * self.block_size)
        self.priorities = self.chance(40)
        self.caching = self.chance(75)
        self.tight = self.chance(65)
        self.salts = self.chance(20)
        self.stops = self.chance(25)
        self.bursts = self.chance(50)
        self.requests: list[Spec] = []
        self.documents = [self.between(1, self.longest) for _ in range(self.between(1, 5))]

    def choice(self, *values: int) -> int:
        """One of the values; a value given twice is twice as likely."""
        return values[self.random.randrange(len(values))]

    def chance(self, percent: int) -> bool:
        """True in so many of a hundred cases."""
        return self.random.randrange(100) < percent

    def between(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return low + self.random.randrange(high - low + 1)

    def mostly_small(self, high: int) -> int:
        """A whole number from 1 to `high`; half of the time below an eighth of it."""
        part = self.random.randrange(1000)
        return max(1, high * part * part * part // 10**9)

    def specification(self) -> Spec:
        """Draws all that is left to draw."""
        sequences = self.choice(1, 2, 3, 4, 6, 8, 16, 64)
        wait_us = self.choice(0, 50, 2_000, 20_000) if self.tight else self.choice(2_000, 20_000, 60_000)
        now_us = 0
        for number in range(self.between(12, 45)):
            if wait_us and not self.chance(70 if self.bursts else 20):
                now_us += self.mostly_small(4 * wait_us)
            self.requests.append({"arrival_us": now_us, **self.request(number)})
        needed = max(request["input_tokens"] + request["output_tokens"] for request in self.requests)
        prompts = sum(request["input_tokens"] for request in self.requests)
        budget = self.choice(1, 5, 20, 64, 256, 2048)
        config = {
            "block_size": self.block_size,
            "usable_blocks": self.blocks(-(-needed // self.block_size)),
            "max_num_seqs": sequences,
            "max_num_batched_tokens": max(sequences, budget, prompts // 250),
            "max_model_len": needed + self.choice(0, 1, 1000),
            "scheduling_policy": "priority" if self.priorities else "fcfs",
            "async_scheduling": self.chance(50),
            "enable_prefix_caching": self.caching,
        }
        cost = {
            "step_us": self.choice(500, 2_000, 10_000),
            "token_us": self.choice(1, 10, 40),
            "context_ns": self.choice(0, 2, 100),
        }
        return {"config": config, "cost": cost, "requests": self.requests}

    def blocks(self, fewest: int) -> int:
        """How many blocks there are: enough for the longest request, and little or much more."""
        if self.tight:
            return fewest + self.between(0, self.choice(1, 3, fewest))
        return fewest * self.between(4, 12)

    def request(self, number: int) -> Spec:
        """One request without its arrival."""
        made: Spec = {"input_tokens": 0, "output_tokens": 1}
        if not self.chance(10):
            most = max(4, self.longest * self.choice(1, 2, 4) // 4)
            made["output_tokens"] = self.between(1, most) if self.tight else self.mostly_small(most)
        spans = self.prompt(number)
        made["input_tokens"] = sum(length for _, _, length in spans)
        if len(spans) > 1 or spans[0][0] != TAILS + number:
            made["spans"] = spans
        if self.priorities:
            made["priority"] = self.choice(0, 0, 0, 1, 1, 7)
        if self.salts and self.chance(60):
            made["salt"] = f"tenant {self.between(1, 2)}"
        if self.chance(30):
            made["output_content"] = OUTPUTS + number
        if self.stops and self.chance(30):
            made["stop_after"] = self.between(1, made["output_tokens"])
        return made

    def prompt(self, number: int) -> list[list[int]]:
        """A prompt: a turn after an earlier one, the beginning of a document, or nothing shared."""
        kind = self.random.randrange(10)
        if kind == 0:
            return [[TAILS + number, 0, 1]]
        if kind <= 3:
            return [[TAILS + number, 0, self.between(1, self.longest)]]
        spans: list[list[int]] = []
        quoted = [index for index, request in enumerate(self.requests) if "output_content" in request]
        if kind <= 5 and quoted:
            spans += self.next_turn(quoted[self.random.randrange(len(quoted))])
        else:
            document = self.random.randrange(len(self.documents))
            length = self.documents[document]
            spans.append([document, 0, length if self.chance(50) else self.between(1, length)])
        if self.chance(60):
            spans.append([TAILS + number, 0, self.mostly_small(self.longest)])
        return spans

    def next_turn(self, earlier: int) -> list[list[int]]:
        """An earlier request's prompt and the beginning of its output; cut where it grows too long."""
        request = self.requests[earlier]
        spans = list(request.get("spans") or [[TAILS + earlier, 0, request["input_tokens"]]])
        spans.append([request["output_content"], 0, self.between(1, request["output_tokens"])])
        left = 2 * self.longest
        kept = []
        for content, offset, length in spans:
            if left:
                kept.append([content, offset, min(length, left)])
                left -= kept[-1][2]
        return kept
