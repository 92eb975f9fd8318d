"""Results of one value of a tuned knob: hits, waste in the last block, tables, times, room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pagecast.planner_app.planner.capacity import bisection
from pagecast.planner_app.planner.capacity.envelope import envelope
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.users import shortened
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
WAITING = 4  # users for each request that may run, at most


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of the knob to replay; or, with `concurrency`, all `values` to search for what each admits."""

    value: KnobValue = None
    values: tuple[KnobValue, ...] = ()

    @property
    def concurrency(self) -> bool:
        """Whether it is the search for what each value admits."""
        return bool(self.values)


@dataclass(frozen=True)
class Tuning:
    """Data that all settings of a tuning share. An executor calls `run` with one setting at a time.

    `brief`: what settings admit is compared by brief loads, in a third of the time and a few percent higher.
    """

    trace: Trace
    scenario: Scenario
    knob: str
    level: Slo
    brief: bool = False

    def run(self, setting: Setting) -> list[dict[str, Any]]:
        """Figures by name, of the value or of each of `values`; only `reason` where one can't run."""
        return self.admitted(setting.values) if setting.concurrency else [self._replayed(setting.value)]

    def admitted(self, values: Sequence[KnobValue]) -> list[dict[str, Any]]:
        """What each value admits, from the last to the first: a search begins at the answer before it.

        Less HBM is taken to admit no more users than more of it.
        """
        found: list[dict[str, Any]] = []
        last = None
        for value in reversed(values):
            try:
                scenario = at(self.scenario, {self.knob: value})
                check_memory(scenario)
                found.append(self.concurrency(scenario, last, never_more=self.knob != "block_size"))
                last = found[-1]["admissible_concurrency"]
            except BadInput as error:
                found.append({"reason": str(error)})
        return found[::-1]

    def _replayed(self, value: KnobValue) -> dict[str, Any]:
        try:
            scenario = at(self.scenario, {self.knob: value})
            check_memory(scenario)
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

    def concurrency(
        self, scenario: Scenario, last: int | None = None, *, never_more: bool = False
    ) -> dict[str, Any]:
        """Users of a closed loop without think time that keep the SLO, with few preemptions: `plan`'s search.

        To 1/64 of `max_num_seqs`; 0 where even one breaks it. `admissible_at_limit`: more were not tried.
        `last`: the answer of a like setting, to begin at; `never_more`: this one admits no more.
        With an SLO those are 4 times `max_num_seqs`, as `plan` tries; without one, where nobody
        minds waiting, `max_num_seqs`, for more don't run at once.
        """
        limit = most = scenario.max_num_seqs * (WAITING if self.level.terms else 1)
        near = max(scenario.max_num_seqs // 64, 1)
        if last is None:
            start = min(envelope(self.trace, scenario, self.level).concurrency, most)
            step = max(start // 8, 1)
        else:
            start, step = max(last, 1), near
            limit = start if never_more else most
        options = PlanOptions(slo=self.level.text, most_users=limit)
        trace = shortened(self.trace, options.most_requests)
        question = bisection.CapacityQuestion(trace, scenario, options, seed=scenario.seed)
        ask = bisection.Ask("concurrency", None, max(start, 1), step, near, verify=False, brief=self.brief)
        value = question.search(ask).answer.value or 0
        return {"admissible_concurrency": value, "admissible_at_limit": value == most}


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
