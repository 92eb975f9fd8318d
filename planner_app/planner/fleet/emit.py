"""Fleets as others start them: `vllm serve` command lines, and manifests for Kubernetes, llm-d and Dynamo.

Each form has the command, too, that measures the same point with `aiperf`, from a trace in Mooncake's format.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from pagecast.planner_app.planner.fleet import dynamo, kubernetes
from pagecast.planner_app.planner.fleet.vllm_options import PORT, serve_arguments
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.scenario import Scenario
from pagecast.sim.yaml_documents import yaml_text

_SIDE_CHANNEL = 5600  # vLLM's first port for handing over KV; each GPU of a replica takes one


def emit(form: str, scenario: Scenario, settings: FleetSettings) -> str:
    """The fleet in a form of `FORMS`. Errors: BadInput for another form, or what it can't say."""
    check_form(form)
    settings.roles()
    return FORMS[form](scenario, settings)


def check_form(form: str) -> None:
    """Errors: BadInput for a form that is not known."""
    if form not in FORMS:
        raise BadInput(f"--emit {form}: forms are {', '.join(FORMS)}")


def bench_command(scenario: Scenario, url: str) -> str:
    """The command that plays a trace at its own times against `url`; make the file with `trace convert`."""
    words = ["aiperf", "profile", "--model", scenario.model, "--url", url]
    words += ["--endpoint-type", "chat", "--streaming"]
    words += ["--input-file", "trace.jsonl", "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"]
    return shlex.join(words)


def _vllm(scenario: Scenario, settings: FleetSettings) -> str:
    """One command per replica, on ports of their own, and GPUs one after the other."""
    members = settings.scenarios(scenario)
    lines = [f"# {len(members)} replicas; router: {settings.router.policy}"]
    apart = settings.disaggregation is not None
    if apart:
        lines.append(
            "# prefill and decode apart: a proxy sends each request to a prefill replica first, then to a "
            "decode replica (vllm-router --vllm-pd-disaggregation)"
        )
    first_gpu = 0
    for number, (name, one) in enumerate(members):
        gpus = ",".join(str(first_gpu + index) for index in range(one.tensor_parallel_size))
        variables = f"CUDA_VISIBLE_DEVICES={gpus}"
        if apart:
            variables += f" VLLM_NIXL_SIDE_CHANNEL_PORT={_SIDE_CHANNEL + first_gpu}"
        first_gpu += one.tensor_parallel_size
        command = shlex.join(["vllm", "serve", *serve_arguments(one, PORT + number, hands_over=apart)])
        lines.append(f"{variables} {command}  # {name}, {one.gpu}")
    lines.append(f"# measure it: {bench_command(scenario, 'http://localhost:' + str(PORT))}")
    return "\n".join(lines) + "\n"


def _k8s(scenario: Scenario, settings: FleetSettings) -> str:
    return _documents(kubernetes.deployments(scenario, settings), scenario)


def _llm_d(scenario: Scenario, settings: FleetSettings) -> str:
    return _documents(kubernetes.llm_d(scenario, settings), scenario)


def _dynamo(scenario: Scenario, settings: FleetSettings) -> str:
    return _documents([dynamo.graph(scenario, settings)], scenario)


def _documents(documents: list[dict[str, Any]], scenario: Scenario) -> str:
    text = "---\n".join(yaml_text(document) for document in documents)
    return f"# measure it: {bench_command(scenario, f'http://{kubernetes.NAME}:{PORT}')}\n{text}"


FORMS: dict[str, Callable[[Scenario, FleetSettings], str]] = {
    "vllm": _vllm,
    "k8s": _k8s,
    "llm-d": _llm_d,
    "dynamo": _dynamo,
}
