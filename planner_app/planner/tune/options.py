"""Options of `tune`: the values that are tried, and the level that a recommended one keeps."""

from __future__ import annotations

from pagecast.planner_app.options import Options
from pydantic import Field


class TuneOptions(Options):
    """`values` as `--set` takes them; empty: the knob's usual ones."""

    values: str = Field(default="", description="fractions of HBM: 0.8,0.9 or 0.5:0.95:0.05")
    slo: str = Field(default="", description="SLO to keep, such as ttft_p99<2s,tpot_p95<50ms")
    static: bool = Field(
        default=False, description="leave out the simulated admissible concurrency: much faster"
    )


class BlockSizeOptions(TuneOptions):
    """The same for block sizes."""

    values: str = Field(default="", description="block sizes: 16,32,64 or 8:256:x2")
