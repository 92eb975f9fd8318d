"""Every reader: what a file of its format becomes, and that formats are told apart by content."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard
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
