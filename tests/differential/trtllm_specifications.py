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


def specification(seed: int, policy: str) -> Spec:
    """The scenario of a seed under one of `POLICIES`."""
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
