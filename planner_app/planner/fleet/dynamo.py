"""DynamoGraphDeployment of a fleet: a frontend with its router, and one worker service per group.

Source: Dynamo 1.4, examples/backends/vllm/deploy.
"""

from __future__ import annotations

from typing import Any

from pagecast.planner_app.planner.fleet.kubernetes import NAME
from pagecast.planner_app.planner.fleet.vllm_options import serve_arguments
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import FleetSettings, ReplicaGroup
from pagecast.sim.scenario import Scenario

_IMAGE = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.4.0"
_MODES = {
    "dynamo": "kv",
    "round-robin": "round-robin",
    "random": "random",
    "least-loaded": "least-loaded",
    "power-of-two": "power-of-two",
}
_WEIGHTS = {
    "overlap_score_credit": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
    "prefill_load_scale": "DYN_ROUTER_PREFILL_LOAD_SCALE",
    "temperature": "DYN_ROUTER_TEMPERATURE",
}
_KV_EVENTS = (
    '{"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:20080","enable_kv_cache_events":true}'
)


def graph(scenario: Scenario, settings: FleetSettings) -> dict[str, Any]:
    """The document. Errors: BadInput for a router that Dynamo does not have."""
    mode = _MODES.get(settings.router.policy)
    if mode is None:
        raise BadInput(f"--emit dynamo: routers are {', '.join(_MODES)}")
    options = settings.router.options if mode == "kv" else {}
    envs = {"DYN_ROUTER_MODE": mode} | {
        variable: str(options[name]) for name, variable in _WEIGHTS.items() if name in options
    }
    services: dict[str, Any] = {
        "Frontend": {
            "componentType": "frontend",
            "replicas": 1,
            "envs": [{"name": name, "value": value} for name, value in envs.items()],
            "extraPodSpec": {"mainContainer": {"image": _IMAGE}},
        }
    }
    for number, group in enumerate(settings.groups):
        if group.replicas:
            one = settings.group_scenario(number, scenario)
            services[f"Worker{number}"] = _worker(one, group, events=mode == "kv")
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": NAME},
        "spec": {"backendFramework": "vllm", "services": services},
    }


def _worker(scenario: Scenario, group: ReplicaGroup, *, events: bool) -> dict[str, Any]:
    """One group. Dynamo hands KV over by itself where workers have the roles prefill and decode."""
    model, _, _, *rest = serve_arguments(scenario)
    arguments = ["--model", model, *rest]
    role: dict[str, Any] = {}
    if group.role != "both":
        arguments += ["--disaggregation-mode", group.role]
        role["subComponentType"] = group.role
    if events and group.role != "decode":
        arguments += ["--kv-events-config", _KV_EVENTS]
    return {
        "componentType": "worker",
        **role,
        "replicas": group.replicas,
        "resources": {"limits": {"gpu": str(scenario.tensor_parallel_size)}},
        "extraPodSpec": {
            "mainContainer": {
                "image": _IMAGE,
                "command": ["python3", "-m", "dynamo.vllm"],
                "args": arguments,
            }
        },
    }
