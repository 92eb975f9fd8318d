"""Result of a replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from pagecast.sim.replay.room import Room
from pagecast.sim.scenario import Scenario


@dataclass(frozen=True)
class Result:
    """A replay's figures. `summary` is what `pagecast replay --json` prints.

    `requests` has a row per request (latencies in seconds), `steps` a row per step or fast-forwarded row of
    steps (nanoseconds; empty with `keep_steps=False`). `notes` are sentences that qualify the figures.
    `pool_blocks`: the pool that `used_blocks` of `steps` are of, in blocks of sequences, which take several
    of `num_gpu_blocks` each where `windows.py` says so; 0 for a fleet, whose replicas have their own.
    `room`: the limits that were not met, where that was asked for and can be told.
    """

    trace: str
    scenario: Scenario
    summary: dict[str, Any]
    requests: pd.DataFrame
    steps: pd.DataFrame
    notes: tuple[str, ...]
    pool_blocks: int = field(default=0, kw_only=True)
    room: Room | None = field(default=None, kw_only=True)
