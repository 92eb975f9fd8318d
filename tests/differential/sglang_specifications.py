"""Random scenarios for SGLang, made from a seed by whole-number arithmetic alone.

Requests are those of `specifications.py`, the configuration is SGLang's.
"""

from __future__ import annotations

from typing import Any

from specifications import Draw, checksum

__all__ = ["Spec", "checksum", "specification"]

Spec = dict[str, Any]
EVICTION = ("lru", "lru", "lru", "lru", "lfu", "slru", "fifo", "mru", "filo")


PRESSURE = "pressure"
RECEIVING = "recv-interval"
LONGER = {"exact-tokens": 1, "max-tokens": 4}  # `max_new_tokens` of requests, in lengths of their outputs
OVERLAP = {"overlap": True, "synchronous": False}


def specification(seed: int, *features: str) -> Spec:
    """The scenario of a seed.

    With the feature `pressure` running requests outgrow the memory. `overlap` and `synchronous` say whether
    scheduling and computing overlap; without either, the seed does. With `exact-tokens` and `max-tokens`
    equal requests want memory at once, which stop after a part of what they may generate in the second.
    `recv-interval`: the scheduler looks for requests once in some turns.
    """
    draw = SglangDraw(1_000_000 + seed)
    for feature in LONGER.keys() & features:
        return draw.stopping(LONGER[feature], overlap=seed % 2 > 0)
    spec = draw.sglang(pressure=PRESSURE in features)
    for feature in OVERLAP.keys() & features:
        spec["config"]["overlap"] = OVERLAP[feature]
    if RECEIVING in features:
        spec["config"]["scheduler_recv_interval"] = draw.choice(2, 3, 5, 10, 30)
    return spec


class SglangDraw(Draw):
    """One seed's choices."""

    def sglang(self, *, pressure: bool) -> Spec:
        """The requests and cost of the base class, with a configuration of SGLang."""
        self.priorities = False
        base = self.specification()
        requests = base["requests"]
        if pressure:
            self.tight = True
            for request in requests:
                request["output_tokens"] = self.between(self.longest // 2 + 1, self.longest + 2)
                request["arrival_us"] //= 50
                if "stop_after" in request:
                    request["stop_after"] = self.between(1, request["output_tokens"])
        if self.chance(6):
            # More wait at once than SGLang looks up prefixes for.
            requests += [dict(request) for request in requests * 4]
            requests.sort(key=lambda request: request["arrival_us"])
        page = self.choice(1, 1, 1, 2, 4, 16, 16, 64)
        ignore_eos = self.chance(30)
        for request in requests:
            if ignore_eos:
                request.pop("stop_after", None)
        longest = max(request["input_tokens"] + request["output_tokens"] for request in requests)
        prompts = sum(request["input_tokens"] for request in requests)
        fewest = -(-(longest + 2 * page + 2) // page)
        pages = (
            fewest + self.between(0, self.choice(1, 3, fewest)) if self.tight else fewest * self.between(2, 8)
        )
        chunk = page * max(self.choice(8, 40, 200, 1000) // page, -(-prompts // (250 * page)), 1)
        config = {
            "page_size": page,
            "usable_pages": pages,
            "longest": longest,
            "max_running_requests": self.choice(1, 2, 3, 4, 8, 16, 64),
            "chunked_prefill_size": None if self.chance(20) else chunk,
            "max_prefill_tokens": max(self.choice(20, 200, 16384), page),
            "schedule_policy": ("fcfs", "lpm")[self.chance(50)],
            "schedule_conservativeness": (0.01, 0.01, 0.1, 0.3, 1.0, 1.0, 1.5)[self.between(0, 6)],
            "enable_mixed_chunk": self.chance(25),
            "enable_prefix_caching": self.chance(85),
            "overlap": self.chance(50),
            "radix_eviction_policy": EVICTION[self.between(0, len(EVICTION) - 1)],
            "ignore_eos": ignore_eos,
        }
        if config["chunked_prefill_size"] is None:
            config["enable_mixed_chunk"] = False
        if pressure:
            config["max_running_requests"] = 16
            config["schedule_conservativeness"] = 0.01
            config["ignore_eos"] = False
        return {"config": config, "cost": base["cost"], "requests": requests}

    def stopping(self, longer: int, *, overlap: bool) -> Spec:
        """Requests that may generate `longer` times what they do, in memory for about twenty of them."""
        requests: list[dict[str, Any]] = []
        for _ in range(100):
            output = self.between(20, 60)
            row = {"arrival_us": 0, "input_tokens": self.between(30, 90), "output_tokens": longer * output}
            requests.append(row | ({"stop_after": output} if longer > 1 else {}))
        page = self.choice(1, 16)
        config = {
            "page_size": page,
            "usable_pages": 2000 // page,
            "longest": 400,
            "max_running_requests": 64,
            "chunked_prefill_size": 512,
            "max_prefill_tokens": 16384,
            "schedule_policy": "fcfs",
            "schedule_conservativeness": (0.3, 1.0)[self.chance(50)],
            "enable_mixed_chunk": False,
            "enable_prefix_caching": True,
            "overlap": overlap,
            "radix_eviction_policy": "lru",
            "ignore_eos": False,
        }
        cost = {"step_us": 5000, "token_us": 10, "context_ns": 100}
        return {"config": config, "cost": cost, "requests": requests}
