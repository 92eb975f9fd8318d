"""The options that say which fleet serves a trace: how many replicas, and behind which router."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pagecast.planner_app.commands.field_options import gathering, parameter
from pagecast.sim.core.errors import BadInput, check_given_once
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.yaml_documents import parse_yaml

Opt = typer.Option
ROUTERS = (
    "round-robin, random, least-loaded, power-of-two, session, prefix-affinity, cost, llm-d, dynamo, sglang, "
    "aibrix, production-stack"
)
_ROUTER_FIELDS = ("metrics_period_s", "index", "index_delay_s", "hop_s")


@dataclass(frozen=True, slots=True)
class GivenFleet:
    """Options of the command line: a fleet file, the number of replicas, and fields of the router."""

    file: Path | None = None
    replicas: int | None = None
    router: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        """Whether any option of a fleet was given."""
        return self.file is not None or self.replicas is not None or bool(self.router or self.options)

    def settings(self) -> FleetSettings:
        """The file's fleet, with the options that were given. Errors: BadInput."""
        fields: dict[str, Any] = {}
        if self.file is not None:
            fields = FleetSettings.load(self.file).model_dump()
        if self.replicas is not None:
            groups = fields.get("groups", ({},))
            if len(groups) > 1:
                raise BadInput(f"--replicas: {self.file} has several groups; set their replicas there")
            fields["groups"] = ({**groups[0], "replicas": self.replicas},)
        router = {**fields.get("router", {}), **self.router}
        router["options"] = {**router.get("options", {}), **_options(self.options)}
        return FleetSettings.make({**fields, "router": router}, str(self.file or "options"))


def _options(texts: Iterable[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in texts:
        name, value = _option(text)
        check_given_once(name, options, f"--router-option {text!r}: {name!r}")
        options[name] = value
    return options


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise BadInput(f"--router-option {text!r}: give NAME=VALUE")
    try:
        return name.strip(), parse_yaml(value)
    except yaml.YAMLError:
        return name.strip(), value


def _fleet(values: dict[str, Any]) -> GivenFleet:
    router = {name: values[name] for name in _ROUTER_FIELDS if values[name] is not None}
    if values["router"] is not None:
        router["policy"] = values["router"]
    options = tuple(values["router_option"] or ())
    return GivenFleet(values["fleet"], values["replicas"], router, options)


with_fleet = gathering(
    "fleet",
    [
        parameter(
            "fleet", Path | None, Opt(help="YAML file of replicas and router; options given here win"), None
        ),
        parameter("replicas", int | None, Opt(min=1, help="replicas behind a router [1]"), None),
        parameter("router", str | None, Opt(help=f"router: {ROUTERS} [round-robin]"), None),
        parameter(
            "router_option",
            list[str] | None,
            Opt(help="NAME=VALUE: a weight or threshold of the router"),
            None,
        ),
        parameter(
            "metrics_period_s",
            float | None,
            Opt("--metrics-period", help="seconds between a router's scrapes of the engines [the router's]"),
            None,
        ),
        parameter(
            "index",
            str | None,
            Opt(help="how the router knows what is cached: approximate or events [the router's]"),
            None,
        ),
        parameter(
            "index_delay_s",
            float | None,
            Opt("--index-delay", help="seconds until the router's prefix index has an entry [0]"),
            None,
        ),
        parameter("hop_s", float | None, Opt("--hop", help="seconds from the router to a replica [0]"), None),
    ],
    _fleet,
)
"""Puts the options of a fleet in the place of the parameter `fleet` of a command."""

FleetGiven = Annotated[GivenFleet, "replaced by `with_fleet`"]
