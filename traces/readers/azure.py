"""Azure's LLM inference traces: CSV of `TIMESTAMP,ContextTokens,GeneratedTokens`.

Dates and times with up to seven decimals, lengths only: every prompt is unique. The trace of multimodal
models has `NumImages` as well. Source: github.com/Azure/AzurePublicDataset (2023: Splitwise, ISCA'24; 2024:
DynamoLLM; multimodal models: ModServe).
"""

from __future__ import annotations

from dataclasses import replace

from pagecast.traces.head import csv_columns
from pagecast.traces.schema import Trace
from pagecast.traces.source import Source
from pagecast.traces.tabular import header, read_table

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_IMAGES = "NumImages"
recognise = csv_columns(*COLUMNS[1:])


def read(source: Source, *, limit: int | None = None, sort: bool = False) -> Trace:
    """Reads the file; requests that generated nothing are left out and counted in a note."""
    rows = read_table(source, COLUMNS, limit)
    columns = {
        "arrival_s": rows.dates("TIMESTAMP"),
        "input_tokens": rows.whole("ContextTokens"),
        "output_tokens": rows.whole("GeneratedTokens", least=0),
    }
    trace = rows.served(columns, sort=sort, time_field="TIMESTAMP")
    if _IMAGES not in header(source.head)[0]:
        return trace
    note = f"{_IMAGES} is not used: tokens of images count as far as ContextTokens holds them"
    return replace(trace, notes=(*trace.notes, note))
