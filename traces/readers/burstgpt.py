"""BurstGPT's CSV: `Timestamp` (s), `Request tokens`, `Response tokens`, `Model`, later also `Session ID`.

Source: github.com/HPMLL/BurstGPT. Requests of no response token failed and are left out.
"""

from __future__ import annotations

from typing import Any

from pagecast.traces.head import csv_columns
from pagecast.traces.schema import Trace
from pagecast.traces.source import Source
from pagecast.traces.tabular import read_table

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
OPTIONAL = ("Model", "Session ID")
recognise = csv_columns(*COLUMNS[1:])


def read(source: Source, *, limit: int | None = None, sort: bool = False) -> Trace:
    """Reads the file; every prompt is unique, for the format names no contents."""
    rows = read_table(source, COLUMNS, limit, OPTIONAL)
    columns: dict[str, Any] = {
        "arrival_s": rows.numbers("Timestamp", least=0),
        "input_tokens": rows.whole("Request tokens"),
        "output_tokens": rows.whole("Response tokens", least=0),
    }
    if "Model" in rows.columns:
        columns["model"] = rows.optional_texts("Model")
    if "Session ID" in rows.columns:
        columns["session"] = rows.optional_texts("Session ID")
    return rows.served(columns, sort=sort, time_field="Timestamp")
