"""Builds replicas of a scenario: backend, tokenizer, metrics and application."""

from __future__ import annotations

from typing import Any

from pagecast import __version__
from pagecast.planner_app.server.answers import Answers
from pagecast.planner_app.server.app import ReplicaServer
from pagecast.planner_app.server.intake import RequestIntake
from pagecast.planner_app.server.kv_events import KvEvents, Publisher
from pagecast.planner_app.server.metrics import ServerMetrics
from pagecast.planner_app.server.options import ServeOptions, Simulation
from pagecast.planner_app.server.recording import JournalKeeper
from pagecast.planner_app.server.simulated import SimulatedBackend
from pagecast.planner_app.server.tokenizer import Tokenizer
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.limits import Limits
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.replica.workload import ExpectedWorkload
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import COLUMNS

_PROMPT_TOKENS = 1024  # of a typical request: no trace tells more


def max_model_len(scenario: Scenario) -> int:
    """The longest prompt and output together: the scenario's, the model's, and what the blocks hold."""
    limits = scenario.limits()
    longest = scenario.max_model_len or scenario.facts().max_position
    return max(2, min(longest, limits.num_blocks * limits.block_size))


def simulated_replica(
    scenario: Scenario,
    costs: StepCosts,
    tokenizer: Tokenizer,
    options: ServeOptions,
    simulation: Simulation,
    number: int = 0,
) -> ReplicaServer:
    """A simulated replica of the scenario, the `number`-th of those served together. Errors: BadInput."""
    _check_served(scenario)
    simulation.check()
    spec = ReplicaSpec.of(scenario, ExpectedWorkload(_PROMPT_TOKENS, simulation.lengths.mean), costs)
    limits = spec.limits
    longest = max_model_len(scenario)
    answers = Answers(
        tokenizer, mode=simulation.mode, lengths=simulation.lengths, seed=hash((scenario.seed, number))
    )
    backend = SimulatedBackend(
        spec,
        answers,
        max_model_len=longest,
        scale=simulation.time_scale,
        log_events=options.kv_events_endpoint is not None,
    )
    if options.record is not None:
        folder = options.record if options.replicas == 1 else options.record / f"replica-{number}"
        meta = _meta(scenario, limits, simulation) | {"key_lookahead": spec.key_lookahead}
        backend.history.add(JournalKeeper(folder, meta, segment_bytes=options.record_segment_bytes))
    if options.kv_events_endpoint is not None:
        publisher = Publisher(
            _next_port(options.kv_events_endpoint, number),
            options.kv_events_replay_endpoint and _next_port(options.kv_events_replay_endpoint, number),
            options.topic(number),
            number,
        )
        backend.history.add(KvEvents(lambda: backend.scheduler.events, publisher, options.event_batch_size))
    adapters = options.adapters
    metrics = ServerMetrics(
        backend,
        options.names[0],
        cache_config=_cache_config(scenario, limits.num_blocks),
        max_loras=(scenario.max_loras or 1) if adapters else None,
        time_scale=simulation.time_scale,
        host_alone=limits.host is None or not limits.host.disk,
    )
    backend.observer = metrics
    echoes = simulation.mode == "echo"
    intake = RequestIntake(
        tokenizer,
        options.names,
        adapters,
        longest,
        vocabulary=max(scenario.facts().vocab, tokenizer.vocabulary),
        echoes=echoes,
    )
    return ReplicaServer(backend, intake, metrics, options)


def _check_served(scenario: Scenario) -> None:
    """Errors: BadInput for a field that only a replay follows: it compares two of them, or reads a trace."""
    replays = {"rollout_at_s": scenario.rollout_at_s is not None, "isolation_price": scenario.isolation_price}
    for name, given in replays.items():
        if given:
            raise BadInput(f"{name} is for replays, which are compared with one another: leave it out")
    with_trace = scenario.without_effect(COLUMNS)
    for names, need in scenario.without_effect(()):
        if (names, need) not in with_trace:
            raise BadInput(f"{names[0]} needs {need}, and requests over HTTP have none: leave it out")


def _features(scenario: Scenario, limits: Limits) -> dict[str, Any]:
    """Host tier and speculation as `meta.json` describes them; nothing where there are none."""
    features: dict[str, Any] = {}
    host, speculation = limits.host, scenario.speculation
    if host is not None:
        features["kv_load_failure_policy"] = host.policy.kv_load_failure_policy
        features["kv_offloading"] = host.recorded()
    if speculation is not None:
        features["speculative_config"] = speculation.model_dump(mode="json", exclude_defaults=True)
    return features


def _next_port(endpoint: str, number: int) -> str:
    """The endpoint of the `number`-th replica: as many ports further on."""
    place, _, port = endpoint.rpartition(":")
    if number == 0 or not port.isdigit():
        return endpoint if number == 0 else f"{endpoint}_{number}"
    return f"{place}:{int(port) + number}"


def _meta(scenario: Scenario, limits: Limits, simulation: Simulation) -> dict[str, Any]:
    """The `meta.json` of a run that is recorded on this replica."""
    facts = scenario.facts()
    return {
        "name": f"{scenario.model.rsplit('/', 1)[-1]} served",
        "engine": "pagecast simulated",
        "engine_version": __version__,
        "gpu": scenario.gpu,
        "model": facts.name,
        "model_name": facts.name,
        "usable_blocks": limits.num_blocks,
        "profile": scenario.engine,
        "costs": scenario.costs,
        "time_scale": simulation.time_scale,
        "config": {
            "tensor_parallel_size": scenario.tensor_parallel_size,
            **limits.options(),
            "max_loras": limits.max_loras,
            "kv_cache_dtype": scenario.kv_cache_dtype,
            "num_gpu_blocks_override": scenario.num_gpu_blocks,
            **_features(scenario, limits),
        },
    }


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
