"""Plain CSV: a header of schema columns, of which arrival_s, input_tokens and output_tokens must be there.

Empty fields hold the column's default; `arrival_s` may be empty where `after` is given. Prompts are
unique, for a table of columns can't hold their contents. `ttft_s` and `e2e_s` are what a benchmark measured,
seconds from the arrival.
"""

from __future__ import annotations

import math
from typing import Any

from pagecast.traces.head import Head
from pagecast.traces.schema import COLUMNS, DEFAULTS, INTEGERS, MEASURED, REQUIRED, TEXTS, Trace
from pagecast.traces.source import Source
from pagecast.traces.tabular import TextTable, header, read_table

_KNOWN = (*COLUMNS, *MEASURED)
_LEAST = {"input_tokens": 1, "output_tokens": 1, "output_offset": 0}


def recognise(head: Head) -> int:
    """How many columns of the schema a table has, where it has all that a trace needs."""
    names = set(head.columns)
    needed = set(REQUIRED) - ({"arrival_s"} if "after" in names else set())
    return len(names & set(_KNOWN)) if needed <= names else 0


def read(source: Source, *, limit: int | None = None, sort: bool = False) -> Trace:
    """Reads the file. Raises BadInput, naming line and column, for a value missing or out of place."""
    names, _ = header(source.head)
    follows = "after" in names
    required = [name for name in REQUIRED if not (follows and name == "arrival_s")]
    rows = read_table(source, required, limit, [name for name in _KNOWN if name not in required])
    columns = {name: _column(rows, name, follows) for name in rows.columns}
    if follows and "arrival_s" not in columns:
        columns["arrival_s"] = [math.nan] * len(rows)
    ignored = [name for name in names if name not in _KNOWN]
    notes = [f"columns that are not part of the schema are ignored: {', '.join(ignored)}"]
    return rows.finish(columns, sort=sort, notes=notes if ignored else ())


def _column(rows: TextTable, name: str, follows: bool) -> Any:
    if name in TEXTS:
        return rows.optional_texts(name)
    if name in INTEGERS:
        return rows.whole(name, _LEAST.get(name, -(1 << 31)), DEFAULTS.get(name))
    empty = name in MEASURED or (name == "arrival_s" and follows)
    default = math.nan if empty else DEFAULTS.get(name)
    return rows.numbers(name, default, 0.0)
