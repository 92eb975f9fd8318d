"""Random scenarios for TensorRT-LLM's V1 scheduler, made from a seed by whole-number arithmetic alone.

Requests are those of `specifications.py`, the configuration is TensorRT-LLM's.
"""

from __future__ import annotations

from typing import Any

from specifications import Draw, checksum

__all__ = ["POLICIES", "Spec", "checksum", "specification"]

Spec = dict[str, Any]
POLICIES = {
    "no-evict": "GUARANTEED_NO_EVICT",
    "utilization": "MAX_UTILIZATION",
    "static": "STATIC_BATCH",
}
STOPPING = {"exact-tokens": 1, "max-tokens": 4}  # how many times its output a request may generate


def specification(seed: int, policy: str) -> Spec:
    """The scenario of a seed under one of `POLICIES`, or of `STOPPING`, where blocks are reserved."""
    if policy in STOPPING:
        return TrtllmDraw(3_000_000 + seed).stopping(STOPPING[policy], overlap=bool(seed % 2))
    return TrtllmDraw(2_000_000 + seed).trtllm(POLICIES[policy])


class TrtllmDraw(Draw):
    """One seed's choices."""

    def trtllm(self, policy: str) -> Spec:
        """The requests and cost of the base class, with a configuration of TensorRT-LLM."""
        self.priorities = False
        self.block_size = max(self.block_size, 2)  # it has no blocks of one token
        base = self.specification()
        requests = base["requests"]
        for request in requests:
            request.pop("priority", None)
        block = base["config"]["block_size"]
        chunked = self.chance(75)
        whole = max(request["input_tokens"] + request["output_tokens"] for request in requests)
        budget = max(base["config"]["max_num_batched_tokens"], block)
        config = {
            "block_size": block,
            "usable_blocks": base["config"]["usable_blocks"],
            "max_batch_size": base["config"]["max_num_seqs"],
            "max_num_tokens": budget if chunked else max(budget, whole),
            "policy": policy,
            "chunked_context": chunked,
            "chunking": ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS")[self.chance(40)],
            "enable_block_reuse": base["config"]["enable_prefix_caching"],
            "overlap": self.chance(50),
        }
        return {"config": config, "cost": base["cost"], "requests": requests}

    def stopping(self, longer: int, *, overlap: bool) -> Spec:
        """Requests that may generate `longer` times what they do, in memory for about twenty of them."""
        requests: list[dict[str, Any]] = []
        for _ in range(100):
            output = self.between(20, 60)
            row = {"arrival_us": 0, "input_tokens": self.between(30, 90), "output_tokens": longer * output}
            requests.append(row | ({"stop_after": output} if longer > 1 else {}))
        block = self.choice(8, 32)
        config = {
            "block_size": block,
            "usable_blocks": 2000 // block,
            "max_batch_size": 64,
            "max_num_tokens": 512,
            "policy": POLICIES["no-evict"],
            "chunked_context": True,
            "chunking": "FIRST_COME_FIRST_SERVED",
            "enable_block_reuse": True,
            "overlap": overlap,
        }
        cost = {"step_us": 5000, "token_us": 10, "context_ns": 100}
        return {"config": config, "cost": cost, "requests": requests}
