"""Speculation in a scenario: who drafts, how many draft tokens there are, and how many are accepted.

`speculate(spec, seed)` adds to a specification:

- to `config`: `speculative_config`, with the names of vLLM's.
- to requests: `drafts`, how many draft tokens follow each step that yields tokens (read in a circle, at most
  what the method makes; asynchronous scheduling leaves room for all of them anyway), and `accepted_drafts`,
  how many are accepted at each step that verifies some (in a circle, too).
"""

from __future__ import annotations

import random
from typing import Any

Spec = dict[str, Any]

SYNCHRONOUS = ("ngram", "ngram", "eagle", "mtp", "draft_model")
AHEAD = ("eagle", "eagle", "mtp", "draft_model", "ngram_gpu")
WITH_KV = ("eagle", "mtp", "draft_model")


def speculate(spec: Spec, seed: int) -> Spec:
    """Lets the requests of a specification speculate."""
    draw = random.Random(f"speculation {seed}")
    config = spec["config"]
    groups = config.get("kv_groups", ())
    method = draw.choice(AHEAD if config["async_scheduling"] else SYNCHRONOUS)
    drafts = draw.choice((1, 1, 2, 3, 3, 4, 5, 7))
    made: Spec = {"method": method, "num_speculative_tokens": drafts}
    if draw.randrange(4) == 0:
        made["num_speculative_tokens_per_batch_size"] = [
            [1, 2, drafts],
            [4, draw.randrange(4, 7), draw.randrange(drafts + 1)],
            [9, 9, draw.randrange(drafts + 2)],
        ]
    if method in WITH_KV:
        config["usable_blocks"] += -(-drafts // config["block_size"])
        if draw.randrange(8) == 0:
            made["parallel_drafting"] = True
    more = _reserved(made) * config["max_num_seqs"]
    config["max_num_batched_tokens"] += more
    for group in groups:
        config["usable_blocks"] += -(
            -(drafts + more) // group["block_size"]
        )  # a window keeps a step's tokens
    config["speculative_config"] = made
    mood = draw.randrange(4)  # mostly rejected, mostly accepted, mixed
    for request in spec["requests"]:
        count = draw.randrange(1, 6)
        request["drafts"] = [draw.choice((drafts, drafts, draw.randrange(drafts + 1))) for _ in range(count)]
        count = draw.randrange(1, 6)
        request["accepted_drafts"] = [_accepted(draw, drafts, mood) for _ in range(count)]
    return spec


def place_drafter(spec: Spec, seed: int) -> Spec:
    """Puts the layers of a drafter that reads hidden states in one KV group of a hybrid model."""
    config = spec["config"]
    groups = [group for group in config["kv_groups"] if not group.get("state")]
    if config["speculative_config"]["method"] in ("eagle", "mtp"):
        random.Random(f"drafter {seed}").choice(groups)["drafts"] = True
    return spec


def _accepted(draw: random.Random, drafts: int, mood: int) -> int:
    if mood < 2 and draw.randrange(4):
        return drafts * mood
    return draw.randrange(drafts + 1)


def _reserved(config: Spec) -> int:
    slots = config["num_speculative_tokens"] - 1 if config.get("parallel_drafting") else 0
    return slots + (config["method"] == "draft_model")


class DraftCounts:
    """Reads `drafts` and `accepted_drafts` of each request step by step."""

    def __init__(self, rows: list[Spec]) -> None:
        self.rows = rows
        self._read = {"drafts": [0] * len(rows), "accepted_drafts": [0] * len(rows)}

    def next(self, name: str, row: int) -> int:
        """The next number of that name for a request."""
        numbers = self.rows[row][name]
        at = self._read[name][row]
        self._read[name][row] = at + 1
        return int(numbers[at % len(numbers)])
