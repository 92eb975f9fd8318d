"""Evenness of what routers chose: herding, and imbalance.

Herding is how far a router favours one replica for a while: of each row of 4 N consecutive requests (N
replicas that it can choose), the largest share that one replica got, from 0 (an even share) to 1 (all of
them); their mean. Where other replicas can be chosen, a new row begins.

Imbalance is how far one replica's work exceeds its even share, at most: in even shares of the mean replica,
plus 1. Of a request's work each of the N replicas that could be chosen has 1/N as its even share. So it is
the busiest replica's work over the mean replica's where none comes or goes. Work is output and uncached
prompt tokens.

A fleet that prefills and decodes apart has two routers. Herding is that of both, imbalance the larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
from pagecast.sim.fleet.choices import Choices
from pagecast.traces.arrays import Floats, Ints

_WINDOW = 4


def computed_tokens(table: pd.DataFrame) -> Ints:
    """Tokens that were computed for each row of requests: output, and prompt tokens that were not cached."""
    admitted = table["admitted_s"].notna().to_numpy()
    served = table["state"].to_numpy() != "rejected"
    prompts, cached, output = (
        table[name].to_numpy(np.int64) for name in ("input_tokens", "cached_tokens", "output_tokens")
    )
    return np.where(admitted, prompts - cached, 0) + np.where(served, output, 0)


def herding(routers: Iterable[Choices]) -> float:
    """Herding as defined above; 0 with one replica to choose, or without a full row of requests."""
    shares: list[Floats] = []
    for choices in routers:
        for run in choices.runs:
            replicas = len(run.replicas)
            size = _WINDOW * replicas
            windows = len(run.chosen) // size
            if replicas < 2 or not windows:
                continue
            rows = np.array(run.chosen[: windows * size], dtype=np.int64).reshape(windows, size)
            counts = np.zeros((windows, int(rows.max()) + 1), dtype=np.int64)
            np.add.at(counts, (np.arange(windows)[:, None], rows), 1)
            even = 1 / replicas
            shares.append((counts.max(axis=1) / size - even) / (1 - even))
    return float(np.concatenate(shares).mean()) if shares else 0.0


def imbalance(routers: Iterable[Choices], served: Mapping[int, pd.DataFrame], requests: int) -> float:
    """Imbalance as defined above; 1 where nothing was computed.

    `served`: the requests that ended on each replica, by its number. `requests`: how many the trace has.
    """
    return max(_imbalance(choices, served, requests) for choices in routers)


def _imbalance(choices: Choices, served: Mapping[int, pd.DataFrame], requests: int) -> float:
    numbers = sorted({number for run in choices.runs for number in run.replicas})
    place = np.full(requests, -1)  # where each row ended
    work = np.zeros(requests, dtype=np.int64)
    for number in numbers:
        table = served[number]
        rows = table["row"].to_numpy(np.int64)
        place[rows] = number
        work[rows] = computed_tokens(table)
    own = np.zeros(max(numbers, default=-1) + 1)
    even = np.zeros(len(own))
    for run in choices.runs:
        rows = np.array(run.rows, dtype=np.int64)
        chosen = np.array(run.chosen, dtype=np.int64)
        done = np.where(place[rows] == chosen, work[rows], 0)  # none where the row was sent again
        np.add.at(own, chosen, done)
        even[list(run.replicas)] += done.sum() / len(run.replicas)
    total = float(even.sum())
    return 1 + float((own - even).max()) / (total / len(numbers)) if total else 1.0
