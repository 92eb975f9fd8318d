"""Every reader: what a file of its format becomes, and that formats are told apart by content."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard
from pagecast.sim.core.errors import BadInput
from pagecast.traces.read import read
from pagecast.traces.schema import Trace


def lengths_add_up(trace: Trace) -> bool:
    """Every prompt's spans have as many tokens as the prompt."""
    assert trace.spans is not None
    return all(
        sum(length for _, _, length in trace.spans.row(row)) in (0, tokens)
        for row, tokens in enumerate(trace.integers("input_tokens").tolist())
    )


def tokens_of(trace: Trace, row: int) -> list[tuple[int, int]]:
    """A prompt as one (content, offset) a token: equal exactly where the tokens are."""
    assert trace.spans is not None
    return [(c, o + i) for c, o, n in trace.spans.row(row) for i in range(n)]


def mooncake(*rows: dict) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


TWO_TURNS = mooncake(
    {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 6, "hash_ids": [7, 9, 3]},
)


def test_mooncake_ids_name_tokens(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(TWO_TURNS)
    trace = read(tmp_path / "t")
    assert trace.requests["arrival_s"].tolist() == [0.0, 3.0]
    assert trace.requests["input_tokens"].tolist() == [700, 1100]
    assert trace.requests["output_tokens"].tolist() == [5, 6]
    assert lengths_add_up(trace)
    first, second = tokens_of(trace, 0), tokens_of(trace, 1)
    assert first[:512] == second[:512]
    assert not set(first[512:]) & set(second)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_compression_is_told_by_content(tmp_path: Path, pack) -> None:
    (tmp_path / "trace.jsonl").write_bytes(pack(TWO_TURNS))
    assert len(read(tmp_path / "trace.jsonl")) == 2


def test_concatenated_zstd_frames_are_all_read(tmp_path: Path) -> None:
    pack = zstandard.ZstdCompressor().compress
    first, second = TWO_TURNS.splitlines(keepends=True)
    (tmp_path / "t.zst").write_bytes(pack(first) + pack(second))
    assert len(read(tmp_path / "t.zst")) == 2


def test_mooncake_delay_follows_the_sessions_last_turn(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(
        mooncake(
            {"timestamp": 1000, "session_id": "a", "input_length": 5, "output_length": 1},
            {"delay": 2500, "session_id": "a", "input_length": 9, "output_length": 1},
        )
    )
    trace = read(tmp_path / "t")
    assert trace.requests["after"].tolist() == [-1, 0]
    assert trace.requests["gap_s"].tolist() == [0.0, 2.5]
    assert np.isnan(trace.requests["arrival_s"][1])


def test_azure_times_count_from_the_first(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50,396,0\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    trace = read(tmp_path / "t.csv")
    assert trace.requests["arrival_s"].tolist() == [0.0, pytest.approx(4.314579)]
    assert trace.requests["input_tokens"].tolist() == [374, 396]
    assert trace.spans is None
    assert "1 of 3 requests" in trace.notes[0]


def test_published_traces(shared: Path) -> None:
    conversation = read(shared / "traces/mooncake_conversation_trace.jsonl.zst")
    assert len(conversation) == 12_031
    assert conversation.requests["input_tokens"].mean() == pytest.approx(12_035, abs=1)
    assert lengths_add_up(conversation)
    azure = read(shared / "traces/AzureLLMInferenceTrace_conv_2023.csv.zst")
    assert len(azure) == 19_366
    assert azure.requests["output_tokens"].median() == 129
    assert len(read(shared / "workloads/poisson_10k_q5_512_128.jsonl.gz", limit=100)) == 100


def lines(*rows: dict) -> bytes:
    return mooncake(*rows)


def write(folder: Path, data: bytes | str) -> Path:
    path = folder / "trace"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def turn(session: str, t: float, ids: list[int], **more) -> dict:
    line = {
        "session": session,
        "agent": "main",
        "t": t,
        "input_length": 64 * len(ids) + 10,
        "output_length": 3,
    }
    return {**line, "api_time": 2.0, "think_time": 0.0, "hash_ids": ids, **more}


def test_agent_turns_come_a_think_time_after_the_last_answered_one(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        lines(
            turn("a", 0.0, [1, 2]),
            turn("a", 7.0, [1, 2, 3], think_time=5.0, api_time=None),
            turn("a", 9.0, [1, 2, 3, 4], think_time=7.0),
            turn("a", 10.0, [9], agent="main/agent_001", model="small"),
            turn("b", 0.0, [1, 2]),
        ),
    )
    trace = read(path, session_rate=0.001, seed=3)
    assert trace.requests["after"].tolist() == [-1, 0, 0, 0, -1]
    # The sub-agent's own think time means nothing: it begins 8 s after its parent's turn ended at 2 s.
    assert trace.requests["gap_s"].tolist() == [0.0, 5.0, 7.0, 8.0, 0.0]
    assert trace.requests["model"].isna().tolist() == [True, True, True, False, True]
    assert trace.requests["arrival_s"][0] == 0.0
    assert trace.requests["arrival_s"][4] > 50
    assert lengths_add_up(trace)
    assert tokens_of(trace, 1)[:128] == tokens_of(trace, 0)[:128]
    assert not set(tokens_of(trace, 0)) & set(tokens_of(trace, 4)), "ids are local to a session"
    assert not set(tokens_of(trace, 0)[128:]) & set(tokens_of(trace, 1)), "the rest is in no whole block"


def test_agent_sessions_overlap_at_a_high_rate_and_say_the_default(tmp_path: Path) -> None:
    rows = [turn(name, 10.0 * i, [1], think_time=8.0 * (i > 0)) for name in "ab" for i in range(3)]
    path = write(tmp_path, lines(*rows))
    assert read(path, session_rate=100).requests["session"].tolist() == ["a", "b", "a", "b", "a", "b"]
    assert "0.01 per second" in read(path).notes[0]


def test_published_agent_sessions(shared: Path) -> None:
    trace = read(shared / "traces/weka_claude_code_v8_train.jsonl.zst", limit=3000)
    assert len(trace) == 3000
    assert lengths_add_up(trace)
    follows = trace.integers("after")
    sessions = trace.requests["session"]
    assert all(sessions[a] == sessions[b] for a, b in enumerate(follows) if b >= 0)


def test_bailian_keeps_times_and_joins_sessions(tmp_path: Path) -> None:
    chat = {"timestamp": 1.5, "input_length": 40, "output_length": 2, "type": "text", "turn": 1}
    first = {**chat, "chat_id": 159, "parent_chat_id": -1, "hash_ids": [5, 6, 7]}
    second = {**chat, "chat_id": 160, "parent_chat_id": 159, "timestamp": 9.25, "hash_ids": [5, 6, 8]}
    other = {**chat, "chat_id": 161, "parent_chat_id": -1, "timestamp": 9.5, "hash_ids": [5, 9]}
    trace = read(write(tmp_path, lines(first, second, other)))
    assert trace.requests["arrival_s"].tolist() == [1.5, 9.25, 9.5]
    assert trace.requests["session"].tolist() == ["159", "159", "161"]
    assert "after" not in trace.requests
    assert lengths_add_up(trace)
    assert tokens_of(trace, 0)[:32] == tokens_of(trace, 1)[:32]
    assert len(set(tokens_of(trace, 0)) & set(tokens_of(trace, 2))) == 16


def test_burstgpt_leaves_failures_out(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,s1,1.5,ChatGPT,472,18,490,Conversation log\n45,,0,ChatGPT,1087,0,1087,API log\n"
        "118,s2,2.0,GPT-4,417,276,693,Conversation log\n",
    )
    trace = read(path)
    assert trace.requests["arrival_s"].tolist() == [5.0, 118.0]
    assert trace.requests["model"].tolist() == ["ChatGPT", "GPT-4"]
    assert trace.requests["session"].tolist() == ["s1", "s2"]
    assert "1 of 3" in trace.notes[0]


def test_vllm_benchmark_is_ordered_by_start(tmp_path: Path) -> None:
    document = {
        "date": "x",
        "input_lens": [10, 20, 30],
        "output_lens": [5, 6, 0],
        "ttfts": [0.1, 0.2, 0.0],
        "itls": [[0.1], [0.2], []],
        "start_times": [1000.5, 1000.25, 1000.0],
    }
    trace = read(write(tmp_path, json.dumps(document)))
    assert trace.requests["arrival_s"].tolist() == [0.0, 0.25]
    assert trace.requests["input_tokens"].tolist() == [20, 10]
    del document["start_times"]
    with pytest.raises(BadInput, match="start_times: missing"):
        read(write(tmp_path, json.dumps(document)))


def test_aiperf_export_is_ordered_by_start(tmp_path: Path) -> None:
    def record(start_ns: int, inputs: int, phase: str = "profiling", **more: object) -> dict:
        metrics = {"input_sequence_length": {"value": inputs, "unit": "tokens"}, **more}
        about = {"conversation_id": "c", "request_start_ns": start_ns, "benchmark_phase": phase}
        return {"metadata": about, "metrics": metrics, "error": None}

    now, done = 1_764_000_000_000_000_000, {"output_sequence_length": {"value": 4}}
    path = write(
        tmp_path,
        lines(
            record(now + 250_000_000, 20, **done),
            record(now, 10, **done),
            record(now - 10**9, 5, "warmup", **done),
            record(now, 30),
        ),
    )
    trace = read(path)
    assert trace.requests["arrival_s"].tolist() == [0.0, 0.25]
    assert trace.requests["input_tokens"].tolist() == [10, 20]
    assert trace.requests["session"].tolist() == ["c", "c"]
    assert "2 of 4" in trace.notes[0]


CONVERSATIONS = [
    {"id": "x", "conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]},
    {
        "id": "y",
        "conversations": [
            {"from": "human", "value": "a b"},
            {"from": "gpt", "value": "d e f"},
            {"from": "human", "value": "g"},
            {"from": "gpt", "value": "h"},
        ],
    },
]


@pytest.mark.parametrize("form", ["array", "lines"])
def test_sharegpt_turns_quote_answers(tmp_path: Path, form: str) -> None:
    data = json.dumps(CONVERSATIONS).encode() if form == "array" else lines(*CONVERSATIONS)
    trace = read(write(tmp_path, data), tokenizer=str.split, session_rate=5.0, think_s=4.0)
    assert trace.requests["input_tokens"].tolist() == [2, 2, 6]
    assert trace.requests["output_tokens"].tolist() == [1, 3, 1]
    assert trace.requests["after"].tolist() == [-1, -1, 1]
    assert trace.requests["gap_s"].tolist() == [0.0, 0.0, 4.0]
    assert lengths_add_up(trace)
    assert tokens_of(trace, 0) == tokens_of(trace, 1) == tokens_of(trace, 2)[:2]
    answer = int(trace.integers("output_content")[1])
    assert tokens_of(trace, 2)[2:5] == [(answer, 0), (answer, 1), (answer, 2)]


def test_sharegpt_takes_a_transformers_folder(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(
        tmp_path / "tok"
    )
    trace = read(write(tmp_path, json.dumps(CONVERSATIONS)), tokenizer=tmp_path / "tok")
    assert trace.requests["input_tokens"].tolist() == [2, 2, 6]


def test_plain_csv_takes_any_column(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "arrival_s,input_tokens,output_tokens,priority,session,after,gap_s,color\n"
        "0.5,10,1,2,a,,,red\n,30,2,0,a,0,1.5,blue\n",
    )
    trace = read(path)
    assert trace.requests["priority"].tolist() == [2, 0]
    assert trace.requests["after"].tolist() == [-1, 0]
    assert trace.requests["gap_s"].tolist() == [0.0, 1.5]
    assert np.isnan(trace.requests["arrival_s"][1])
    assert "color" in trace.notes[0]


def test_recorded_runs_share_blocks(tmp_path: Path) -> None:
    row = {"arrival_s": 0.0, "input_tokens": 20, "output_tokens": 2, "block_ids_tokens": 16}
    rows = [{**row, "block_ids": [4, 5]}, {**row, "block_ids": [4, 6], "priority": -1}]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "inputs.jsonl.gz").write_bytes(gzip.compress(lines(*rows)))
    trace = read(tmp_path / "run")
    assert trace.name == "run"
    assert trace.requests["priority"].tolist() == [0, -1]
    assert tokens_of(trace, 0)[:16] == tokens_of(trace, 1)[:16]
    assert lengths_add_up(trace)


def test_published_recorded_runs(shared: Path) -> None:
    for run in sorted((shared / "groundtruth/vllm-0.24.0-h200-qwen3-8b").glob("*/inputs.jsonl.gz")):
        assert len(read(run.parent)) > 200


def test_token_ids_are_kept(tmp_path: Path) -> None:
    row = {"arrival_s": 0, "input_tokens": 3, "output_tokens": 1, "token_ids": [5, 6, 7]}
    trace = read(write(tmp_path, lines(row)))
    assert trace.token_ids is not None
    assert trace.token_ids[0].tolist() == [5, 6, 7]


def test_dates_count_from_the_first(tmp_path: Path) -> None:
    row = {"input_length": 5, "output_length": 1}
    trace = read(write(tmp_path, lines({**row, "timestamp": 1.7e12}, {**row, "timestamp": 1.7e12 + 500})))
    assert trace.requests["arrival_s"].tolist() == [0.0, 0.5]


def test_limit_stops_early(tmp_path: Path) -> None:
    assert len(read(write(tmp_path, TWO_TURNS + b"not read"), limit=2)) == 2


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    bom = b"\xef\xbb\xbf"
    assert len(read(write(tmp_path, bom + TWO_TURNS))) == 2
    assert len(read(write(tmp_path, bom + b"arrival_s,input_tokens,output_tokens\n0,1,1\n"))) == 1


def test_a_name_with_a_line_end_stays_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a\nb.jsonl"
    path.write_bytes(TWO_TURNS)
    assert read(path).name == "a?b"


def test_options_that_a_format_has_no_use_for_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(TWO_TURNS)
    given = {"session_rate": 2.0, "think_s": 1.0, "tokenizer": str.split, "block_tokens": 512}
    notes = read(path, **given).notes
    assert [note.split(" was not used")[0] for note in notes] == ["session_rate", "think_s", "tokenizer"]
    assert not read(path).notes
    assert "block_tokens was not used" in read("chat", block_tokens=512).notes[-1]
