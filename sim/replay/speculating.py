"""The speculation of a replay: what a scenario asks for, over a trace."""

from __future__ import annotations

from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.machine.models import model as find_model
from pagecast.sim.scenario import Scenario
from pagecast.sim.speculation.costs import NO_LOOKUP, SpeculationCosts, drafting_share
from pagecast.sim.speculation.lookup import lookup_of
from pagecast.sim.speculation.recorded import RecordedDrafts
from pagecast.sim.speculation.speculation import Speculation
from pagecast.traces.schema import Trace


def speculate(trace: Trace | None, scenario: Scenario, costs: StepCosts) -> Speculation | None:
    """How the requests of a replay speculate; None where they do not. Errors: BadInput.

    Without a `trace` nothing that it may have recorded is followed.
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
        recorded=None if trace is None else RecordedDrafts.of(trace),
        costs=SpeculationCosts(
            costs, config, share, lookup_of(costs) if config.method == "ngram" else NO_LOOKUP
        ),
    )
