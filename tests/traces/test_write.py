"""Written traces are read back equal, or the writer names the loss."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from pagecast.sim.core.errors import BadInput
from pagecast.traces.prefixes import paths
from pagecast.traces.read import read
from pagecast.traces.schema import DEFAULTS, Trace, table
from pagecast.traces.write import write

from .making import prompt_tokens, trace_of, traces

SAME_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)


def equal(a: Trace, b: Trace) -> bool:
    pd.testing.assert_frame_equal(a.requests, b.requests)
    assert (a.spans is None) == (b.spans is None)
    if a.spans is not None and b.spans is not None:
        for name in ("start", "content", "offset", "length"):
            assert np.array_equal(getattr(a.spans, name), getattr(b.spans, name))
    assert (a.token_ids is None) == (b.token_ids is None)
    for x, y in zip(a.token_ids or (), b.token_ids or (), strict=True):
        assert np.array_equal(x, y)
    return True


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst"])
@given(trace=traces(quoting=True))
@SAME_FOLDER
def test_own_forms_hold_everything(tmp_path: Path, ending: str, trace: Trace) -> None:
    write(trace, tmp_path / f"t{ending}")
    assert len(list(tmp_path.iterdir())) == 1, "no temporary file is left"
    back = read(tmp_path / f"t{ending}")
    pd.testing.assert_frame_equal(trace.requests, back.requests)
    for row in range(len(trace)):
        assert prompt_tokens(trace, row) == prompt_tokens(back, row)


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_every_column_comes_back(tmp_path: Path, ending: str) -> None:
    nan = float("nan")
    rich = trace_of(
        [[(3, 1, 4)], [(3, 1, 4), (-(1 << 62) + 1, 0, 3)]],
        arrival_s=[1 / 3, nan],
        priority=[5, -1],
        session=["a", None],
        after=[-1, 0],
        gap_s=[0.0, 0.1],
        cancel_after_s=[nan, 2.5],
        model=[None, "m"],
        adapter=["x", None],
        salt=["s", "t"],
        multimodal=["cat@0+2", None],
        drafts=["3 0", None],
        accepted_drafts=[None, "1 2"],
        output_content=[9, -1],
        output_offset=[2, 0],
    )
    write(rich, tmp_path / f"t{ending}")
    assert equal(rich, read(tmp_path / f"t{ending}"))


def test_token_ids_and_notes_come_back(tmp_path: Path) -> None:
    once = [1.0, 2.0]
    columns = {"arrival_s": once, "input_tokens": [1, 2], "output_tokens": [1, 1]}
    trace = Trace("ids", table(columns), None, [np.array([7]), np.array([8, 9])], ("a note",))
    for name in ("t.parquet", "t.jsonl"):
        write(trace, tmp_path / name)
        assert equal(trace, read(tmp_path / name))
    assert read(tmp_path / "t.parquet").notes == ("a note",)
    assert read(tmp_path / "t.parquet").name == "ids"


def test_samples_round_trip_through_parquet(tmp_path: Path) -> None:
    chat = read("chat")
    write(chat, tmp_path / "chat.parquet")
    assert equal(chat, read(tmp_path / "chat.parquet"))


def test_csv_holds_columns_but_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"csv can't hold what prompts .*--lossy"):
        write(read("chat"), tmp_path / "t.csv")
    assert list(tmp_path.iterdir()) == []
    write(read("chat"), tmp_path / "t.csv.gz", lossy=True)
    pd.testing.assert_frame_equal(read(tmp_path / "t.csv.gz").requests, read("chat").requests)


def test_mooncake_form(tmp_path: Path) -> None:
    whole = trace_of(
        [[(4, 0, 512), (9, 0, 100)], [(4, 0, 512), (6, 0, 512)], []], input_tokens=[612, 1024, 5]
    )
    write(whole, tmp_path / "t.jsonl", "mooncake")
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [row["timestamp"] for row in rows] == [0, 1000, 2000]
    assert [len(row["hash_ids"]) for row in rows] == [2, 2, 1]
    back = read(tmp_path / "t.jsonl")
    assert paths(back).matched.tolist() == paths(whole).matched.tolist() == [0, 512, 0]


def test_mooncake_form_keeps_sessions_and_says_what_is_finer(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="which answers later turns quote; sharing finer than 512 tokens"):
        write(read("chat"), tmp_path / "t.jsonl", "mooncake")
    write(read("chat"), tmp_path / "t.jsonl", "mooncake", lossy=True)
    back, chat = read(tmp_path / "t.jsonl"), read("chat")
    for name in ("arrival_s", "input_tokens", "output_tokens", "session", "after", "gap_s"):
        pd.testing.assert_series_equal(back.requests[name], chat.requests[name])


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("tenant", ["a", "b", "a"]),
        ("multimodal", ["cat@0+4", None, None]),
        ("public_tokens", [0, 0, 3]),
        ("retention", [None, "0-4:80", None]),
        ("retry", [0, 0, 1]),
        ("cancel_after_s", [math.nan, 5.0, math.nan]),
        ("salt", ["x", None, None]),
    ],
)
def test_mooncake_form_names_each_column_that_it_loses(
    tmp_path: Path, column: str, values: list[object]
) -> None:
    whole = trace_of([[], [], []], input_tokens=[5, 5, 5])
    with_column = replace(whole, requests=whole.requests.assign(**{column: values}))
    with pytest.raises(BadInput, match=f"mooncake can't hold the column {column}; "):
        write(with_column, tmp_path / "t.jsonl", "mooncake")
    unused = replace(whole, requests=whole.requests.assign(**{column: DEFAULTS[column]}))
    write(unused, tmp_path / "t.jsonl", "mooncake")


def test_fields_that_mooncake_does_not_have_are_named(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}
    (tmp_path / "t.jsonl").write_text(json.dumps(line | {"user": "a", "colour": 3}) + "\n")
    assert read(tmp_path / "t.jsonl").notes == (
        "fields that are not part of the format are ignored: colour, user",
    )


def test_the_published_mooncake_trace_survives_its_own_form(tmp_path: Path, shared: Path) -> None:
    trace = read(shared / "traces/mooncake_conversation_trace.jsonl.zst", limit=3000)
    write(trace, tmp_path / "t.jsonl.zst", "mooncake")
    back = read(tmp_path / "t.jsonl.zst")
    pd.testing.assert_frame_equal(back.requests, trace.requests)
    assert np.array_equal(paths(back).matched, paths(trace).matched)


@pytest.mark.parametrize(
    ("name", "form", "part"), [("t.xyz", None, "ending"), ("t.csv", "xml", "choose parquet")]
)
def test_unknown_forms(tmp_path: Path, name: str, form: str | None, part: str) -> None:
    with pytest.raises(BadInput, match=part):
        write(read("rag"), tmp_path / name, form)


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="can't be written"):
        write(read("rag"), tmp_path / "no" / "such" / "t.parquet")


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "t.jsonl"
    place.write_text("before")
    broken = Trace("broken", table({"arrival_s": [0.0], "input_tokens": [1], "output_tokens": [1]}))
    monkeypatch.setattr("pagecast.traces.write.jsonl_lines", lambda trace: iter([b"half", None]))
    with pytest.raises(TypeError):
        write(broken, place)
    assert place.read_text() == "before"
    assert list(tmp_path.iterdir()) == [place]
