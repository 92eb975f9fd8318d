"""Results of one value of a tuned knob: hits, waste in the last block, tables, times, room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pagecast.planner_app.planner.capacity.admitted import admitted, question_of
from pagecast.planner_app.planner.capacity.envelope import envelope
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.slo import Slo
from pagecast.planner_app.planner.sweep.space import KnobValue
from pagecast.planner_app.planner.sweep.trial import Figure, at, check_memory, figures_of
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import GIB
from pagecast.sim.replay import Kept, Result, replay
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
WAITING = 4  # users for each request that may run, at most


@dataclass(frozen=True)
class Tuning:
    """Data that all settings of a tuning share. An executor calls `run` with one value at a time.

    `admits`: search also for the users that a setting admits.
    """

    trace: Trace
    scenario: Scenario
    knob: str
    level: Slo
    admits: bool = True

    def run(self, value: KnobValue) -> dict[str, Any]:
        """Figures of a value by name; only `reason` where it can't run."""
        figures = self._replayed(value)
        if self.admits and not figures["reason"]:
            figures = {**self.concurrency(at(self.scenario, {self.knob: value})), **figures}
        return figures

    def _replayed(self, value: KnobValue) -> dict[str, Any]:
        try:
            scenario = at(self.scenario, {self.knob: value})
            check_memory(scenario)
            result = replay(self.trace, scenario, kept=Kept(steps=False))
        except BadInput as error:
            return {"reason": str(error)}
        verdict = self.level.verdict(result)
        room = envelope(self.trace, scenario, self.level)
        unknown = {"reused_prefix_tokens": None} if self.trace.lengths_only else {}  # its rate is None
        return {
            "reason": "",
            "meets": verdict.holds and not result.summary["rejected"],
            **{term.text: term.value for term in verdict.terms},
            "kv_gib": scenario.layout().block_bytes * scenario.blocks() / GIB,
            **figures_of(result),
            **unknown,
            **tables(result),
            "static_concurrency": room.concurrency,
            "static_limit": room.binding,
        }

    def concurrency(self, scenario: Scenario) -> dict[str, Any]:
        """Users of a closed loop without think time that keep the SLO, with few preemptions: `plan`'s search.

        0 where even one breaks it. `admissible_at_limit`: more were not tried. With an SLO those are as many
        as `plan` tries, 4 times `max_num_seqs`; without one, where nobody minds waiting, `max_num_seqs`, for
        more don't run at once.
        """
        most = scenario.max_num_seqs * (WAITING if self.level.terms else 1)
        ask = PlanOptions(slo=self.level.text, most_users=most)
        value = admitted(question_of(self.trace, scenario, ask)).value or 0
        return {"admissible_concurrency": value, "admissible_at_limit": value == most}


def tables(result: Result) -> dict[str, Figure]:
    """Overhead of blocks, as means over completed requests.

    `tail_waste_tokens`: unused tokens in a sequence's last block at its end; `tail_waste_share`: their share
    of all KV that sequences hold then. `table_entries`, `table_bytes`: a sequence's block tables, over all
    groups of layers. `lookup_blocks`: full blocks of a prompt, each hashed and looked up; `lookup_s`: the
    host time that the step costs charge for that.
    """
    scenario, size = result.scenario, result.scenario.block_tokens
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
