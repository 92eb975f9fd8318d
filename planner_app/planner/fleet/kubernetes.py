"""Kubernetes manifests of a fleet: Deployments and a Service, and what llm-d's router needs beside them.

Source of llm-d's parts: llm-d-router 0.9, deploy/config and docs/disaggregation.md.
"""

from __future__ import annotations

import re
from typing import Any

from pagecast.planner_app.planner.fleet.vllm_options import PORT, serve_arguments
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import Disaggregation, FleetSettings
from pagecast.sim.scenario import Scenario

NAME = "pagecast-fleet"
_SIDECAR_IMAGE = "ghcr.io/llm-d/llm-d-router-disagg-sidecar:v0.9.0"
_BEHIND_SIDECAR = 8200  # port of a decode replica's engine, behind the sidecar that has `PORT`
_ROLE = "llm-d.ai/role"
_PICKER = f"{NAME}-epp"
_PICKER_PORT = 9002  # where llm-d's endpoint picker answers a gateway
_SCORERS = (
    ("queue-scorer", "queue"),
    ("kv-cache-utilization-scorer", "kv"),
    ("prefix-cache-scorer", "prefix"),
)
_BEST = "max-score-picker"

Document = dict[str, Any]


def deployments(scenario: Scenario, settings: FleetSettings) -> list[Document]:
    """A Deployment per group, and one Service. Errors: BadInput for prefill and decode apart."""
    if settings.disaggregation is not None:
        raise BadInput(
            "--emit k8s: a Service can't send a request to a prefill and then to a decode replica; use "
            "--emit llm-d, dynamo or vllm"
        )
    return _replicas(scenario, settings)


def llm_d(scenario: Scenario, settings: FleetSettings) -> list[Document]:
    """The same, the pool of their pods, and the endpoint picker's configuration.

    The configuration is a file of the picker (`--config-file`), with the weights simulated. Decode replicas
    have llm-d's sidecar in front, which asks a prefill replica first. Errors: BadInput for other routers.
    """
    if settings.router.policy != "llm-d":
        raise BadInput(f"--emit llm-d: the router is {settings.router.policy}; use --router llm-d")
    pool = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": NAME},
        "spec": {
            "selector": {"matchLabels": {"app": NAME}},
            "targetPorts": [{"number": PORT}],
            "endpointPickerRef": {"name": _PICKER, "port": {"number": _PICKER_PORT}},
        },
    }
    return [*_replicas(scenario, settings), pool, _picker(settings)]


def _replicas(scenario: Scenario, settings: FleetSettings) -> list[Document]:
    documents = []
    names: dict[str, str] = {}
    for number, group in enumerate(settings.groups):
        if not group.replicas:
            continue
        one = settings.group_scenario(number, scenario)
        name = group.name or f"group{number}"
        labels = {"app": NAME, "group": _label(name)}
        other = names.setdefault(labels["group"], name)
        if other != name:
            raise BadInput(
                f"--emit: groups {other} and {name} would both be {labels['group']} in Kubernetes; rename one"
            )
        if group.role != "both":
            labels[_ROLE] = group.role
        documents.append(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": f"{NAME}-{labels['group']}", "labels": labels},
                "spec": {
                    "replicas": group.replicas,
                    "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": _pod(one, group.role)},
                },
            }
        )
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {"selector": {"app": NAME}, "ports": [{"port": PORT, "targetPort": PORT}]},
    }
    return [*documents, service]


def _pod(scenario: Scenario, role: str) -> Document:
    port = _BEHIND_SIDECAR if role == "decode" else PORT
    container: Document = {
        "name": "vllm",
        "image": f"vllm/vllm-openai:v{scenario.profile.version}.0",
        "args": serve_arguments(scenario, port, hands_over=role != "both"),
        "ports": [{"containerPort": port, "name": "http"}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": port}},
        "resources": {"limits": {"nvidia.com/gpu": str(scenario.tensor_parallel_size)}},
    }
    if role != "both":
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        container["env"] = [{"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": address}]
    pod: Document = {"containers": [container]}
    if role == "decode":
        sidecar = {
            "name": "routing-sidecar",
            "image": _SIDECAR_IMAGE,
            "args": [f"--port={PORT}", "--kv-connector=nixlv2", "--secure-proxy=false"],
            "ports": [{"containerPort": PORT, "name": "sidecar"}],
            "restartPolicy": "Always",
        }
        pod["initContainers"] = [sidecar]
    return pod


def _picker(settings: FleetSettings) -> Document:
    """The endpoint picker's configuration."""
    weights = {"queue": 2.0, "kv": 2.0, "prefix": 3.0, **settings.router.options}
    by_score = [{"pluginRef": plugin, "weight": float(weights[name])} for plugin, name in _SCORERS]
    best = {"pluginRef": _BEST}
    plugins: list[Document] = [*({"type": plugin} for plugin, _ in _SCORERS), {"type": _BEST}]
    profiles = [{"name": "default", "plugins": [*by_score, best]}]
    apart = settings.disaggregation
    if apart is not None:
        by_queue = [{"pluginRef": "queue-scorer", "weight": 1.0}]
        to_decode = {"llm-d": by_score, "least-loaded": by_queue}.get(apart.decode_router)
        if to_decode is None:
            raise BadInput(
                f"--emit llm-d: the decode replicas' router is {apart.decode_router}; llm-d and least-loaded "
                "can be written"
            )
        plugins += [{"type": "prefill-filter"}, {"type": "decode-filter"}, *_decider(apart)]
        profiles = [
            {"name": "prefill", "plugins": [{"pluginRef": "prefill-filter"}, *by_score, best]},
            {"name": "decode", "plugins": [{"pluginRef": "decode-filter"}, *to_decode, best]},
        ]
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": plugins,
        "schedulingProfiles": profiles,
    }


def _decider(apart: Disaggregation) -> list[Document]:
    """The plugins that say which prompts go to a prefill replica."""
    kind = "prefix-based-pd-decider" if apart.remote_tokens else "always-disagg-pd-decider"
    decider: Document = {"type": kind}
    if apart.remote_tokens:
        decider["parameters"] = {"nonCachedTokens": apart.remote_tokens}
    return [
        {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": kind}}},
        decider,
    ]


def _label(name: str) -> str:
    """A name as Kubernetes allows it: lower-case letters, digits and dashes, at most 40 of them."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "group"
