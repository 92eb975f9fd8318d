"""Results of one value of a tuned knob: hits, waste in the last block, tables, times, room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pagecast.planner_app.planner.capacity import bisection
from pagecast.planner_app.planner.capacity.envelope import envelope
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.slo import Slo
from pagecast.planner_app.planner.sweep.space import KnobValue
from pagecast.planner_app.planner.sweep.trial import Figure, at, check_memory, figures_of
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import GIB
from pagecast.sim.replay import Result, replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

ENTRY_BYTES = 4  # a block's number in a block table on the GPU (vLLM: int32)
TABLES = (
    "tail_waste_tokens",
    "tail_waste_share",
    "table_entries",
    "table_bytes",
    "lookup_blocks",
    "lookup_s",
)
MOST_REQUESTS = 1000  # of a closed loop, unless its users need more
WAITING = 4  # users for each request that may run, at most


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of the knob: its replay, or the search for the concurrency it admits."""

    value: KnobValue
    concurrency: bool = False


@dataclass(frozen=True)
class Tuning:
    """Data that all settings of a tuning share. An executor calls `run` with one setting at a time."""

    trace: Trace
    scenario: Scenario
    knob: str
    level: Slo

    def run(self, setting: Setting) -> dict[str, Any]:
        """Figures by name; only `reason` for a setting that can't run."""
        try:
            scenario = at(self.scenario, {self.knob: setting.value})
            check_memory(scenario)
            if setting.concurrency:
                return self.concurrency(scenario)
            result = replay(self.trace, scenario, keep_steps=False)
        except BadInput as error:
            return {"reason": str(error)}
        verdict = self.level.verdict(result)
        room = envelope(self.trace, scenario, self.level)
        return {
            "reason": "",
            "meets": verdict.holds and not result.summary["rejected"],
            **{term.text: term.value for term in verdict.terms},
            "kv_gib": scenario.layout().block_bytes * scenario.blocks() / GIB,
            **figures_of(result),
            **tables(result),
            "static_concurrency": room.concurrency,
            "static_limit": room.binding,
        }

    def concurrency(self, scenario: Scenario) -> dict[str, Any]:
        """Users of a closed loop without think time that keep the SLO, with few preemptions.

        To 1/64 of `max_num_seqs`; 0 where even one breaks it. `admissible_at_limit`: more were not tried.
        With an SLO those are 4 times `max_num_seqs`, as `plan` tries; without one, where nobody
        minds waiting, `max_num_seqs`, for more don't run at once.
        """
        most = scenario.max_num_seqs * (WAITING if self.level.terms else 1)
        start = min(envelope(self.trace, scenario, self.level).concurrency, most)
        options = PlanOptions(slo=self.level.text, most_users=most, most_requests=MOST_REQUESTS)
        question = bisection.CapacityQuestion(self.trace, scenario, options, seed=scenario.seed)
        near = max(scenario.max_num_seqs // 64, 1)
        ask = bisection.Ask("concurrency", start=max(start, 1), step=max(start // 8, 1), resolution=near)
        answer = question.search(ask).answer
        return {"admissible_concurrency": answer.value or 0, "admissible_at_limit": answer.at_limit}


def tables(result: Result) -> dict[str, Figure]:
    """Overhead of blocks, as means over completed requests.

    `tail_waste_tokens`: unused tokens in a sequence's last block at its end; `tail_waste_share`: their share
    of all KV that sequences hold then. `table_entries`, `table_bytes`: a sequence's block tables, over all
    groups of layers. `lookup_blocks`: full blocks of a prompt, each hashed and looked up; `lookup_s`: the
    host time that the step costs charge for that.
    """
    scenario, size = result.scenario, result.scenario.block_size
    done = result.requests[result.requests["state"] == "completed"]
    if not len(done):
        return dict.fromkeys(TABLES)
    tokens = (done["input_tokens"] + done["output_tokens"] - 1).to_numpy(np.int64)
    blocks = -(-tokens // size)
    entries = float(blocks.mean()) * scenario.layout().groups
    caching = scenario.enable_prefix_caching
    return {
        "tail_waste_tokens": float((blocks * size - tokens).mean()),
        "tail_waste_share": float((blocks * size - tokens).sum() / (blocks * size).sum()),
        "table_entries": entries,
        "table_bytes": entries * ENTRY_BYTES,
        "lookup_blocks": float((done["input_tokens"] // size).mean()) if caching else 0.0,
        "lookup_s": result.summary["prefix_lookup_s"]["mean"],
    }
