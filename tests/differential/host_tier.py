"""A host tier in a scenario: KV offloading as vLLM's OffloadingConnector does it, and links of a given speed.

`offload(spec, seed)` adds to a specification:

- to `config`: `kv_offloading`, the connector's own options by its names, with `cpu_blocks` in place of bytes.
- `links`: how long a transfer takes: `latency_us`, and `load_us` and `store_us` for each device block.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

Spec = dict[str, Any]

COMING_BACK = 3_000_000  # content ids of prompts that come back


def offload(spec: Spec, seed: int) -> Spec:
    """Gives a specification a host tier."""
    draw = random.Random(f"offloading {seed}")
    config = spec["config"]
    blocks = config["usable_blocks"]
    _serve_groups(config)
    sizes = {group["block_size"] for group in config.get("kv_groups", [config])}
    factor = draw.choice((1, 1, 1, 2, 3)) if len(sizes) == 1 else 1
    tier: Spec = {
        "cpu_blocks": max(2, blocks * draw.choice((1, 2, 4, 8, 20)) // draw.choice((2, 4)) // factor),
        "eviction_policy": draw.choice(("lru", "lru", "arc")),
        "block_size_factor": factor,
    }
    if draw.randrange(5) == 0:
        tier["offload_prompt_only"] = False
    if draw.randrange(8) == 0:
        tier["store_threshold"] = 2
    config["kv_offloading"] = tier
    spec["links"] = {
        "latency_us": draw.choice((0, 10, 500, 5_000)),
        "load_us": draw.choice((1, 50, 1_000)),
        "store_us": draw.choice((1, 50, 1_000, 4_000)),
    }
    if config["block_size"] == 1:
        # vLLM loads a prompt of a single token again and again, where that is a whole block.
        spec["requests"] = [request for request in spec["requests"] if request["input_tokens"] > 1]
    if "speculative_config" in config:
        # `stop_early` gives outputs other early ends.
        for request in spec["requests"]:
            request.pop("stop_after", None)
    for request in spec["requests"]:
        request["arrival_us"] *= draw.choice((1, 1, 2))
    spec["requests"].sort(key=lambda request: request["arrival_us"])
    return spec


def stop_early(spec: Spec, seed: int) -> Spec:
    """Lets outputs end early, among accepted draft tokens too."""
    draw = random.Random(f"stops {seed}")
    for request in spec["requests"]:
        if draw.randrange(3) == 0:
            request["stop_after"] = draw.randint(1, request["output_tokens"])
    return spec


def add_disk(spec: Spec, seed: int) -> Spec:
    """Gives a specification a host tier and a disk behind it.

    Adds `secondary_tiers` to the connector's options, and to `links` `disk_latency_us`, `disk_load_us` and
    `disk_store_us` for each offloaded block; one in `disk_failing` stores fails, if any.
    """
    spec = offload(spec, seed)
    draw = random.Random(f"disk {seed}")
    tier = spec["config"]["kv_offloading"]
    tier.pop("store_threshold", None)
    tier["secondary_tiers"] = [{"type": "fs"}]
    blocks = spec["config"]["usable_blocks"] // tier["block_size_factor"]
    tier["cpu_blocks"] = max(2, blocks * draw.choice((1, 2, 2, 3, 4, 8)) // 4)
    spec["links"] |= {
        "disk_latency_us": draw.choice((0, 100, 2_000)),
        "disk_load_us": draw.choice((1, 200, 3_000)),
        "disk_store_us": draw.choice((1, 200, 3_000, 10_000)),
        "disk_failing": draw.choice((0, 0, 0, 4)),
    }
    if draw.randrange(4):
        _ask_again(spec["requests"], draw)
    return spec


def fail_reads(spec: Spec, seed: int) -> Spec:
    """Gives a specification a host tier and a disk that at times can't be read.

    Adds `disk_failing_reads` to `links`: a promotion fails where its number is a multiple of that. vLLM asks
    for such blocks for ever, so requests get `patience_us`: for how long their clients wait to be admitted.
    """
    spec = add_disk(spec, seed)
    draw = random.Random(f"failing reads {seed}")
    spec["links"]["disk_failing"] = 0
    spec["links"]["disk_failing_reads"] = draw.choice((1, 2, 2, 3))
    spec["links"]["disk_latency_us"] = draw.choice((2_000, 10_000))
    for request in spec["requests"]:
        request["patience_us"] = draw.choice((500_000, 2_000_000))
    return spec


def fail_loads(spec: Spec, seed: int) -> Spec:
    """Gives a specification a host tier whose loads fail at times.

    Adds to `links` `failing_loads`: a load fails where its number is a multiple of that; and to `config`
    `kv_load_failure_policy`, what becomes of the request.
    """
    spec = offload(spec, seed)
    draw = random.Random(f"failing {seed}")
    spec["config"]["kv_offloading"].pop("store_threshold", None)
    spec["config"]["kv_load_failure_policy"] = draw.choice(("recompute", "recompute", "fail"))
    spec["links"]["failing_loads"] = draw.choice((2, 2, 3, 5))
    _ask_again(spec["requests"], draw)
    return spec


def _ask_again(requests: list[Spec], draw: random.Random) -> None:
    """Lets the prompts of some requests come back when the host has had others meanwhile."""
    latest = max(request["arrival_us"] for request in requests)
    again = []
    for number, request in enumerate(requests[: len(requests) // 2 + 1]):
        request.setdefault("spans", [[COMING_BACK + number, 0, request["input_tokens"]]])
        copy = {name: value for name, value in request.items() if name != "output_content"}
        copy["arrival_us"] = latest + draw.choice((1, 1_000, 50_000)) * (number + 1)
        again.append(copy)
    requests += sorted(again, key=lambda request: request["arrival_us"])


def _serve_groups(config: Spec) -> None:
    """Leaves out of a hybrid model what vLLM's connector does not serve."""
    if "kv_groups" not in config:
        return
    cached = config["enable_prefix_caching"]
    groups = [group for group in config["kv_groups"] if cached or not group.get("state")]
    for group in groups:
        if "chunk" in group:
            group["window"] = group.pop("chunk")
    config["kv_groups"] = groups
    if len({group["block_size"] for group in groups}) > 1:
        config["enable_prefix_caching"] = True


class TransferDigests:
    """Digests of what was loaded, stored, waited for, and of what came to and left the host, step by step.

    Contents are numbered as they first come.
    """

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._happened: list[str] = []

    def job(self, kind: str, number: int, row: int, blocks: list[int], places: list[int]) -> None:
        """A job of a request: device blocks, and host places of a block each."""
        self._happened.append(f"{kind}{number} {row} {blocks} {places}")

    def disk(self, number: int, kind: str, contents: list[Any], places: list[int]) -> None:
        """A job between host and disk: contents, and a host place for each."""
        names = [self._numbers.setdefault(content, len(self._numbers)) for content in contents]
        self._happened.append(f"{kind}{number} {names} {places}")

    def flushed(self, jobs: list[int]) -> None:
        """Jobs that had to be done before the step."""
        if jobs:
            self._happened.append(f"flush {sorted(jobs)}")

    def host(self, content: object, stored: bool) -> None:
        """A content can be loaded from the host from now on, or no more."""
        number = self._numbers.setdefault(content, len(self._numbers))
        self._happened.append(f"{'+' if stored else '-'}{number}")

    def digest(self) -> int:
        """A number below 2**10 for all since the last digest; 0 where there was nothing."""
        if not self._happened:
            return 0
        text = ";".join(self._happened)
        self._happened.clear()
        return zlib.crc32(text.encode()) & 0x3FF or 1
