"""Knobs of a fleet in a sweep: how many replicas, how many of them only prefill, and which router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.routers.registry import KINDS, with_router
from pagecast.sim.fleet.settings import FleetSettings, ReplicaGroup

COUNTS = ("replicas", "prefill_replicas")
KNOBS = (*COUNTS, "router")
"""`replicas` counts all of them; `prefill_replicas` are those of them that only prefill, 0 for none: then
every replica prefills and decodes."""


def checked(name: str, written: str) -> str | int:
    """A value of a knob as it is written. Errors: BadInput."""
    if name == "router":
        if written not in KINDS:
            raise BadInput(f"router {written!r} is not known; routers are {', '.join(KINDS)}")
        return written
    least = 1 if name == "replicas" else 0
    if not written.isdecimal() or int(written) < least:
        raise BadInput(f"{name} is {written!r}: give a whole number, at least {least}")
    return int(written)


def fleet_at(settings: FleetSettings, point: Mapping[str, Any]) -> FleetSettings:
    """The fleet with a point's knobs; its other fields are no fleet's. Errors: BadInput for an empty role."""
    fields = settings.model_dump()
    router = point.get("router", settings.router.policy)
    if router != settings.router.policy:
        fields["router"] = with_router(settings.router, router).model_dump()
    if any(name in point for name in COUNTS):
        fields |= _groups(settings, point)
    return FleetSettings.make(fields, "sweep")


def _groups(settings: FleetSettings, point: Mapping[str, Any]) -> dict[str, Any]:
    roles: dict[str, ReplicaGroup] = {group.role: group for group in settings.groups}
    if len(roles) < len(settings.groups) or len(roles) > 2:
        raise BadInput("sweep: replicas and prefill_replicas need one group, or one for each role")
    total = point.get("replicas", sum(group.replicas for group in settings.groups))
    prefill = point.get("prefill_replicas", roles["prefill"].replicas if "prefill" in roles else 0)
    first = settings.groups[0]
    if not prefill:
        together = roles.get("both", first).model_dump()
        return {"groups": ({**together, "role": "both", "replicas": total},), "disaggregation": None}
    if prefill >= total:
        raise BadInput(f"{prefill} of {total} replicas prefill: none is left to decode")
    apart = [
        {**roles.get(role, first).model_dump(), "name": role, "role": role, "replicas": count}
        for role, count in (("prefill", prefill), ("decode", total - prefill))
    ]
    disaggregation = settings.disaggregation
    return {"groups": tuple(apart), "disaggregation": disaggregation.model_dump() if disaggregation else {}}
