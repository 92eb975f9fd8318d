"""The speculation of a replay: what a scenario asks for, over a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.machine.models import model as find_model
from pagecast.sim.replay.metrics import statistics
from pagecast.sim.scenario import Scenario
from pagecast.sim.speculation.costs import NO_LOOKUP, SpeculationCosts, drafting_share
from pagecast.sim.speculation.lookup import lookup_of
from pagecast.sim.speculation.recorded import RecordedDrafts
from pagecast.sim.speculation.speculation import Speculation, draft_figures


def speculation_figures(parts: Sequence[Speculation]) -> dict[str, Any]:
    """Figures of one replica that speculates, or of several together; none without any.

    `itl_s` pools the times between outputs, `speculation` adds up what was drafted and accepted.
    """
    if not parts:
        return {}
    gaps_s = np.concatenate([part.gaps_s() for part in parts])
    return {"itl_s": statistics(gaps_s), "speculation": draft_figures(parts)}


def speculate(recorded: RecordedDrafts | None, scenario: Scenario, costs: StepCosts) -> Speculation | None:
    """How the requests of a replay speculate; None where they do not. Errors: BadInput.

    `recorded`: what the trace has recorded of it, which is followed; None: nothing.
    """
    config = scenario.speculation
    if config is None:
        return None
    draft_model = None if config.model is None else find_model(config.model)
    share = drafting_share(config, find_model(scenario.model), draft_model)
    return Speculation(
        config,
        seed=scenario.seed,
        ahead=scenario.pipelined,
        recorded=recorded,
        costs=SpeculationCosts(
            costs, config, share, lookup_of(costs) if config.method == "ngram" else NO_LOOKUP
        ),
    )
