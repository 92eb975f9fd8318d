"""Bad files end in one line that names file, line and field and says what to do."""

import gzip
import json
import os
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.traces import source as sources
from pagecast.traces.checks import find_problem
from pagecast.traces.read import read
from pagecast.traces.write import jsonl_lines

GOOD = {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


def mooncake(**changes: object) -> bytes:
    """Three lines of which the second is changed; a value of ... takes the field out."""
    second = {name: value for name, value in {**GOOD, **changes}.items() if value is not ...}
    return b"\n".join(json.dumps(row).encode() for row in ({**GOOD, "timestamp": 0}, second, GOOD)) + b"\n"


def refusal(folder: Path, data: bytes, **options: object) -> str:
    """The error message for a file, without its path."""
    path = folder / "trace.jsonl"
    path.write_bytes(data)
    with pytest.raises(BadInput) as error:
        read(path, **options)
    text = str(error.value)
    assert error.value.exit_code == 2
    assert "\n" not in text
    assert text.startswith(str(path))
    return text.removeprefix(str(path))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input_length": -5}, "input_length"),
        ({"input_length": 0}, "input_length"),
        ({"input_length": 1.5}, "input_length"),
        ({"input_length": "600"}, "input_length"),
        ({"input_length": True}, "input_length"),
        ({"input_length": ...}, "input_length"),
        ({"input_length": None}, "input_length"),
        ({"input_length": 10**30}, "input_length"),
        ({"output_length": -1}, "output_length"),
        ({"output_length": ...}, "output_length"),
        ({"timestamp": float("nan")}, "timestamp"),
        ({"timestamp": float("inf")}, "timestamp"),
        ({"timestamp": -1}, "timestamp"),
        ({"timestamp": "soon"}, "timestamp"),
        ({"timestamp": ...}, "timestamp"),
        ({"hash_ids": [1]}, "hash_ids"),
        ({"hash_ids": [1, 2, 3]}, "hash_ids"),
        ({"hash_ids": [1, -2]}, "hash_ids"),
        ({"hash_ids": [1, "x"]}, "hash_ids"),
        ({"hash_ids": [1, 2**70]}, "hash_ids"),
        ({"hash_ids": 7}, "hash_ids"),
    ],
)
def test_mooncake_fields(tmp_path: Path, changes: dict, field: str) -> None:
    assert f", line 2, field {field}: " in refusal(tmp_path, mooncake(**changes))


def test_times_out_of_order_name_the_line_and_the_remedy(tmp_path: Path) -> None:
    text = refusal(tmp_path, mooncake(timestamp=5000))
    assert ", line 3, field timestamp: " in text
    assert "--sort" in text
    assert read(tmp_path / "trace.jsonl", sort=True).requests["arrival_s"].tolist() == [0.0, 1.0, 5.0]


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (mooncake()[:-20], ", line 3: broken JSON"),
        (mooncake() + b'{"timestamp": 1', ", line 4: broken JSON"),
        (mooncake() + b"[1, 2]\n", ", line 4: [1, 2] is no JSON object"),
        (
            mooncake() + b'{"timestamp": 1, "input_length": 5, "input_length": 50}\n',
            ", line 4: the field input_length is given twice; keep one",
        ),
        (mooncake() + b'{"timestamp": "\xff"}\n', ", line 4: not UTF-8"),
        (mooncake() + b'{"timestamp": ' + b"9" * 5000 + b"}\n", ", line 4: unreadable JSON"),
        (mooncake() + b"\n" * 2000, "blank lines"),
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"PK\x03\x04 and so on", "unzip"),
        (b"\xff\xfe{\x00", "UTF-16"),
        (b'{"a": 1}\n', "no known format; pagecast reads"),
        (b"name,age\nx,3\n", "no known format; pagecast reads"),
        (b"\x00\x01\x02\x03" * 100, "no known format (no text: there are zero bytes in it)"),
        (b"\x00" * 5000, "no text, only zero bytes; the file was not written in full"),
        (gzip.compress(mooncake(), mtime=0)[:-12], "cut off"),
        (gzip.compress(mooncake(), mtime=0)[:10] + b"broken broken", "compress"),
        (zstandard.ZstdCompressor().compress(mooncake() * 50)[:-5], "cut off"),
        (zstandard.ZstdCompressor().compress(mooncake())[:8] + b"broken broken", "compress"),
    ],
)
def test_broken_files(tmp_path: Path, data: bytes, part: str) -> None:
    assert part in refusal(tmp_path, data)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_bomb_is_refused_by_its_unpacked_size(tmp_path: Path, pack) -> None:
    assert "--max-bytes" in refusal(tmp_path, pack(mooncake() * 20_000), max_bytes=1 << 21)


def test_an_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1 << 20)
    long = b'{"timestamp": 5, "x": "' + b"y" * (1 << 21) + b'"}\n'
    assert ", line 4: longer than 1 MiB; a trace has a request per line: write" in refusal(
        tmp_path, mooncake() + long
    )


def test_a_sparse_two_gigabyte_line_is_refused_quickly(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(mooncake())
        file.truncate(2 << 30)
    with pytest.raises(BadInput, match="line 4: longer than 64 MiB of zero bytes"):
        read(path)


CSV = b"arrival_s,input_tokens,output_tokens\n0,10,1\n\n1,20,2\n2,30,3\n"


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (CSV.replace(b"20", b"-20"), ", line 4, field input_tokens: -20 is less than 1"),
        (CSV.replace(b"20", b"2.5"), ", line 4, field input_tokens: 2.5 is no whole number"),
        (CSV.replace(b"20", b"x"), ", line 4, field input_tokens: 'x' is no number"),
        (CSV.replace(b"20", b""), ", line 4, field input_tokens: empty"),
        (CSV.replace(b"1,20", b"nan,20"), ", line 4, field arrival_s: nan is not finite"),
        (CSV.replace(b"1,20", b"9,20"), ", line 5, field arrival_s: goes back in time"),
        (CSV.replace(b"1,20", b"-1,20"), ", line 4, field arrival_s: -1 is less than 0"),
        (CSV.replace(b"1,20,2", b"1,20"), ", line 4: 2 fields where the header has 3"),
        (CSV.replace(b"20", b"\xff"), ", line 4: not UTF-8"),
        (
            CSV.replace(b"output_tokens", b"out"),
            "no column is known to hold output tokens; say which: --column",
        ),
        (
            CSV.replace(b"arrival_s", b"begun"),
            "no column is known to hold arrival times; say which: --column",
        ),
        (CSV.replace(b"arrival_s", b"input_tokens"), "line 1: "),
        (CSV.splitlines(keepends=True)[0], "at least one"),
        (b"arrival_s,input_tokens,output_tokens,after\n0,1,1,0\n", "line 2, field after: must be"),
        (b"arrival_s,input_tokens,output_tokens,after\n,1,1,\n", "line 2, field arrival_s: missing"),
        (b"arrival_s,input_tokens,output_tokens,cancel_after_s\n0,1,1,-3\n", "field cancel_after_s"),
        (
            b"TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\n",
            "line 2, field TIMESTAMP: 'soon' is no date",
        ),
        (b"TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n", "column GeneratedTokens is missing"),
        (b"Timestamp,Model,Request tokens\n5,x,1\n", "column Response tokens is missing"),
        (
            b"Timestamp,Model,Request tokens,Response tokens\n5,x,1,0\n6,x,9,0\n",
            "all of its 2 requests generated nothing",
        ),
    ],
)
def test_csv(tmp_path: Path, data: bytes, part: str) -> None:
    assert part in refusal(tmp_path, data)


OWN = {"arrival_s": 0.0, "input_tokens": 10, "output_tokens": 2}


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({**OWN, "spans": [[0, 0, 9]]}, "field spans: 9 tokens, but input_tokens says 10"),
        ({**OWN, "spans": [[0, 0]]}, "field spans: must be lists of three"),
        ({**OWN, "spans": [[0, -1, 10]]}, "field spans: a span's offset"),
        ({**OWN, "spans": [[-5, 0, 10]]}, "field spans: a text's name"),
        ({**OWN, "token_ids": [1, 2]}, "field token_ids: 2 tokens"),
        ({**OWN, "token_ids": [-1] * 10}, "field token_ids: -1 is no token id"),
        ({**OWN, "block_ids": [1]}, "field block_ids_tokens: missing"),
        ({**OWN, "after": 0}, "field arrival_s: stands beside"),
        ({**OWN, "arrival_s": None, "after": 5}, "field after: must be"),
        ({**OWN, "arrival_s": None}, "field arrival_s: missing"),
        ({**OWN, "gap_s": -1}, "field gap_s: -1 is less than 0"),
        ({**OWN, "model": 1.5}, "field model: 1.5 is no text"),
        ({**OWN, "model": 5}, "field model: 5 is no text"),
        ({**OWN, "salt": True}, "field salt: true is no text"),
        (
            {**OWN, "spans": [[0, 0, 10]], "token_ids": [1] * 10},
            "field token_ids: stands beside spans; a prompt has one of them",
        ),
    ],
)
def test_own_lines(tmp_path: Path, row: dict, part: str) -> None:
    first = {**OWN, "token_ids": list(range(10))} if "token_ids" in row else OWN
    text = refusal(tmp_path, json.dumps(first).encode() + b"\n" + json.dumps(row).encode())
    assert ", line 2, " in text
    assert part in text


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    data = json.dumps([{"conversations": [{"from": "human", "value": "a"}]}]).encode()
    assert "--tokenizer" in refusal(tmp_path, data)
    assert "item 2" in refusal(tmp_path, data[:-1] + b', {"conversations": [', tokenizer=str.split)
    assert "field conversations" in refusal(tmp_path, data.replace(b"value", b"v"), tokenizer=str.split)


def test_agent_turns_must_stand_together(tmp_path: Path) -> None:
    row = {"session": "a", "agent": "m", "t": 0, "input_length": 70, "output_length": 1, "hash_ids": [1]}
    data = b"\n".join(json.dumps({**row, "session": name}).encode() for name in "aba")
    assert ", line 3, field session: " in refusal(tmp_path, data)
    back = b"\n".join(json.dumps({**row, "t": t}).encode() for t in (5, 1))
    assert ", line 2, field t: goes back" in refusal(tmp_path, back)


def test_what_replay_can_mend_is_told_by_its_own_options(tmp_path: Path) -> None:
    disorder = refusal(tmp_path, b"arrival_s,input_tokens,output_tokens\n2,1,1\n1,1,1\n")
    assert "add --sort" in disorder and "convert" not in disorder
    texts = refusal(tmp_path, b'[{"conversations": [{"from": "human", "value": "hi"}]}]')
    assert "add --tokenizer FOLDER" in texts and "convert" not in texts
    other = refusal(tmp_path, b"time,prompt,completion\n0.5,1458,382\n")
    assert "Its first line is 'time, prompt, completion'" in other
    assert "say which: --column arrival=NAME --column input=NAME --column output=NAME" in other


def test_a_vllm_benchmark_without_its_requests_says_how_to_get_them(tmp_path: Path) -> None:
    summary = {"date": "20260101", "num_prompts": 300, "total_input_tokens": 5, "request_throughput": 6.6}
    text = refusal(tmp_path, json.dumps(summary).encode())
    assert "field input_lens: missing; run the benchmark again with --save-result --save-detailed" in text
    detailed = {**summary, "input_lens": [3], "output_lens": [2]}
    text = refusal(tmp_path, json.dumps(detailed).encode())
    assert "field start_times: missing, and the file does not say how requests were sent; run the" in text


def test_paths_that_are_no_trace(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        read(tmp_path / "missing")
    with pytest.raises(BadInput, match="folder without inputs"):
        read(tmp_path)
    with pytest.raises(BadInput, match="no such sample; there are chat"):
        read("sample:nothing")


@pytest.mark.parametrize(
    "options", [{"limit": 0}, {"block_tokens": 0}, {"session_rate": 0.0}, {"think_s": -1.0}]
)
def test_options_out_of_range(options: dict) -> None:
    with pytest.raises(BadInput, match=next(iter(options))):
        read("chat", **options)


TURN = {"session": "a", "agent": "m", "t": 0, "input_length": 70, "output_length": 1, "hash_ids": [1]}
CHAT = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 1, "input_length": 9, "output_length": 2}
SEEDS = {
    "own": b"".join(jsonl_lines(read("chat", limit=5))),
    "mooncake": mooncake(),
    "csv": CSV,
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,3,4\n2023-11-16 18:15:50,9,1\n",
    "burstgpt": b"Timestamp,Model,Request tokens,Response tokens\n5,x,472,18\n45,,1087,0\n",
    "vllm": b'{"input_lens": [1, 2], "output_lens": [3, 0], "start_times": [0.5, 0.25], "itls": [[], []]}',
    "sharegpt": b'[{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]',
    "agents": json.dumps(TURN).encode() + b"\n" + json.dumps(TURN).encode(),
    "bailian": json.dumps(CHAT).encode(),
    "aiperf": b'{"metadata": {"request_start_ns": 5}, "metrics": {"input_sequence_length": {"value": 1}, '
    b'"output_sequence_length": {"value": 2}}}',
    "gzip": gzip.compress(mooncake(), mtime=0),
    "zstd": zstandard.ZstdCompressor().compress(mooncake()),
}
SCRAPS = [
    b"null",
    b"NaN",
    b"-1",
    b"1e999",
    b'"',
    b"[]",
    b"{}",
    b"9" * 20,
    b"0.5",
    b",",
    b"\n",
    b"\r",
    b"\x00",
    b"\xff",
]


@pytest.mark.parametrize("kind", sorted(SEEDS))
@given(
    edits=st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 30), st.sampled_from(SCRAPS) | st.binary(max_size=3)),
        max_size=3,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
def test_whatever_a_file_holds_it_is_read_or_refused_in_one_line(
    tmp_path: Path, kind: str, edits: list
) -> None:
    data = SEEDS[kind]
    for place, length, scrap in edits:
        at = int(place * len(data))
        data = data[:at] + scrap + data[at + length :]
    path = tmp_path / "trace"
    path.write_bytes(data)
    refused = None
    try:
        assert find_problem(read(path, tokenizer=str.split)) is None
    except BadInput as error:
        refused = str(error)
    assert "\n" not in (refused or "")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_bomb_of_valid_lines_is_refused_by_its_expansion(tmp_path: Path, pack) -> None:
    line = json.dumps({**OWN, "x": "y" * (1 << 20)}).encode() + b"\n"
    assert "unpacks to more than 200 times its size" in refusal(tmp_path, pack(line * 80))


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="a pipe or a device; a trace is read twice"):
        read(tmp_path / "pipe")


@pytest.mark.parametrize("year", ["0000", "0001", "1600", "2300", "9999"])
def test_a_year_beyond_nanoseconds_is_named_by_its_line(tmp_path: Path, year: str) -> None:
    rows = f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n{year}-01-01 00:00:00,1,1\n"
    assert f"line 3, field TIMESTAMP: '{year}-01-01" in refusal(tmp_path, rows.encode())


@pytest.mark.parametrize("mark", [b";", b"\t", b"|"])
def test_a_table_may_be_separated_otherwise(tmp_path: Path, mark: bytes) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(CSV.replace(b",", mark))
    trace = read(path)
    assert trace.requests["input_tokens"].tolist() == [10, 20, 30]
    assert trace.requests["output_tokens"].tolist() == [1, 2, 3]


def test_a_comma_in_a_column_of_another_separator_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b'arrival_s;input_tokens;output_tokens;"a,b"\n0;10;1;x\n')
    assert read(path).requests["input_tokens"].tolist() == [10]


def test_decimal_commas_are_answered_with_what_to_write(tmp_path: Path) -> None:
    data = CSV.replace(b",", b";").replace(b"1;20", b"1,5;20")
    message = refusal(tmp_path, data)
    assert (
        "line 4, field arrival_s: '1,5' is no number; write it without commas, decimals with a point"
        in message
    )


@pytest.mark.parametrize("mark", [b";", b"\t"])
@pytest.mark.parametrize("number", [b"1.000", b"20.000", b"1.234.567"])
def test_a_point_between_thousands_is_refused(tmp_path: Path, mark: bytes, number: bytes) -> None:
    data = CSV.replace(b",", mark).replace(b"20", number)
    message = refusal(tmp_path, data)
    assert f"line 4, field input_tokens: '{number.decode()}' may be a thousand or one" in message


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_broken_json_names_the_column_at_fault(tmp_path: Path, end: bytes) -> None:
    line = b'{"arrival_s": 0.6, "input_tokens": 900'
    message = refusal(tmp_path, json.dumps(OWN).encode() + b"\n" + line + end)
    assert f", line 2: broken JSON at column {len(line) + 1}: Expecting ',' delimiter" in message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("multimodal", "foo", "'foo' must be IDENTIFIER@OFFSET+LENGTH"),
        ("multimodal", "a@0+0", "'a@0+0' must be IDENTIFIER@OFFSET+LENGTH"),
        ("multimodal", "a@" + "9" * 5000 + "+1", "must be IDENTIFIER@OFFSET+LENGTH"),
        ("multimodal", "a@0+5 b@4+2", "'b@4+2' overlaps another item, or the prompt's end"),
        ("multimodal", "a@8+3", "'a@8+3' overlaps another item, or the prompt's end"),
        ("retention", "foo", "retention 'foo': write START-END:PRIORITY"),
        ("retention", "0-5:" + "9" * 5000, "holds a number beyond 64 bits"),
        ("drafts", "foo", "'foo' is no whole number of at least 0"),
        ("accepted_drafts", "1 -2", "'-2' is no whole number of at least 0"),
        ("public_tokens", 11, "11 are more than the prompt's 10"),
    ],
)
def test_a_column_with_a_form_of_its_own_is_checked_where_it_is_read(
    tmp_path: Path, field: str, value: object, words: str
) -> None:
    good = {"multimodal": "a@0+5 b@5+5", "retention": "0-5:90:2.5 decode:0", "drafts": "3 0", "n": 1}
    lines = [{**OWN, **good, "accepted_drafts": "1", "public_tokens": 10}, {**OWN, field: value}]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    assert f", line 2, field {field}: " in (message := refusal(tmp_path, data))
    assert words in message


def test_no_more_drafts_are_accepted_than_are_made(tmp_path: Path) -> None:
    lines = [
        {**OWN, "drafts": "3 0", "accepted_drafts": "2 1"},
        {**OWN, "drafts": "3", "accepted_drafts": "5"},
    ]
    message = refusal(tmp_path, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    assert message.endswith(", line 2, field accepted_drafts: 5 accepted of 3 in drafts; correct the line")


def test_a_field_given_twice_in_an_item_of_a_json_array_is_refused(tmp_path: Path) -> None:
    turns = '"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]'
    message = refusal(tmp_path, f'[{{"id": "x", {turns}, "id": "y"}}]'.encode(), tokenizer=str.split)
    assert "item 1: the field id is given twice; keep one" in message


@pytest.mark.parametrize("kind", ["agents", "sharegpt"])
def test_starts_that_are_drawn_need_a_seed_of_0_or_more(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(SEEDS[kind])
    with pytest.raises(BadInput, match="seed is -1; it must be at least 0"):
        read(path, seed=-1, tokenizer=str.split)


def test_a_form_of_prompt_that_is_empty_is_none(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({**OWN, "spans": None, "token_ids": [1] * 10}) + "\n")
    assert read(path).token_ids is not None
