"""Options of `plan`: how much load keeps an SLO, and how many replicas a rate needs."""

from __future__ import annotations

from typing import Annotated, Literal

from pagecast.planner_app.options import PYTHON_ONLY, Options
from pagecast.planner_app.planner.execution.options import MOST_REPLICATES, Drawn
from pagecast.planner_app.planner.prices import Prices
from pydantic import Field, field_validator

LEAST_REPLICATES = 5
LoadKind = Literal["concurrency", "rate", "users"]


class Target(Options):
    """The level that a plan keeps, for one replica or for a fleet, and prices to give its cost in."""

    slo: str = Field(
        description="SLO: ttft_p99<2s,tpot_p95<50ms,goodput(ttft<2s,tpot<50ms)>0.99; "
        "TTFT, E2E and queue of a request that is not served are infinite"
    )
    price: Prices = Field(default={}, description="GPU=USD per GPU-hour: H200=3.5; no price is built in")


class PlanOptions(Drawn, Target):
    """A plan for one replica.

    `kinds` of load: by default concurrency and rate, and users where `think_time` is given. `explain`: find
    the limit that binds. `early_stops`: end replays as soon as their outcome is decided; the answer is the
    same without. `thorough`: the highest rate by loads twice as long, each to its end.
    """

    think_time: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="plan also for users who pause this many seconds (mean) before a session",
    )
    replicas_for: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="request rate per second for the number of replicas [the trace's own]",
    )
    max_preemption_rate: float = Field(
        default=0.01,
        ge=0,
        allow_inf_nan=False,
        description="most preemptions per request at the admissible concurrency",
    )
    most_users: int | None = Field(
        default=None, ge=1, description="users at which a search gives up [4 times --max-num-seqs]"
    )
    most_requests: int = Field(
        default=4000,
        ge=1,
        description="requests of a replay: longer traces are cut; the highest rate takes 6 times that",
    )
    replicates: int = Field(
        default=LEAST_REPLICATES,
        ge=0,
        le=MOST_REPLICATES,
        description="draws of costs, noise and workload for 90% intervals: 20 for better ones, 0 for none",
    )
    kinds: Annotated[tuple[LoadKind, ...] | None, PYTHON_ONLY] = None
    explain: Annotated[bool, PYTHON_ONLY] = True
    early_stops: Annotated[bool, PYTHON_ONLY] = True
    thorough: Annotated[bool, PYTHON_ONLY] = False

    @field_validator("replicates")
    @classmethod
    def _enough(cls, count: int) -> int:
        if 0 < count < LEAST_REPLICATES:
            raise ValueError(f"an interval needs {LEAST_REPLICATES}; 0 makes none")
        return count


class CompareOptions(Options):
    """Servers that are planned for beside each other."""

    compare: tuple[str, ...] = Field(
        default=(),
        description="field=values, may be repeated: a plan for each, in one table: gpu=H100,B200, "
        "model=Qwen/Qwen3-8B,Qwen/Qwen3-8B-FP8; without intervals unless --replicates is given",
    )
