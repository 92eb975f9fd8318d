"""Chains: requests that one user sends one after another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from pagecast.traces.arrays import Ints
from pagecast.traces.schema import Trace


def session_numbers(trace: Trace, unnamed: Ints) -> Ints:
    """The session of each row, numbered from 0 as they come.

    Rows without a session's name are one session where their numbers in `unnamed` are equal.
    """
    named = pd.factorize(trace.column("session").astype("string"))[0]  # -1 without a name
    numbers = np.where(named < 0, int(named.max(initial=-1)) + 1 + unnamed, named)
    return pd.factorize(numbers)[0].astype(np.int64)


@dataclass(frozen=True, slots=True)
class Chains:
    """Requests that one user sends one after another: a session's rows in the trace's order, or one request.

    `first` has each chain's first row, in order; `follower` the row after each row in its chain, -1 for
    none; `chain` the chain of each row. Rows that follow one another without a session's name are one too.
    """

    first: Ints
    follower: Ints
    chain: Ints

    @classmethod
    def of(cls, trace: Trace) -> Chains:
        """The chains of a trace."""
        count = len(trace)
        root = np.arange(count)
        for row, parent in enumerate(trace.integers("after").tolist()):
            if parent >= 0:
                root[row] = root[parent]
        chain = session_numbers(trace, root)
        order = np.argsort(chain, kind="stable")
        follower = np.full(count, -1, dtype=np.int64)
        same = chain[order[1:]] == chain[order[:-1]]
        follower[order[:-1][same]] = order[1:][same]
        return cls(np.unique(chain, return_index=True)[1].astype(np.int64), follower, chain)
