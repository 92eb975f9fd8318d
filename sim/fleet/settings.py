"""Settings of a fleet: its replicas and its router. One form for the command line, YAML and Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pagecast.sim.core.errors import BadInput, check_given_once
from pagecast.sim.documents import field_problem
from pagecast.sim.scenario import Scenario
from pagecast.sim.yaml_documents import read_mapping, yaml_text
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MOST_REPLICAS = 10_000  # of a group: each has blocks and queues of its own
# Fields by which a trace's requests are made, whichever replica serves them.
_OF_REQUESTS = ("isolation", "isolation_price", "public_namespaces", "retention", "rollout_at_s")


def changed_scenario(base: Scenario, fields: dict[str, Any], where: str) -> Scenario:
    """The scenario of some replicas: `base` with other fields.

    Errors: BadInput for a field that is not a scenario's, or that must be the same for all replicas.
    """
    scenario = Scenario.make({**base.flat(), **fields}, where)
    for name in _OF_REQUESTS:
        if scenario.given.get(name) != base.given.get(name):
            raise BadInput(f"{where}: {name} is for all replicas; give it to the whole fleet's scenario")
    return scenario


def _check_handover(members: list[tuple[str, Scenario]]) -> None:
    """Refuses replicas that hand KV to each other and cannot read it.

    The numbers of a KV cache are of one model and dtype, and of the same tokens in each layer. Block size and
    tensor parallelism may differ: what is carried is counted in tokens.
    Errors: BadInput naming two replicas, and the field in which they differ.
    """
    first_name, first = members[0]
    for name, scenario in members[1:]:
        if scenario == first:
            continue
        pairs = {
            "model": (first.facts().name, scenario.facts().name),
            "kv_cache_dtype": (first.kv_cache_dtype, scenario.kv_cache_dtype),
        }
        if set(first.layout().windows) != set(scenario.layout().windows):
            field = "disable_hybrid_kv_cache_manager"
            pairs[field] = (getattr(first, field), getattr(scenario, field))
        for field, (here, there) in pairs.items():
            if here != there:
                raise BadInput(
                    f"fleet: disaggregation hands KV from one replica to another, and {first_name} has "
                    f"{field} {here}, {name} {there}; give both the same"
                )


class RouterSettings(BaseModel):
    """A router, and how much of the fleet it sees. What is left out is the router's own default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    policy: str = Field("round-robin", description="router")
    metrics_period_s: float | None = Field(
        None, gt=0, description="seconds between scrapes of the engines' gauges"
    )
    index: Literal["approximate", "events"] | None = Field(
        None, description="how the router knows what is cached: its own guess, or the engines' KV events"
    )
    block_tokens: int | None = Field(None, ge=1, description="tokens in a block of the approximate index")
    index_blocks: int | None = Field(None, ge=1, description="blocks per replica in the approximate index")
    index_ttl_s: float | None = Field(None, gt=0, description="seconds that an index entry is believed")
    index_delay_s: float | None = Field(None, ge=0, description="seconds until the index has an entry")
    hop_s: float = Field(0.0, ge=0, description="seconds that a request takes from router to replica")
    options: dict[str, float | int | str | bool] = Field(
        default_factory=dict, description="weights and thresholds of the router, by name"
    )


class ReplicaGroup(BaseModel):
    """Equal replicas. `scenario` has fields that differ from the fleet's."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    replicas: int = Field(1, ge=0, le=MOST_REPLICAS, description="how many")
    role: Literal["both", "prefill", "decode"] = Field("both", description="what the replicas do")
    name: str = Field("", description="name of the group; its replicas are NAME-0, NAME-1, ...")
    scenario: dict[str, Any] = Field(default_factory=dict, description="fields of the scenario that differ")


class Incident(BaseModel):
    """Something that happens to one replica."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    at_s: float = Field(ge=0, description="seconds from the trace's start")
    replica: str = Field(description="its name")
    kind: Literal["loss", "drain"] = Field("loss", description="gone at once, or after its last request")
    back_after_s: float | None = Field(
        None, ge=0, description="seconds after which a replacement is started; none: never"
    )


class Startup(BaseModel):
    """How long a new replica takes: its weights are read, then the engine starts."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    source: Literal["disk", "peer"] = Field("disk", description="where the weights come from")
    disk_bytes_per_s: float = Field(2e9, gt=0, description="rate of a disk, for all GPUs of a replica")
    peer_bytes_per_s: float = Field(25e9, gt=0, description="rate from another replica, for each GPU")
    engine_s: float = Field(40.0, ge=0, description="start of the engine: processes, compilation, graphs")


class Retries(BaseModel):
    """Retries of the requests of a lost replica."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    most: int = Field(2, ge=0, description="times that a request is sent again; then it is rejected")
    after_s: float = Field(1.0, ge=0, description="seconds until the loss is noticed")


class Scaling(BaseModel):
    """Autoscaling by a metric's mean over the ready replicas, as Kubernetes' horizontal autoscaler does."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    metric: Literal["queue", "kv", "ttft"] = Field("queue", description="what is measured")
    target: float = Field(gt=0, description="waiting requests, share of KV blocks, or seconds of TTFT")
    least: int = Field(1, ge=0, description="fewest replicas")
    most: int = Field(ge=1, description="most replicas")
    every_s: float = Field(15.0, gt=0, description="seconds between looks")
    down_after_s: float = Field(300.0, ge=0, description="seconds of less need before a replica is drained")
    tolerance: float = Field(0.1, ge=0, description="relative distance from the target that changes nothing")

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.least > self.most:
            raise ValueError(
                f"least is {self.least} and most is {self.most}; lower least, or raise most to it at least"
            )
        return self


class Rollout(BaseModel):
    """A new revision in place of every replica, `surge` at a time: started, then the old one is drained."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    at_s: float = Field(ge=0, description="seconds from the trace's start")
    scenario: dict[str, Any] = Field(default_factory=dict, description="fields of the scenario that change")
    surge: int = Field(1, ge=1, description="replicas started at once")


def _default(kind: type[BaseModel]) -> Any:
    return Field(default_factory=lambda: kind.model_validate({}))


class Disaggregation(BaseModel):
    """Prefill and decode on replicas of their own: groups with the roles `prefill` and `decode`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    decode_router: str = Field("least-loaded", description="router of the decode replicas")
    remote_tokens: int = Field(
        0, ge=0, description="prompts that lack fewer tokens at the decode replica are computed there"
    )
    transfer: Literal["missing", "full"] = Field("missing", description="what is carried of a prompt")
    first_token: Literal["decode", "prefill"] = Field(
        "decode", description="which replica's first token the client gets (vLLM: decode)"
    )
    bytes_per_s: float = Field(
        50e9, gt=0, description="link of a replica, each way: NVLink 450e9, InfiniBand 50e9, PCIe 64e9"
    )
    latency_s: float = Field(0.0001, ge=0, description="latency of a transfer")
    after_step: bool = Field(
        False, description="a transfer begins after the decode replica's step in flight, not beside it"
    )


class FleetSettings(BaseModel):
    """Everything besides trace and scenario that a fleet's replay depends on."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    groups: tuple[ReplicaGroup, ...] = Field(
        default_factory=lambda: (ReplicaGroup.model_validate({}),), description="the replicas", strict=False
    )
    router: RouterSettings = Field(
        default_factory=lambda: RouterSettings.model_validate({}), description="the router"
    )

    incidents: tuple[Incident, ...] = Field((), description="losses and drains", strict=False)
    retries: Retries = _default(Retries)
    startup: Startup = _default(Startup)
    scaling: Scaling | None = Field(None, description="autoscaling of the first group")
    rollout: Rollout | None = Field(None, description="a new revision")
    disaggregation: Disaggregation | None = Field(None, description="prefill and decode apart")
    price_per_gpu_hour: float | None = Field(None, ge=0, description="what one GPU costs per hour")

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        """Replicas are named after their groups, and told apart by name."""
        names = [self.group_name(number) for number in range(len(self.groups))]
        for number, name in enumerate(names):
            remedy = "give each group a name of its own"
            check_given_once(name, names[:number], f"group name {name!r}", remedy, ValueError)
        return self

    @property
    def varies(self) -> bool:
        """Whether replicas come or go while it serves."""
        return bool(self.incidents or self.scaling or self.rollout)

    @property
    def overrides(self) -> list[dict[str, Any]]:
        """The fields of scenarios that differ from the fleet's: of each group, and of a rollout."""
        rollout = [] if self.rollout is None else [self.rollout.scenario]
        return [*(group.scenario for group in self.groups), *rollout]

    @classmethod
    def make(cls, fields: dict[str, Any], where: str = "fleet") -> FleetSettings:
        """Checks fields from outside. Errors: BadInput naming the field and what it may be."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise BadInput(f"{where}: {field_problem(error, cls, document='a fleet')}") from None

    @classmethod
    def load(cls, path: str | Path) -> FleetSettings:
        """Reads a YAML file. Errors: BadInput naming file and field."""
        return cls.make(read_mapping(path, "give a YAML file of a fleet's fields"), str(path))

    def save(self, path: str | Path) -> None:
        """Writes every field."""
        Path(path).write_text(yaml_text(self.model_dump(mode="json")), encoding="utf-8")

    def group_name(self, number: int) -> str:
        """The name of a group, made up where it has none."""
        group = self.groups[number]
        return group.name or (f"group{number}" if len(self.groups) > 1 else "replica")

    def roles(self) -> dict[str, str]:
        """The role of each group, by name. Errors: BadInput for roles that don't make a fleet."""
        roles: dict[str, str] = {
            self.group_name(number): group.role for number, group in enumerate(self.groups)
        }
        there = {group.role for group in self.groups if group.replicas}
        apart = self.disaggregation is not None
        if apart and there != {"prefill", "decode"}:
            raise BadInput(
                "fleet: disaggregation needs groups with the roles prefill and decode, and no other"
            )
        if not apart and there - {"both"}:
            name = next(name for name, role in roles.items() if role != "both")
            raise BadInput(
                f"fleet: group {name} has the role {roles[name]}; add the section `disaggregation`, or leave "
                "the role out"
            )
        if apart and (self.incidents or self.scaling or self.rollout):
            raise BadInput("fleet: incidents, scaling and rollout are for fleets without disaggregation")
        return roles

    def group_scenario(self, number: int, base: Scenario) -> Scenario:
        """The scenario of a group's replicas. Errors: BadInput for a field that is not a scenario's."""
        fields = self.groups[number].scenario
        if not fields:
            return base
        return changed_scenario(base, fields, f"fleet: group {self.group_name(number)}")

    def scenarios(self, base: Scenario) -> list[tuple[str, Scenario]]:
        """Name and scenario of each replica. Errors: BadInput for a field that is not a scenario's."""
        members = []
        for number, group in enumerate(self.groups):
            name = self.group_name(number)
            scenario = self.group_scenario(number, base)
            members += [(f"{name}-{index}", scenario) for index in range(group.replicas)]
        if not members:
            raise BadInput("the fleet has no replica; give at least one")
        if self.disaggregation is not None:
            _check_handover(members)
        return members

    def revisions(self, base: Scenario) -> list[Scenario]:
        """Every scenario that a replica may have, after a rollout too. Errors: BadInput as `scenarios`."""
        first = [scenario for _, scenario in self.scenarios(base)]
        if self.rollout is None:
            return first
        fields = self.rollout.scenario
        return [*first, *(changed_scenario(each, fields, "fleet: rollout") for each in first)]
