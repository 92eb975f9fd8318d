"""A scenario file with a section `check`: which trace to serve, and what its figures must hold to.

model: Qwen/Qwen3-8B
gpu: H200
check:
  trace: chat                            # a sample's name, or a file, sought beside this one
  load: {concurrency: 64}                # how it is sent; without a trace, load makes requests
  slo: ttft_p99<2s, tpot_p95<50ms
  limits:                                # any figure of `pagecast replay --json`
    output_tokens_per_s: {min: 2000}
    ttft_s.p99: {max: 0.5}
  regression:                            # percent by which a figure may be worse than the baseline's
    ttft_s.p99: 5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pagecast.planner_app.planner.load_fields import make_load
from pagecast.planner_app.planner.slo import Slo
from pagecast.sim.core.errors import BadInput
from pagecast.sim.documents import field_problem
from pagecast.sim.scenario import CHECK, Scenario, read_fields
from pagecast.traces.bundled import sample_names
from pagecast.traces.load import Load
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

DRAWS = 20


class Bound(BaseModel):
    """The least and the most a figure may be, in the figure's own unit (seconds, tokens, counts)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _check(self) -> Bound:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min is {self.min:g} and max is {self.max:g}; lower min, or raise max")
        return self


class Check(BaseModel):
    """The section `check`. Unknown fields are errors, not ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    trace: str | None = Field(
        None, description="trace to serve: a sample's name or a file; without it, `load` makes requests"
    )
    load: dict[str, Any] = Field(
        default_factory=dict, description="fields of a load: concurrency, input_len and so on"
    )
    limit: int | None = Field(None, ge=1, description="serve only the first N requests")
    speedup: float = Field(1.0, gt=0, description="divide arrival times by this")
    rate: float | None = Field(
        None, gt=0, description="mean requests per second to scale the trace's own arrivals to"
    )
    sort: bool = Field(False, description="put requests out of order in order of arrival")
    session_rate: float | None = Field(
        None, gt=0, description="sessions per second, for traces without times"
    )
    tokenizer: str | None = Field(None, description="transformers folder, for traces that hold texts")
    slo: str | None = Field(None, description="SLO: ttft_p99<2s, tpot_p95<50ms")
    limits: dict[str, Bound] = Field(default_factory=dict, description="bounds of figures")
    regression: dict[str, float] = Field(default_factory=dict, description="percent a figure may be worse by")
    undecided: Literal["pass", "fail"] = Field(
        "pass", description="verdict on a regression whose interval reaches beyond what is allowed"
    )
    draws: int = Field(DRAWS, ge=5, description="pairs of replays behind each comparison with a baseline")


@dataclass(frozen=True, slots=True)
class CheckFile:
    """A scenario and what is asked of it."""

    path: str
    scenario: Scenario
    check: Check
    slo: Slo | None
    load: Load = field(default_factory=Load)

    def trace_name(self) -> str | None:
        """The trace as `read` takes it: a sample's name, a file beside the scenario, or as it is written."""
        if self.check.trace is None:
            return None
        beside = Path(self.path).parent / self.check.trace
        if self.check.trace not in sample_names() and beside.exists():
            return str(beside)
        return self.check.trace

    def reading(self) -> dict[str, Any]:
        """The options to read the trace with."""
        names = ("limit", "speedup", "rate", "sort", "session_rate")
        tokenizer = Path(self.check.tokenizer) if self.check.tokenizer else None
        return {**{name: getattr(self.check, name) for name in names}, "tokenizer": tokenizer}


def load_check(path: str | Path, changes: Mapping[str, Any] | None = None) -> CheckFile:
    """Reads a scenario file for the gate; `changes` replace its fields.

    Errors: BadInput naming the file and the field.
    """
    fields = read_fields(path)
    section = fields.pop(CHECK, None)
    scenario = Scenario.make({**fields, **(changes or {})}, str(path))
    if not isinstance(section, dict):
        raise BadInput(f"{path}: has no section `{CHECK}:` with a trace and limits; see examples/check.yaml")
    try:
        check = Check.model_validate(section)
    except ValidationError as error:
        raise BadInput(f"{path}: {field_problem(error, Check, CHECK)}") from None
    if not (check.slo or check.limits or check.regression):
        raise BadInput(f"{path}: {CHECK}: asks nothing; give slo, limits or regression")
    if check.rate is not None and check.speedup != 1:
        raise BadInput(f"{path}: {CHECK}.rate and {CHECK}.speedup both set the load; give one of them")
    for name, bound in check.limits.items():
        if bound.min is None and bound.max is None:
            raise BadInput(f"{path}: {CHECK}.limits.{name}: give min, max or both")
    for name, percent in check.regression.items():
        if not 0 <= percent < float("inf"):
            raise BadInput(f"{path}: {CHECK}.regression.{name} is {percent}; give a percent of at least 0")
    load = make_load(check.load, f"{path}: {CHECK}.load")
    if check.trace is None and not load.makes:
        raise BadInput(
            f"{path}: {CHECK}: give a trace, or a load that makes requests: load: {{input_len: 1024}}"
        )
    return CheckFile(str(path), scenario, check, _slo(path, check.slo), load)


def _slo(path: str | Path, text: str | None) -> Slo | None:
    try:
        return Slo.parse(text) if text else None
    except BadInput as error:
        raise BadInput(f"{path}: {CHECK}.slo: {error}") from None
