"""Fleets as others start them: `vllm serve` command lines, and manifests for Kubernetes, llm-d and Dynamo.

Each form has the command, too, that measures the same point with `aiperf`, from a trace in Mooncake's format.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

import yaml
from pagecast.planner_app.planner.fleet.vllm_options import PORT, serve_arguments
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.scenario import Scenario

_IMAGE = "vllm/vllm-openai:v0.24.0"
_DYNAMO_IMAGE = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.4.0"
_NAME = "pagecast-fleet"
_PICKER = f"{_NAME}-epp"
_PICKER_PORT = 9002  # where llm-d's endpoint picker answers a gateway
_LLMD_WEIGHTS = (
    ("queue-scorer", "queue"),
    ("kv-cache-utilization-scorer", "kv"),
    ("prefix-cache-scorer", "prefix"),
)
_DYNAMO_MODES = {
    "dynamo": "kv",
    "round-robin": "round-robin",
    "random": "random",
    "least-loaded": "least-loaded",
    "power-of-two": "power-of-two",
}
_DYNAMO_WEIGHTS = {
    "overlap_score_credit": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
    "prefill_load_scale": "DYN_ROUTER_PREFILL_LOAD_SCALE",
    "temperature": "DYN_ROUTER_TEMPERATURE",
}
_KV_EVENTS = (
    '{"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:20080","enable_kv_cache_events":true}'
)


def bench_command(scenario: Scenario, url: str) -> str:
    """The command that plays a trace at its own times against `url`; make the file with `trace convert`."""
    words = [
        "aiperf",
        "profile",
        "--model",
        scenario.model,
        "--url",
        url,
        "--endpoint-type",
        "chat",
        "--streaming",
    ]
    words += ["--input-file", "trace.jsonl", "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"]
    return shlex.join(words)


def emit(form: str, scenario: Scenario, settings: FleetSettings) -> str:
    """The fleet in a form of `FORMS`. Errors: BadInput for another form, or what it can't say."""
    if form not in FORMS:
        raise BadInput(f"--emit {form}: forms are {', '.join(FORMS)}")
    if any(group.role != "both" for group in settings.groups):
        raise BadInput("--emit: groups with roles can't be written; give a fleet without disaggregation")
    return FORMS[form](scenario, settings)


def _vllm(scenario: Scenario, settings: FleetSettings) -> str:
    """One command per replica, on ports of their own, and GPUs one after the other."""
    lines = [f"# {len(settings.scenarios(scenario))} replicas; router: {settings.router.policy}"]
    first_gpu = 0
    for number, (name, one) in enumerate(settings.scenarios(scenario)):
        gpus = ",".join(str(first_gpu + index) for index in range(one.tensor_parallel_size))
        first_gpu += one.tensor_parallel_size
        command = shlex.join(["vllm", "serve", *serve_arguments(one, PORT + number)])
        lines.append(f"CUDA_VISIBLE_DEVICES={gpus} {command}  # {name}, {one.gpu}")
    lines.append(f"# measure it: {bench_command(scenario, 'http://localhost:' + str(PORT))}")
    return "\n".join(lines) + "\n"


def _k8s(scenario: Scenario, settings: FleetSettings) -> str:
    """A Deployment per group and one Service."""
    documents: list[dict[str, Any]] = []
    for number, group in enumerate(settings.groups):
        one = settings.model_copy(update={"groups": (group,)}).scenarios(scenario)[0][1]
        labels = {"app": _NAME, "group": _label(group.name or f"group{number}")}
        container = {
            "name": "vllm",
            "image": _IMAGE,
            "args": serve_arguments(one),
            "ports": [{"containerPort": PORT, "name": "http"}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}},
            "resources": {"limits": {"nvidia.com/gpu": str(one.tensor_parallel_size)}},
        }
        documents.append(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": f"{_NAME}-{labels['group']}", "labels": labels},
                "spec": {
                    "replicas": group.replicas,
                    "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
                },
            }
        )
    documents.append(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": _NAME},
            "spec": {"selector": {"app": _NAME}, "ports": [{"port": PORT, "targetPort": PORT}]},
        }
    )
    return _documents(documents, scenario)


def _label(name: str) -> str:
    """A name as Kubernetes allows it: lower-case letters, digits and dashes, at most 40 of them."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "group"


def _llm_d(scenario: Scenario, settings: FleetSettings) -> str:
    """The Kubernetes manifests, the pool of their pods, and the endpoint picker's configuration.

    The configuration is a file of the picker (`--config-file`), with the weights simulated.
    """
    if settings.router.policy != "llm-d":
        raise BadInput(f"--emit llm-d: the router is {settings.router.policy}; use --router llm-d")
    weights = {"queue": 2.0, "kv": 2.0, "prefix": 3.0, **settings.router.options}
    scorers = [{"pluginRef": plugin, "weight": float(weights[name])} for plugin, name in _LLMD_WEIGHTS]
    picker = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [{"type": plugin} for plugin, _ in _LLMD_WEIGHTS] + [{"type": "max-score-picker"}],
        "schedulingProfiles": [
            {"name": "default", "plugins": [*scorers, {"pluginRef": "max-score-picker"}]},
        ],
    }
    pool = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": _NAME},
        "spec": {
            "selector": {"matchLabels": {"app": _NAME}},
            "targetPorts": [{"number": PORT}],
            "endpointPickerRef": {"name": _PICKER, "port": {"number": _PICKER_PORT}},
        },
    }
    documents = [yaml.safe_dump(document, sort_keys=False) for document in (pool, picker)]
    return "---\n".join([_k8s(scenario, settings), *documents])


def _dynamo(scenario: Scenario, settings: FleetSettings) -> str:
    """A DynamoGraphDeployment: a frontend with its router, and one worker service per group."""
    mode = _DYNAMO_MODES.get(settings.router.policy)
    if mode is None:
        raise BadInput(f"--emit dynamo: routers are {', '.join(_DYNAMO_MODES)}")
    options = settings.router.options if mode == "kv" else {}
    envs = {"DYN_ROUTER_MODE": mode} | {
        variable: str(options[name]) for name, variable in _DYNAMO_WEIGHTS.items() if name in options
    }
    services: dict[str, Any] = {
        "Frontend": {
            "componentType": "frontend",
            "replicas": 1,
            "envs": [{"name": name, "value": value} for name, value in envs.items()],
            "extraPodSpec": {"mainContainer": {"image": _DYNAMO_IMAGE}},
        }
    }
    for number, group in enumerate(settings.groups):
        one = settings.model_copy(update={"groups": (group,)}).scenarios(scenario)[0][1]
        arguments = serve_arguments(one)
        worker = ["--model", arguments[0], *arguments[3:]]
        if mode == "kv":
            worker += ["--kv-events-config", _KV_EVENTS]
        services[f"Worker{number}"] = {
            "componentType": "worker",
            "replicas": group.replicas,
            "resources": {"limits": {"gpu": str(one.tensor_parallel_size)}},
            "extraPodSpec": {
                "mainContainer": {
                    "image": _DYNAMO_IMAGE,
                    "command": ["python3", "-m", "dynamo.vllm"],
                    "args": worker,
                }
            },
        }
    document = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": _NAME},
        "spec": {"backendFramework": "vllm", "services": services},
    }
    return _documents([document], scenario)


def _documents(documents: list[dict[str, Any]], scenario: Scenario) -> str:
    text = "---\n".join(yaml.safe_dump(document, sort_keys=False) for document in documents)
    return f"# measure it: {bench_command(scenario, f'http://{_NAME}:{PORT}')}\n{text}"


FORMS: dict[str, Callable[[Scenario, FleetSettings], str]] = {
    "vllm": _vllm,
    "k8s": _k8s,
    "llm-d": _llm_d,
    "dynamo": _dynamo,
}
