"""Random scenarios of models whose layers keep different tokens: `specifications.py` with KV groups.

`config["kv_groups"]` lists the groups as a recorded run's `meta.json` does: each has a `block_size`, and
perhaps a `window`, a `chunk`, `latent` or `state`. The engine's block size is their greatest common divisor.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from specifications import FEATURES, FEW_REQUESTS, Draw, Spec

HYBRID = "hybrid"
RECURRENT = "recurrent"  # recurrent states whose prefixes are cached, in place of the groups of `hybrid`
MOST_DRAFTS = 8  # tokens beyond the known ones that a request may need blocks for
SEEDS_APART = 1_000_000  # so that no scenario is one of `specifications.py` with groups added


def specification(seed: int, *features: str) -> Spec:
    """The scenario of a seed, with what `features` add to it (see `specifications.specification`)."""
    if RECURRENT in features:
        spec = RecurrentDraw(2 * SEEDS_APART + seed).specification()
        features = tuple(feature for feature in features if feature != RECURRENT)
    else:
        spec = HybridDraw(SEEDS_APART + seed).specification()
    if features:
        spec["requests"] = spec["requests"][:FEW_REQUESTS]
        for group in spec["config"]["kv_groups"]:
            if "chunk" in group:
                group["window"] = group.pop("chunk")  # EAGLE does not work with chunks
            # Where prefixes are cached, a block of states for each draft token.
            states = group.get("state") and spec["config"]["enable_prefix_caching"]
            size = 1 if states else group["block_size"]
            spec["config"]["usable_blocks"] += -(-MOST_DRAFTS // size) + 1
    config = spec["config"]
    for feature in features:
        batch = config["max_num_batched_tokens"]
        spec = FEATURES[feature](spec, seed)
        if feature == "tuned":  # in larger steps windows hold more; vLLM does not start without room for it
            more = longest_held(spec, config["max_num_batched_tokens"]) - longest_held(spec, batch)
            config["usable_blocks"] += more
    return spec


def longest_held(spec: Spec, batch: int) -> int:
    """Blocks that the longest request needs to get through, in steps of `batch` tokens."""
    config = spec["config"]
    longest = max(request["input_tokens"] + request["output_tokens"] for request in spec["requests"])
    cached = config["enable_prefix_caching"]
    return sum(blocks_held(group, longest, batch, cached=cached) for group in config["kv_groups"])


def blocks_held(group: dict[str, Any], tokens: int, batch: int, *, cached: bool) -> int:
    """Blocks of a group that one request of so many tokens needs to get through, in steps of `batch`.

    `cached`: prefixes are.
    """
    size = group["block_size"]
    if group.get("state"):
        return 2 + ("exported" in group) if cached else 1
    if "window" in group:
        return -(-min(group["window"] - 1 + batch, tokens) // size) + 1
    if "chunk" in group:
        tokens = min(group["chunk"] + batch, tokens)
    return -(-tokens // size)


class HybridDraw(Draw):
    """One seed's choices; the groups are drawn last, when the requests are known."""

    def specification(self) -> Spec:
        """Draws all that is left to draw."""
        spec = super().specification()
        config = spec["config"]
        groups = self.groups(config["block_size"], config["enable_prefix_caching"])
        config["kv_groups"] = groups
        config["block_size"] = gcd(*(group["block_size"] for group in groups if not group.get("state")))
        config["usable_blocks"] = self.blocks(longest_held(spec, config["max_num_batched_tokens"]))
        return spec

    def groups(self, size: int, caching: bool) -> list[Spec]:
        """The groups of a model of some kind."""
        kind = self.random.randrange(10)
        full: Spec = {"block_size": size}
        if kind == 0:
            return [self.window(size)]
        if kind == 1:
            return [full, full, self.chunk(size)] if self.chance(50) else [self.chunk(size), full]
        if kind == 2 and not caching:
            return [full, *({"block_size": size, "state": True} for _ in range(self.between(1, 3)))]
        if kind == 3:
            return [full, self.window(size), self.window(size)]
        if kind == 4:
            latent = {"block_size": size, "latent": True}
            return [latent, self.window(size)]
        if kind <= 6:
            # Blocks of several sizes: hits and what is published are whole multiples of all of them.
            other = size * self.choice(2, 2, 3, 4)
            return (
                [full, self.window(other)] if self.chance(50) else [{"block_size": other}, self.window(size)]
            )
        window = self.window(size)
        made = [full] * self.choice(1, 1, 2) + [window] * self.choice(1, 2, 5)
        return made[::-1] if self.chance(30) else made

    def window(self, size: int) -> Spec:
        """A sliding window, from one token to longer than most requests."""
        reach = self.choice(
            1, size, size + 1, 2 * size, self.between(1, 4 * size), self.between(1, self.longest)
        )
        return {"block_size": size, "window": reach}

    def chunk(self, size: int) -> Spec:
        """Chunked local attention; mostly whole blocks to a chunk."""
        reach = size * self.between(1, 6)
        return {"block_size": size, "chunk": reach if self.chance(80) else reach + self.between(1, size)}


class RecurrentDraw(HybridDraw):
    """One seed's choices for a model with recurrent states: all groups have one block size, as in vLLM.

    `exported`: kernels export states within a prompt, at multiples of so many tokens after a chunk's start.
    """

    def specification(self) -> Spec:
        """Draws all that is left to draw; prefixes are always cached."""
        self.caching = True
        return super().specification()

    def groups(self, size: int, caching: bool) -> list[Spec]:
        """Full attention or latents, and one to three groups of states, before or behind it."""
        kept: Spec = {"block_size": size}
        if self.chance(25):
            kept["latent"] = True
        state: Spec = {"block_size": size, "state": True}
        if self.chance(50):
            state["exported"] = self.choice(1, 1, size)
        states = [state] * self.choice(1, 1, 2, 3)
        return [*states, kept] if self.chance(30) else [kept, *states]
