"""Cost of a plan: dollars per hour for its replicas, and dollars per million output tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagecast.planner_app.planner.capacity.bisection import LoadTrial
from pagecast.planner_app.planner.capacity.replicas import Replicas
from pagecast.planner_app.planner.prices import usd_per_million_tokens
from pagecast.planner_app.wording.quantities import counted


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Cost of one replica, of all replicas of a plan, and of their output tokens.

    `usd_per_hour` and `usd_per_million_output_tokens` are of the plan's replicas at the rate that they are
    for; None where the plan has no replicas. `at_most_load` is of one replica at the highest load that keeps
    the SLO; None where there is none.
    """

    usd_per_replica_hour: float
    replicas: int | None
    requests_per_s: float | None
    usd_per_hour: float | None
    usd_per_million_output_tokens: float | None
    at_most_load: float | None

    def to_dict(self) -> dict[str, Any]:
        """As printed in JSON."""
        return {
            "usd_per_replica_hour": self.usd_per_replica_hour,
            "usd_per_hour": self.usd_per_hour,
            "usd_per_million_output_tokens": self.usd_per_million_output_tokens,
            "usd_per_million_output_tokens_at_highest_load": self.at_most_load,
        }

    @property
    def sentence(self) -> str:
        """One sentence."""
        parts = []
        if self.usd_per_hour is None:
            parts.append(f"${self.usd_per_replica_hour:,.2f} per hour for each replica")
        else:
            parts.append(f"${self.usd_per_hour:,.2f} per hour for {counted(self.replicas or 0, 'replica')}")
        if self.usd_per_million_output_tokens is not None:
            parts.append(
                f"${self.usd_per_million_output_tokens:,.2f} per million output tokens at "
                f"{self.requests_per_s:.3g} requests/s"
            )
        if self.at_most_load is not None:
            parts.append(f"${self.at_most_load:,.2f} per million at the highest load that keeps the SLO")
        return ", ".join(parts)


def plan_cost(
    usd_per_gpu_hour: float, gpus_each: int, replicas: Replicas | None, most: LoadTrial | None
) -> PlanCost:
    """The cost of `replicas` of `gpus_each` GPUs. `most`: one replica's outcome at the highest load."""
    each = usd_per_gpu_hour * gpus_each
    at_most_load = None if most is None else usd_per_million_tokens(each, most.output_tokens_per_s)
    if replicas is None:
        return PlanCost(each, None, None, None, None, at_most_load)
    hourly = each * replicas.count
    tokens_per_s = 0.0
    if most is not None and most.requests_per_s:
        tokens_per_s = replicas.requests_per_s * most.output_tokens_per_s / most.requests_per_s
    tokens = usd_per_million_tokens(hourly, tokens_per_s)
    return PlanCost(each, replicas.count, replicas.requests_per_s, hourly, tokens, at_most_load)
