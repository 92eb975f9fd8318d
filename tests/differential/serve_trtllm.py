"""Serves a specification by the core under TensorRT-LLM's rules, with the same clock as `drive_trtllm.py`."""

from __future__ import annotations

from typing import Any

from pagecast.sim.core.engines.registry import PROFILES
from pagecast.sim.core.engines.trtllm.settings import TrtllmSettings
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import StepPlan
from pagecast.sim.core.scheduler import Scheduler
from serve_sglang import Server
from sglang_decisions import Turn

PROFILE = {
    "GUARANTEED_NO_EVICT": "trtllm-guaranteed-no-evict",
    "MAX_UTILIZATION": "trtllm-max-utilization",
    "STATIC_BATCH": "trtllm-static",
}


class TrtllmServer(Server):
    """One specification being served under the policy that it names."""

    keeps_tokens = True

    def make_scheduler(self) -> Scheduler:
        """The core's scheduler for a configuration of TensorRT-LLM."""
        config: dict[str, Any] = self.config
        limits = Limits(
            num_blocks=config["usable_blocks"],
            block_size=config["block_size"],
            max_num_seqs=config["max_batch_size"],
            max_num_batched_tokens=config["max_num_tokens"],
            pipeline_depth=int(config["overlap"]),
            caching=config["enable_block_reuse"],
            engine=TrtllmSettings(config["chunked_context"], config["chunking"].lower()),
        )
        return Scheduler(limits, PROFILES[PROFILE[config["policy"]]])

    def _note(self, plan: StepPlan, end: int) -> None:
        self.turns.append(
            Turn(
                start_us=self.now_us,
                end_us=end,
                prefill=tuple((chunk.request.index, chunk.start, chunk.tokens) for chunk in plan.chunks),
                decodes=tuple(sorted(each.index for each in plan.decodes)),
                context=sum(plan.positions()),
                retracted=tuple(sorted(self.retracted)),
                waiting=tuple(sorted(request.index for request in self.scheduler.queue)),
                free_pages=self.scheduler.memory.free_blocks,
                evictable_pages=0,
                evicted_tokens=0,
                ratio=0.0,
            )
        )
