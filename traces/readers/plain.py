"""Plain CSV: a header of schema columns, of which arrival_s, input_tokens and output_tokens must be there.

Empty fields hold the column's default; `arrival_s` may be empty where `after` is given. Prompts are
unique, for a table of columns can't hold their contents.
"""

from __future__ import annotations

import math
from typing import Any

from pagecast.traces.schema import COLUMNS, DEFAULTS, INTEGERS, REQUIRED, TEXTS, Trace
from pagecast.traces.source import Source
from pagecast.traces.tabular import CsvTable, header, read_table

_LEAST = {"input_tokens": 1, "output_tokens": 1, "output_offset": 0}


def read(source: Source, *, limit: int | None = None, sort: bool = False) -> Trace:
    """Reads the file. Raises BadInput, naming line and column, for a value missing or out of place."""
    names, _ = header(source.head)
    follows = "after" in names
    required = [name for name in REQUIRED if not (follows and name == "arrival_s")]
    rows = read_table(source, required, limit, [name for name in COLUMNS if name not in required])
    columns = {name: _column(rows, name, follows) for name in rows.columns}
    if follows and "arrival_s" not in columns:
        columns["arrival_s"] = [math.nan] * len(rows)
    ignored = [name for name in names if name not in COLUMNS]
    notes = [f"columns that are not part of the schema are ignored: {', '.join(ignored)}"]
    return rows.finish(columns, sort=sort, notes=notes if ignored else ())


def _column(rows: CsvTable, name: str, follows: bool) -> Any:
    if name in TEXTS:
        return rows.optional_texts(name)
    if name in INTEGERS:
        return rows.whole(name, _LEAST.get(name, -(1 << 31)), DEFAULTS.get(name))
    default = math.nan if name == "arrival_s" and follows else DEFAULTS.get(name)
    return rows.numbers(name, default, 0.0)
