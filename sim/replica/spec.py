"""Specification of a replica: all that follows from a scenario and a workload."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagecast.sim.core.engines.vllm.settings import VllmSettings
from pagecast.sim.core.tenants import Tenants
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.machine.host_link import HostLinks
from pagecast.sim.machine.models import model as find_model
from pagecast.sim.replica.scheduler_spec import SchedulerSpec
from pagecast.sim.replica.windows import blocks_per_block
from pagecast.sim.replica.workload import Workload
from pagecast.sim.scenario import Scenario
from pagecast.sim.speculation.config import SpeculativeConfig
from pagecast.sim.speculation.costs import NO_LOOKUP, SpeculationCosts, drafting_share
from pagecast.sim.speculation.lookup import lookup_of


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplicaSpec(SchedulerSpec):
    """What a replica is made of. Equal replicas share one spec, which is their kind.

    `links`: how fast blocks are copied to its host tier, if it has one. `draft_costs`: times of steps whose
    requests speculate. `swap_ns_per_token`: the time that a token of a preempted request takes to host
    memory, or back. `scrub_ns_per_block`: the time to overwrite an evicted block of a tenant; then there are
    no stretches. `blocks_per_block`: the engine's blocks that one block of a sequence takes (`windows.py`).
    """

    scenario: Scenario
    costs: StepCosts
    links: HostLinks | None = None
    draft_costs: SpeculationCosts | None = None
    swap_ns_per_token: float = 0.0
    scrub_ns_per_block: float = 0.0
    blocks_per_block: float = 1.0

    @classmethod
    def of(cls, scenario: Scenario, workload: Workload, costs: StepCosts | None = None) -> ReplicaSpec:
        """The spec of a scenario's replica; `costs` replaces the scenario's cost model.

        Errors: BadInput for a scenario that can't be used, or can't serve the workload.
        """
        costs = costs or scenario.step_costs()
        share = blocks_per_block(workload, scenario)
        limits = scenario.limits(share)
        if limits.tenants is None and not limits.groups and workload.has_tenants:
            limits = replace(limits, tenants=Tenants())
        if workload.longest_item and isinstance(limits.engine, VllmSettings):
            settings = limits.engine.with_items(limits.max_num_batched_tokens, workload.longest_item)
            limits = replace(limits, engine=settings)
        speculation = scenario.speculation
        return cls(
            scenario=scenario,
            limits=limits,
            rules=scenario.rules(costs, workload.outputs),
            speculation=speculation,
            drafts=workload.drafts,
            seed=scenario.seed,
            costs=costs,
            links=scenario.host_links(costs),
            draft_costs=None if speculation is None else _draft_costs(speculation, scenario, costs),
            swap_ns_per_token=scenario.swap_ns_per_token(),
            scrub_ns_per_block=scenario.scrub_ns_per_block(),
            blocks_per_block=share,
        )


def _draft_costs(config: SpeculativeConfig, scenario: Scenario, costs: StepCosts) -> SpeculationCosts:
    draft_model = None if config.model is None else find_model(config.model)
    share = drafting_share(config, scenario.facts(), draft_model)
    return SpeculationCosts(costs, config, share, lookup_of(costs) if config.method == "ngram" else NO_LOOKUP)
