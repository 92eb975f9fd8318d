"""Options of questions that take many replays: where these run, and what is drawn anew for intervals."""

from __future__ import annotations

from pagecast.planner_app.options import Options
from pydantic import Field

MOST_WORKERS = 1024
MOST_REPLICATES = 10_000


class Many(Options):
    """Where replays run; the answer does not depend on it."""

    workers: int | None = Field(default=None, ge=1, le=MOST_WORKERS, description="processes [one per core]")
    cluster: str | None = Field(default=None, description="address of a Dask scheduler: tcp://host:8786")


class Drawn(Options):
    """What is drawn anew for 90% intervals, and how often."""

    replicates: int = Field(
        default=0,
        ge=0,
        le=MOST_REPLICATES,
        description="replays behind 90% intervals: costs, noise and workload drawn again; 0 for none",
    )
    fixed_workload: bool = Field(
        default=False, description="leave the workload's uncertainty out of the intervals"
    )
