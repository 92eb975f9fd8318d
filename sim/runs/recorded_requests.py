"""The requests of a recorded run: what was asked for (`inputs.jsonl.gz`) and when it was served
(`requests.csv.gz`), read and checked row by row."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pandas as pd
from pagecast.sim.core.errors import BadInput
from pagecast.traces.schema import COLUMNS, DEFAULTS, INTEGERS, REQUIRED, TEXTS, Spans

REQUEST_COLUMNS: dict[str, type] = {
    "index": int,
    "arrival_s": float,
    "submitted_s": float,
    "input_tokens": int,
    "output_tokens": int,
    "first_token_s": float,
    "finish_s": float,
    "cached_tokens": int,
    "tokens_out": int,
}
HUGE = 2**53  # counts below it are exact in every column
LATEST_S = 9e9  # of what nanoseconds of 64 bits hold
_HANDOFF = ("given_back_s", "reserved_s", "landed_s")  # of engines that hand prompts over
_OPTIONAL = ("cancelled_s", *_HANDOFF)
_MAY_BE_EMPTY = ("first_token_s", "finish_s", *_OPTIONAL)  # of a request cancelled or refused
_LONGEST_FIELD = 1 << 30  # characters; a request's output tokens stand in one


def read_requests(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame, Spans | None]:
    """When requests were served, what they were, and the prompts; empty for a run of steady shapes.

    Errors: BadInput naming the file, line and field at fault.
    """
    if not has(folder, "requests.csv.gz") and not has(folder, "inputs.jsonl.gz"):
        return pd.DataFrame(columns=list(REQUEST_COLUMNS)), pd.DataFrame(columns=list(REQUIRED)), None
    requests = _read_csv(folder / "requests.csv.gz")
    inputs, spans = _read_inputs(folder / "inputs.jsonl.gz")
    if len(requests) != len(inputs):
        raise BadInput(
            f"{folder}: columns are short: {len(inputs)} lines in inputs.jsonl.gz, "
            f"{len(requests)} rows in requests.csv.gz"
        )
    for key in ("input_tokens", "output_tokens"):
        differ = np.flatnonzero(requests[key].to_numpy() != inputs[key].to_numpy())
        if len(differ):
            line = int(differ[0]) + 2
            raise BadInput(f"{folder}/requests.csv.gz line {line}: '{key}' differs from inputs.jsonl.gz")
    return requests, inputs, spans


def _read_csv(path: Path) -> pd.DataFrame:
    rows = _rows(path)
    header = rows[0] if rows else []
    missing = [key for key in REQUEST_COLUMNS if key not in header]
    if missing:
        raise BadInput(f"{path}: no column '{missing[0]}'")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(header):
            raise BadInput(f"{path} line {number}: columns are short: {len(row)} of {len(header)}")
    table = pd.DataFrame(rows[1:], columns=header)
    for key, kind in (REQUEST_COLUMNS | dict.fromkeys(_OPTIONAL, float)).items():
        if key in table:
            table[key] = _numbers(path, table[key], key, kind)
    _check_rows(path, table)
    return table


def _rows(path: Path) -> list[list[str]]:
    """The rows of a gzipped CSV file. Errors: BadInput naming the line where it can't be read."""
    csv.field_size_limit(_LONGEST_FIELD)
    rows: list[list[str]] = []
    with _open(path) as text:
        try:
            rows.extend(csv.reader(text))
        except (ValueError, OSError, EOFError, zlib.error, csv.Error) as error:
            raise BadInput(f"{path} line {len(rows) + 1}: cannot be read ({error})") from None
    return rows


def _check_rows(path: Path, table: pd.DataFrame) -> None:
    """Errors: BadInput naming the first line of each kind that can't be."""

    def refuse(bad: pd.Series[bool], wrong: str) -> None:
        rows = np.flatnonzero(bad.to_numpy())
        if len(rows):
            raise BadInput(f"{path} line {int(rows[0]) + 2}: {wrong}")

    refuse(table["index"] != np.arange(len(table)), "'index' must number the rows from 0")
    refuse(
        table["first_token_s"].isna() & table["finish_s"].notna(),
        "'first_token_s' is empty, but the request finished",
    )
    pairs = [("submitted_s", "arrival_s"), ("first_token_s", "arrival_s"), ("finish_s", "first_token_s")]
    pairs += [("cancelled_s", "submitted_s")] if "cancelled_s" in table else []
    for key, before in pairs:
        refuse(table[key] < table[before], f"negative duration: '{key}' is before '{before}'")


def _numbers(path: Path, column: pd.Series[Any], key: str, kind: type) -> pd.Series[Any]:
    values = pd.to_numeric(column, errors="coerce")
    allowed = (column == "") & (key in _MAY_BE_EMPTY)
    good = (values >= 0) & (values < (HUGE if kind is int else LATEST_S))
    if kind is int:
        good &= values == values.round()
    bad = np.flatnonzero(~(good | allowed).to_numpy())
    if len(bad):
        value, line = column.iloc[int(bad[0])], int(bad[0]) + 2
        what = "a whole number" if kind is int else "a number"
        raise BadInput(f"{path} line {line}: '{key}' is {value!r}, must be {what} of at least 0")
    return values.astype(np.int64 if kind is int else np.float64)


def _read_inputs(path: Path) -> tuple[pd.DataFrame, Spans | None]:
    rows: list[dict[str, Any]] = []
    prompts: list[list[tuple[int, int, int]]] = []
    for number, line in lines(path):
        try:
            _check_input(line)
            prompts.append(_prompt(line))
        except ValueError as error:
            raise BadInput(f"{path} line {number}: {error}") from None
        rows.append({key: value for key, value in line.items() if key in COLUMNS})
    table = pd.DataFrame(rows)
    for name in table.columns.intersection(list(INTEGERS)):
        table[name] = table[name].fillna(DEFAULTS.get(name)).astype(np.int64)
    if not any(prompts):
        return table, None
    flat = np.array([span for prompt in prompts for span in prompt], np.int64).reshape(-1, 3)
    start = np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])]).astype(np.int64)
    return table, Spans(start, flat[:, 0].copy(), flat[:, 1].copy(), flat[:, 2].copy())


def _check_input(line: dict[str, Any]) -> None:
    """Raises `ValueError` naming a field that can't be."""
    for key, least in (("arrival_s", 0), ("input_tokens", 1), ("output_tokens", 1)):
        value: Any = line.get(key)
        whole = key in INTEGERS
        kinds = (int,) if whole else (int, float)
        if type(value) not in kinds or not least <= value < (HUGE if whole else LATEST_S):
            what = "a whole number" if whole else "a number"
            raise ValueError(f"'{key}' is {value!r}, must be {what} of at least {least}")
    for key in (key for key in line if key in COLUMNS and key not in REQUIRED):
        value = line[key]
        if value is not None and not _fits(key, value):
            what = "a text" if key in TEXTS else "a whole number" if key in INTEGERS else "a finite number"
            raise ValueError(f"'{key}' is {value!r}, must be {what}")


def _fits(key: str, value: object) -> bool:
    """Whether a column of a trace can hold the value."""
    if key in TEXTS:
        return isinstance(value, str)
    if type(value) is not int and type(value) is not float:
        return False
    return abs(value) < HUGE and value == int(value) if key in INTEGERS else abs(value) < LATEST_S


def _prompt(line: dict[str, Any]) -> list[tuple[int, int, int]]:
    """One request's prompt as spans; empty where it is unique. Raises `ValueError`."""
    ids, spans, remaining = line.get("block_ids"), line.get("spans"), int(line["input_tokens"])
    if spans:
        if not isinstance(spans, list) or not all(_whole_numbers(span, 3) for span in spans):
            raise ValueError("'spans' must be a list of [content, offset, length], whole numbers")
        if sum(length for _, _, length in spans) != remaining:
            raise ValueError(f"'spans' do not have {remaining} tokens together")
        return [(content, offset, length) for content, offset, length in spans]
    if ids is None:
        return []
    if not _whole_numbers(ids):
        raise ValueError("'block_ids' must be a list of whole numbers")
    size = line.get("block_ids_tokens")
    if type(size) is not int or size < 1 or len(ids) * size < remaining:
        raise ValueError(f"{len(ids)} 'block_ids' of {size!r} tokens do not cover {remaining} input tokens")
    return [(name, 0, min(size, remaining - i * size)) for i, name in enumerate(ids) if i * size < remaining]


def _whole_numbers(values: Any, count: int | None = None) -> bool:
    good = isinstance(values, list) and all(type(value) is int and abs(value) < 1 << 63 for value in values)
    return good and (count is None or len(values) == count)


def lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a gzipped JSON-lines file with their line numbers. Errors: BadInput naming the line."""
    with _open(path) as text:
        number = 1
        try:
            for line in text:
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise BadInput(f"{path} line {number}: must be an object")
                yield number, value
                number += 1
        except (ValueError, OSError, EOFError, zlib.error) as error:
            raise BadInput(f"{path} line {number}: cannot be read ({error})") from None


def _open(path: Path) -> TextIO:
    """The file, or the same name without `.gz`, as text."""
    plain = path.with_suffix("")
    if path.is_file():
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    if plain.is_file():
        return plain.open(encoding="utf-8", newline="")
    raise BadInput(f"{path}: missing")


def has(folder: Path, name: str) -> bool:
    """Whether the folder holds the file, or the same name without `.gz`."""
    return (folder / name).is_file() or (folder / name).with_suffix("").is_file()
