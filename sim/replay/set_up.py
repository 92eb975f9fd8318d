"""Set-up of one replica that serves a trace: its limits, scheduler and requests.

A replay and the block view start from the same set-up, so both make the same decisions.
"""

from __future__ import annotations

from typing import NamedTuple

from pagecast.sim.core.kv_events import KvEventStream
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replay.speculating import speculate
from pagecast.sim.replay.tenancy import with_accounts
from pagecast.sim.replay.windows import blocks_per_block
from pagecast.sim.scenario import Scenario
from pagecast.sim.speculation.recorded import RecordedDrafts
from pagecast.sim.speculation.speculation import Speculation
from pagecast.traces.schema import Trace


class SetUp(NamedTuple):
    """The parts of a replica. `share`: the engine's blocks that one block of a sequence takes."""

    scheduler: Scheduler
    feed: Feed
    speculation: Speculation | None
    share: float


def set_up(
    trace: Trace,
    scenario: Scenario,
    costs: StepCosts,
    *,
    log: bool = False,
    kv_events: KvEventStream | None = None,
    numbered: bool = False,
) -> SetUp:
    """The set-up of a replica of `scenario` for `trace`; `log`: keep the scheduler's events.

    `numbered`: somebody asks for the numbers of blocks.

    Errors: BadInput for a scenario that can't serve the trace.
    """
    share = blocks_per_block(trace, scenario)
    limits = with_accounts(scenario.limits(share), trace)
    speculation = speculate(RecordedDrafts.of(trace), scenario, costs)
    rules = scenario.rules(costs, trace.integers("output_tokens").tolist())
    scheduler = Scheduler(limits, rules, log=log, kv_events=kv_events, drafter=speculation, numbered=numbered)
    return SetUp(scheduler, Feed(trace, limits.block_size, scenario), speculation, share)
