"""Builds replicas of a scenario: backend, tokenizer, metrics and application."""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd
from pagecast.planner_app.server.answers import Answers, Lengths, Mode
from pagecast.planner_app.server.app import Replica
from pagecast.planner_app.server.intake import Intake
from pagecast.planner_app.server.metrics import ServerMetrics
from pagecast.planner_app.server.options import ServerOptions
from pagecast.planner_app.server.simulated import SimulatedBackend
from pagecast.planner_app.server.tokenizer import Tokenizer
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.rules.profiles import profile as find_profile
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.machine.models import model as find_model
from pagecast.sim.replay.windows import blocks_per_block
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

_PROMPT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Simulation:
    """What only the simulated backend is told. `time_scale`: simulated seconds in a second."""

    time_scale: float = 1.0
    mode: Mode = "random"
    lengths: Lengths = field(default_factory=Lengths)

    def check(self) -> None:
        """Errors: BadInput naming the first option that can't work."""
        if not 0 < self.time_scale <= 1e6:
            raise BadInput(f"--time-scale is {self.time_scale}; it must be above 0")
        if self.mode not in ("random", "echo"):
            raise BadInput(f"--mode {self.mode!r} is not known; choose random or echo")


def max_model_len(scenario: Scenario) -> int:
    """The longest prompt and output together: the scenario's, the model's, and what the blocks hold."""
    limits = scenario.limits()
    longest = scenario.max_model_len or find_model(scenario.model).max_position
    return max(2, min(longest, limits.num_blocks * limits.block_size))


def simulated_replica(
    scenario: Scenario,
    costs: StepCosts,
    tokenizer: Tokenizer,
    options: ServerOptions,
    simulation: Simulation,
    number: int = 0,
) -> Replica:
    """A simulated replica of the scenario, the `number`-th of those served together. Errors: BadInput."""
    if scenario.speculation is not None:
        raise BadInput("`serve` simulates no speculative decoding; leave speculative_config out")
    limits = scenario.limits(_blocks_per_block(scenario, simulation))
    longest = max_model_len(scenario)
    answers = Answers(
        tokenizer, mode=simulation.mode, lengths=simulation.lengths, seed=hash((options.seed, number))
    )
    backend = SimulatedBackend(
        limits,
        find_profile(scenario.profile),
        costs,
        answers,
        max_model_len=longest,
        scale=simulation.time_scale,
        most_waiting=options.max_waiting_queue_length,
    )
    adapters = options.adapters
    metrics = ServerMetrics(
        backend,
        options.names[0],
        cache_config=_cache_config(scenario, limits.num_blocks),
        max_loras=options.max_loras if adapters else None,
        time_scale=simulation.time_scale,
    )
    backend.observer = metrics
    return Replica(backend, Intake(tokenizer, options.names, adapters, longest), metrics, options)


def _blocks_per_block(scenario: Scenario, simulation: Simulation) -> float:
    """See `blocks_per_block`, of a sequence with a prompt of middling length: no trace tells more."""
    row = {"arrival_s": [0.0], "input_tokens": [_PROMPT_TOKENS], "output_tokens": [simulation.lengths.mean]}
    return blocks_per_block(Trace("typical", pd.DataFrame(row)), scenario)


def _cache_config(scenario: Scenario, num_blocks: int) -> dict[str, str]:
    """The labels of `vllm:cache_config_info`."""
    return {
        "block_size": str(scenario.block_size),
        "cache_dtype": scenario.kv_cache_dtype,
        "enable_prefix_caching": str(scenario.enable_prefix_caching),
        "gpu_memory_utilization": str(scenario.gpu_memory_utilization),
        "num_gpu_blocks": str(num_blocks),
        "num_gpu_blocks_override": str(scenario.num_gpu_blocks),
    }
