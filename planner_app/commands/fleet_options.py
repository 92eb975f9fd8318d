"""The options that say which fleet serves a trace: how many replicas, and behind which router."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import yaml
from pagecast.planner_app.options import Flag, Options
from pagecast.sim.core.errors import BadInput, check_given_once
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.yaml_documents import parse_yaml
from pydantic import Field

ROUTERS = (
    "round-robin, random, least-loaded, power-of-two, session, prefix-affinity, cost, llm-d, dynamo, sglang, "
    "aibrix, production-stack"
)


class FleetOptions(Options):
    """A fleet file, the number of replicas, and fields of the router; what is given wins over the file."""

    fleet: Path | None = Field(
        default=None, description="YAML file of replicas and router; options given here win"
    )
    replicas: int | None = Field(default=None, ge=1, description="replicas behind a router [1]")
    router: str | None = Field(default=None, description=f"router: {ROUTERS} [round-robin]")
    router_option: tuple[str, ...] = Field(
        default=(), description="NAME=VALUE: a weight or threshold of the router"
    )
    metrics_period_s: Annotated[float | None, Flag(("--metrics-period",))] = Field(
        default=None, description="seconds between a router's scrapes of the engines [the router's]"
    )
    index: str | None = Field(
        default=None, description="how the router knows what is cached: approximate or events [the router's]"
    )
    index_delay_s: Annotated[float | None, Flag(("--index-delay",))] = Field(
        default=None, description="seconds until the router's prefix index has an entry [0]"
    )
    hop_s: Annotated[float | None, Flag(("--hop",))] = Field(
        default=None, description="seconds from the router to a replica [0]"
    )

    @property
    def any(self) -> bool:
        """Whether any option of a fleet was given."""
        return bool(self.given())

    def settings(self) -> FleetSettings:
        """The file's fleet, with the options that were given. Errors: BadInput."""
        fields: dict[str, Any] = {}
        if self.fleet is not None:
            fields = FleetSettings.load(self.fleet).model_dump()
        if self.replicas is not None:
            groups = fields.get("groups", ({},))
            if len(groups) > 1:
                raise BadInput(f"--replicas: {self.fleet} has several groups; set their replicas there")
            fields["groups"] = ({**groups[0], "replicas": self.replicas},)
        given = self.model_dump(exclude_unset=True, exclude={"fleet", "replicas", "router", "router_option"})
        router = {**fields.get("router", {}), **given}
        if self.router is not None:
            router["policy"] = self.router
        router["options"] = {**router.get("options", {}), **_options(self.router_option)}
        return FleetSettings.make({**fields, "router": router}, str(self.fleet or "options"))


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
