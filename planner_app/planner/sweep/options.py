"""Options of `sweep`: the space, how it is searched, the level and what is traded off."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pagecast.planner_app.options import Flag, Options
from pagecast.planner_app.planner.prices import Prices
from pydantic import BeforeValidator, Field

GENERATION = 20
MOST_TRIALS = 1_000_000


def _names(given: str | Iterable[str]) -> tuple[str, ...]:
    """The names of a text with commas."""
    return (
        tuple(name.strip() for name in given.split(",") if name.strip())
        if isinstance(given, str)
        else tuple(given)
    )


class SweepOptions(Options):
    """`settings` as `parse_space` reads them; `search`: how many trials, None for the whole grid."""

    settings: Annotated[tuple[str, ...], Flag(("--set",))] = Field(
        description="field=values, may be repeated: block_size=16,32, kv_tokens=50000:400000:50000, "
        "max_num_seqs=8:256:x2"
    )
    search: int | None = Field(
        default=None,
        ge=1,
        le=MOST_TRIALS,
        description="make N trials chosen by Optuna's TPE, not the whole grid "
        "(needs the extra: pagecast[app])",
    )
    slo: str = Field(default="", description="SLO, such as ttft_p99<2s,tpot_p95<50ms")
    price: Prices = Field(
        default={}, description="GPU=USD per GPU-hour, may be repeated: H200=3.5; no price is built in"
    )
    objective: Annotated[tuple[str, ...], BeforeValidator(_names), Flag(kind=str)] = Field(
        default=(),
        description="figures to trade off, with commas [ttft_p99_s, tpot_p95_s, and before them "
        "usd_per_hour, without prices gpus, where the GPUs differ, or else output_tokens_per_s]",
    )
    generation: int = Field(
        default=GENERATION, ge=1, le=MOST_TRIALS, description="trials that --search chooses at once"
    )
