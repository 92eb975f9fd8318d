"""Random files of each kind are read, or refused in one line: nothing else comes out of a reader."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.traces.checks import find_problem
from pagecast.traces.read import read
from pagecast.traces.schema import COLUMNS, REQUIRED

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

ROWS = 3
INTS = st.one_of(st.integers(0, 40), st.sampled_from([-1, 2**31, 2**53, 2**62, 2**63 - 1]))
FLOATS = st.one_of(st.floats(0, 100), st.sampled_from([math.nan, math.inf, -1.0, 1e308, 1.7e9, 1e15]))
WORDS = st.one_of(st.text(max_size=8), st.sampled_from(["", "0", "now", "1@0+4", "0-9:50", "x" * 2000, "\0"]))
NAMES = st.sampled_from(
    [*COLUMNS, "token_ids", "spans", "span_content", "span_offset", "span_length", "else"]
)

KINDS = [
    (pa.int64(), INTS),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.int8(), st.integers(-128, 127)),
    (pa.float64(), FLOATS),
    (pa.float32(), st.floats(width=32)),
    (pa.string(), WORDS),
    (pa.binary(), st.binary(max_size=8)),
    (pa.bool_(), st.booleans()),
    (pa.timestamp("us"), st.integers(0, 2**50)),
    (pa.decimal128(20, 3), st.decimals(-1000, 1000, places=3)),
]


@st.composite
def columns(draw: st.DrawFn) -> pa.Array:
    """A column of some type, or of lists of it; places may be empty."""
    kind, values = draw(st.sampled_from(KINDS))
    cells = st.one_of(st.none(), values) if draw(st.booleans()) else values
    if draw(st.booleans()):
        rows = draw(st.lists(st.lists(cells, max_size=3), min_size=ROWS, max_size=ROWS))
        return pa.array(rows, pa.list_(kind))
    return pa.array(draw(st.lists(cells, min_size=ROWS, max_size=ROWS)), kind)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """A table that has what a trace needs, but for what its other columns break."""
    named = {
        "arrival_s": pa.array([0.0, 1.0, 2.0]),
        "input_tokens": pa.array([2, 2, 2]),
        "output_tokens": pa.array([3, 3, 3]),
    }
    others = draw(st.lists(st.tuples(NAMES, columns()), max_size=4))
    names = [*named, *(name for name, _ in others)]
    arrays = [*named.values(), *(column for _, column in others)]
    if draw(st.booleans()):  # a required column becomes another
        at = draw(st.integers(0, 2))
        arrays[at] = draw(columns())
    if draw(st.booleans()):
        return pa.table(dict(zip(names, arrays, strict=True)))
    return pa.Table.from_arrays(arrays, names)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), INTS, FLOATS, WORDS, st.just("\ud83d"), st.integers(-(2**70), 2**70)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
LINES = [
    {"arrival_s": 0, "input_tokens": 2, "output_tokens": 3},
    {"timestamp": 0, "input_length": 2, "output_length": 3, "hash_ids": [1]},
    {
        "chat_id": 1,
        "parent_chat_id": -1,
        "timestamp": 0,
        "input_length": 2,
        "output_length": 3,
        "hash_ids": [1],
    },
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
]


@st.composite
def json_lines(draw: st.DrawFn) -> bytes:
    """Lines of one format with fields changed, added, and left out."""
    base = draw(st.sampled_from(LINES))
    lines = []
    for _ in range(ROWS):
        line = {
            **base,
            **draw(st.dictionaries(st.one_of(st.sampled_from(list(base)), NAMES), JSON, max_size=3)),
        }
        if draw(st.integers(0, 4)) == 0:
            line.pop(draw(st.sampled_from(list(base))), None)
        if draw(st.integers(0, 4)) == 0:
            line["\ud800"] = 1
        lines.append(json.dumps(line).encode())
    data = b"\n".join(lines) + b"\n"
    return data[: draw(st.integers(1, len(data)))] if draw(st.integers(0, 4)) == 0 else data


@st.composite
def csv_files(draw: st.DrawFn) -> bytes:
    """A table of texts below a header of some format."""
    header = draw(
        st.sampled_from(
            [
                REQUIRED,
                ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
                (*REQUIRED, "session", "after", "salt"),
            ]
        )
    )
    mark = draw(st.sampled_from([",", ";", "\t"]))
    cell = st.one_of(
        INTS.map(str), FLOATS.map(str), st.text(max_size=6), st.sampled_from(["now", "1.000", '"', ""])
    )
    rows = draw(st.lists(st.lists(cell, min_size=len(header), max_size=len(header)), max_size=ROWS))
    end = draw(st.sampled_from(["\n", "\r\n"]))
    return end.join(mark.join(row) for row in (header, *rows)).encode("utf-8", "replace")


def check(path: Path) -> None:
    """The file is read into a trace that meets every condition, or refused in one line."""
    refusal = ""
    try:
        trace = read(path)
    except BadInput as error:
        refusal = str(error)
    if refusal:
        assert "\n" not in refusal and refusal.startswith(str(path))
        return
    assert find_problem(trace) is None
    assert all(note.encode() for note in trace.notes)


@FUZZ
@given(table=tables())
def test_parquet(table: pa.Table, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    path = tmp_path / "trace.parquet"
    path.write_bytes(buffer.getvalue())
    check(path)


@FUZZ
@given(data=json_lines())
def test_json_lines(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(data)
    check(path)


@FUZZ
@given(data=csv_files())
def test_csv(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(data)
    check(path)


def parquet(path: Path, **columns: pa.Array) -> Path:
    """A trace of two requests with more columns."""
    plain = {"arrival_s": [0.0, 1.0], "input_tokens": [2, 2], "output_tokens": [3, 3]}
    pq.write_table(pa.table({**plain, **columns}), path)
    return path


@pytest.mark.parametrize(
    ("columns", "part"),
    [
        ({"token_ids": pa.array([[1, 2], [3, None]])}, "field token_ids: row 1 has an empty place"),
        (
            {"token_ids": pa.array([[1, 2], [3, 2**63]], pa.list_(pa.uint64()))},
            "field token_ids: must be lists",
        ),
        ({"token_ids": pa.array([[True, True], [True, False]])}, "field token_ids: must be lists of whole"),
        ({"spans": pa.array(["a", "b"])}, "field spans: parquet has prompts as span_content"),
        ({"priority": pa.array([True, False])}, "field priority: holds booleans"),
    ],
    ids=["null", "uint64", "booleans", "spans", "boolean column"],
)
def test_parquet_that_was_read_as_something_else(columns: dict, part: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=part):
        read(parquet(tmp_path / "trace.parquet", **columns))


def test_a_parquet_column_that_stands_twice_is_named(tmp_path: Path) -> None:
    plain = parquet(tmp_path / "trace.parquet")
    table = pq.read_table(plain)
    pq.write_table(table.append_column("arrival_s", table["arrival_s"]), plain)
    with pytest.raises(BadInput, match="field arrival_s: the column stands twice"):
        read(plain)


def refused(folder: Path, text: str) -> str:
    path = folder / "trace"
    path.write_text(text)
    with pytest.raises(BadInput) as error:
        read(path)
    return str(error.value)


def test_half_a_character_is_named_with_its_line(tmp_path: Path) -> None:
    line = '{"arrival_s":0,"input_tokens":1,"output_tokens":1%s}\n'
    for more in (r',"session":"\ud83d"', r',"\ud800":1'):
        assert "line 1: \\ud8" in refused(tmp_path, line % more)


def test_times_that_depend_on_the_clock_are_no_times(tmp_path: Path) -> None:
    text = refused(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n")
    assert "line 2, field TIMESTAMP: 'now' is no date" in text


def test_a_header_beyond_a_mebibyte_is_told_as_such(tmp_path: Path) -> None:
    names = ",".join(["arrival_s,input_tokens,output_tokens", *(f"c{number}" for number in range(200_000))])
    assert "line 1: the first line is longer than 1 MiB" in refused(tmp_path, f"{names}\n0,1,1\n")


def test_names_have_an_end(tmp_path: Path) -> None:
    salt = "x" * 1025
    text = refused(tmp_path, f'{{"arrival_s":0,"input_tokens":1,"output_tokens":1,"salt":"{salt}"}}\n')
    assert "line 1, field salt: a name of more than 1,024 characters" in text


def test_hashes_of_64_bits_are_block_ids_like_any_other(tmp_path: Path) -> None:
    """Equal ids are equal tokens; the largest numbers tell as many texts apart as small ones."""
    path = tmp_path / "trace.jsonl"
    big, other = 2**64 - 1, 2**63 + 5
    rows = [[big, 7], [big, other], [other, 7]]
    lines = [{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": ids} for ids in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    spans = read(path).spans
    assert spans is not None
    starts = [
        [offset for _, start, length in spans.row(i) for offset in range(start, start + length, 512)]
        for i in range(3)
    ]
    assert starts[0][0] == starts[1][0] and starts[1][1] == starts[2][0] and starts[0][1] == starts[2][1]
    assert len({start for row in starts for start in row}) == 3
