"""Result of a replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from pagecast.sim.replay.room import Room
from pagecast.sim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Kept:
    """Parts of a replay to keep beside the figures of its requests.

    `steps`: the table of steps. `folder`: where to write `summary.json`, `requests.parquet`, `steps.parquet`,
    `events.parquet`, `trace.parquet` and `scenario.yaml`; it changes only once all is written. `kv_events`:
    write `kv_events.jsonl` there as well, in vLLM's vocabulary (`kv_event_file.py`). `comparisons`: replay
    again where the scenario asks for figures that compare two replays (`rollout`, `isolation`). `room`: find
    which limits are not met (`Result.room`), which takes a little longer.
    """

    steps: bool = True
    folder: str | Path | None = None
    kv_events: bool = False
    comparisons: bool = True
    room: bool = False


@dataclass(frozen=True)
class Result:
    """A replay's figures. `summary` is what `pagecast replay --json` prints.

    `requests` has a row per request (latencies in seconds), `steps` a row per step or fast-forwarded row of
    steps (nanoseconds; empty with `Kept(steps=False)`). `notes` are sentences that qualify the figures.
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
