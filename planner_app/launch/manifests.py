"""Containers of a manifest that start an engine: of any workload of Kubernetes, of Dynamo, or of compose."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml
from pagecast.planner_app.launch.starts import Start, in_container
from pagecast.sim.core.errors import BadInput
from pagecast.sim.yaml_documents import parse_documents

_VARIABLE = re.compile(r"\$\((\w+)\)")
_GPU_LABELS = ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator")


@dataclass(frozen=True)
class _Around:
    """What the mappings around a container say of it."""

    name: str = ""
    replicas: int = 1
    gpu: str | None = None
    gpus: int | None = None


def starts_in(text: str, where: str) -> list[Start]:
    """Every start of an engine in a manifest's documents. Errors: BadInput naming the line."""
    try:
        documents = parse_documents(text)
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
        what = getattr(error, "problem", None) or "not YAML"
        raise BadInput(f"{where} line {line}: {what}; give a manifest, with templates filled in") from None
    return [start for document in documents for start in _walk(document, where, _Around())]


def _walk(value: Any, where: str, around: _Around) -> Iterator[Start]:
    if isinstance(value, list):
        for one in value:
            yield from _walk(one, where, around)
    if not isinstance(value, dict):
        return
    around = _seen(value, around)
    if _is_container(value):
        yield from _container(value, where, around)
        return
    for key, one in value.items():
        yield from _walk(one, where, replace(around, name=str(key)) if _is_service(key, one) else around)


def _is_container(value: dict[str, Any]) -> bool:
    return isinstance(value.get("image"), str) and not isinstance(value.get("containers"), list)


def _is_service(key: str, value: Any) -> bool:
    """Whether a mapping is a named service of Dynamo or compose."""
    if not isinstance(value, dict) or key == "mainContainer":
        return False
    return "componentType" in value or ("name" not in value and _is_container(value))


def _seen(value: dict[str, Any], around: _Around) -> _Around:
    metadata = value.get("metadata")
    if isinstance(metadata, dict) and metadata.get("name"):
        around = replace(around, name=str(metadata["name"]))
    if isinstance(value.get("replicas"), int):
        around = replace(around, replicas=value["replicas"])
    selector = value.get("nodeSelector")
    if isinstance(selector, dict):
        label = next((selector[name] for name in _GPU_LABELS if name in selector), None)
        around = replace(around, gpu=str(label) if label else around.gpu)
    gpus = _limits(value.get("resources"))
    return around if gpus is None else replace(around, gpus=gpus)


def _limits(resources: Any) -> int | None:
    """GPUs of the limits: `nvidia.com/gpu`, or Dynamo's `gpu`."""
    limits = resources.get("limits") if isinstance(resources, dict) else None
    if isinstance(limits, dict):
        for name, count in limits.items():
            if str(name).endswith("gpu") and str(count).isdecimal():
                return int(count)
    return None


def _container(value: dict[str, Any], where: str, around: _Around) -> Iterator[Start]:
    variables = _environment(value.get("env") or value.get("environment"))
    name = "/".join(part for part in (around.name, value.get("name")) if part and part != value.get("image"))
    start = Start(
        "",
        (),
        f"{where} {name}".strip(),
        variables=variables,
        gpus=around.gpus,
        gpu=around.gpu,
        replicas=around.replicas,
        name=name,
    )
    command, arguments = (_words(value.get(field), variables) for field in ("command", "args"))
    if "entrypoint" in value:  # of compose, where `command` are the arguments
        command, arguments = _words(value["entrypoint"], variables), command
    elif "args" not in value and "name" not in value:
        command, arguments = [], command
    yield from in_container(value["image"], command or None, arguments, start)


def _environment(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        return {str(name): str(value) for name, value in given.items()}
    pairs = [one.partition("=")[::2] for one in given or [] if isinstance(one, str)]
    named = [one for one in given or [] if isinstance(one, dict) and "value" in one]
    return dict(pairs) | {str(one.get("name")): str(one["value"]) for one in named}


def _words(given: Any, variables: dict[str, Any]) -> list[str]:
    """Words of `command` or `args`, with variables of the container, as Kubernetes puts them in."""
    words = shlex.split(given) if isinstance(given, str) else [str(word) for word in given or []]
    return [_VARIABLE.sub(lambda match: str(variables.get(match[1], match[0])), word) for word in words]
