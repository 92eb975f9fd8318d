"""Azure's LLM inference traces: CSV of `TIMESTAMP,ContextTokens,GeneratedTokens`.

Dates and times with up to seven decimals, lengths only: every prompt is unique. Source:
github.com/Azure/AzurePublicDataset (2023: Splitwise, ISCA'24; 2024: DynamoLLM).
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from pagecast.traces.schema import Floats, Trace
from pagecast.traces.source import Source
from pagecast.traces.tabular import CsvTable, read_table

# Well within what nanoseconds in 64 bits can hold.
_FIRST, _LAST = pd.Timestamp("1700-01-01", tz="UTC"), pd.Timestamp("2200-12-31", tz="UTC")
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(source: Source, *, limit: int | None = None, sort: bool = False) -> Trace:
    """Reads the file; requests that generated nothing are left out and counted in a note."""
    rows = read_table(source, COLUMNS, limit)
    columns = {
        "arrival_s": _seconds(rows),
        "input_tokens": rows.whole("ContextTokens"),
        "output_tokens": rows.whole("GeneratedTokens", least=0),
    }
    return rows.served(columns, sort=sort, time_field="TIMESTAMP")


def _seconds(rows: CsvTable) -> Floats:
    """Seconds from the first time in the file."""
    texts = rows.texts("TIMESTAMP")
    times = pd.to_datetime(pd.Series(texts), format="ISO8601", errors="coerce", utc=True)
    # pandas takes "now" and "today" too: the answer would depend on the clock.
    undated = ~pd.Series(texts).str.match(r"\s*\d").to_numpy(bool)
    bad = np.flatnonzero((times.isna() | (times < _FIRST) | (times > _LAST)).to_numpy() | undated)
    if len(bad):
        problem = f"{texts[bad[0]][:40]!r} is no date and time from {_FIRST.year} to {_LAST.year}"
        raise rows.fail(int(bad[0]), "TIMESTAMP", problem)
    ticks = times.astype("datetime64[ns, UTC]").astype("int64").to_numpy()
    return np.asarray((ticks - ticks.min()) / 1e9, dtype=np.float64)
