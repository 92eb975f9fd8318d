"""One screen: the first block of every command, on several inputs, is at most 12 lines of 100 columns.

A block ends at an empty line. Its first lines hold the answer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pagecast.planner_app import console
from pagecast.planner_app.cli import run
from pagecast.planner_app.commands.screen import COLUMNS, LINES, show_block, table_rows
from pagecast.planner_app.wording.server_figures import verdict
from pagecast.sim.note import Caution
from pagecast.sim.runs.bench_results import model_named
from rich.table import Table

SMALL = ("chat", "--limit", "40")
SLO = ("--slo", "ttft_p99<2s")
PRICES = ("--price", "H200=4", "--price", "L4=1")
GATE = """model: Qwen/Qwen3-8B
gpu: H200
max_num_seqs: {seqs}
check:
  trace: chat
  limit: 40
  slo: ttft_p99<1s, tpot_p95<50ms, goodput(ttft<1s,tpot<50ms)>0.98
  limits: {{output_tokens_per_s: {{min: 1}}, token_hit_rate: {{min: 0.5}}, preemptions: {{max: 0}},
    rejected: {{max: 0}}, evicted_blocks: {{max: 0}}, "ttft_s.mean": {{max: 9}}}}
  regression: {{ttft_s.p99: 10}}
"""
COMMANDS = {
    "replay": (("replay", *SMALL), "served all in"),
    "replay, rejected": (("replay", *SMALL, "--max-model-len", "900"), "rejected"),
    "replay, intervals": (("replay", *SMALL, "--replicates", "5"), "served all in"),
    "replay, host tier": (
        ("replay", *SMALL, "--num-gpu-blocks", "1500", "--kv-offloading-size", "8"),
        "served all in",
    ),
    "replay, speculation": (("replay", *SMALL, "--speculative-config", "eagle:3:0.7"), "served all in"),
    "replay, fleet": (("replay", *SMALL, "--replicas", "3", "--router", "cost"), "3 replicas"),
    "replay, roofline": (("replay", *SMALL, "--gpu", "L4", "--max-model-len", "16384"), "served all in"),
    "memory": (("memory", "--model", "Qwen/Qwen3-8B", "--gpu", "H200"), "starts; KV for 814,592 tokens"),
    "memory, windows": (
        ("memory", "--model", "openai/gpt-oss-20b", "--gpu", "H100", "--tensor-parallel-size", "2"),
        "sequences at once: ",
    ),
    "memory, does not start": (
        ("memory", "--model", "Qwen/Qwen3-8B", "--gpu", "H200", "--gpu-memory-utilization", "1.0"),
        "does not start",
    ),
    "sweep": (("sweep", *SMALL, "--set", "max_num_seqs=2,64", *SLO), "best replica that meets"),
    "sweep, nothing differs": (("sweep", *SMALL, "--set", "max_num_seqs=128,256"), "it makes no difference"),
    "sweep, GPUs": (
        ("sweep", *SMALL, "--set", "gpu=H200,L4", "--max-model-len", "16384", *SLO, *PRICES),
        "cheapest replica that meets",
    ),
    "tune": (("tune", "block-size", *SMALL, "--static"), "keep block_size"),
    "tune, budget": (("tune", "hbm-budget", *SMALL, "--static"), "take gpu_memory_utilization"),
    "plan": (
        ("plan", *SMALL, *SLO, "--most-requests", "200", "--replicates", "0", "--workers", "1"),
        "take 1 replica",
    ),
    "plan, fleet": (
        ("plan", *SMALL, *SLO, "--router", "cost", "--against", "round-robin", "--against", "llm-d"),
        "take 1 replica behind",
    ),
    "plan, several servers": (
        ("plan", *SMALL, *SLO, "--compare", "max_num_seqs=8,16", "--most-requests", "200"),
        "best of 2 servers",
    ),
    "replay, several concurrencies": (
        ("replay", *SMALL, "--sweep-concurrency", "1,2,4,8,16,32,64"),
        "most output",
    ),
    "trace describe": (("trace", "describe", "chat"), "chat"),
    "hits": (("hits", *SMALL, "--capacity", "1000,3000"), "chat"),
    "support": (("support", "--model", "Qwen/Qwen3-8B"), "step costs: C fitted to runs"),
    "support MODEL": (("support", "Qwen/Qwen3-8B"), "Qwen/Qwen3-8B"),
}


def block(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The first block that a command prints."""
    run(list(arguments))
    return capsys.readouterr().out.partition("\n\n")[0].splitlines()


def assert_one_screen(lines: list[str], answer: str) -> None:
    assert lines, "nothing is printed"
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert any(word in line for line in lines[:3] for word in answer.split("|"))


@pytest.mark.parametrize(("arguments", "answer"), COMMANDS.values(), ids=COMMANDS.keys())
def test_the_first_block_is_one_screen_with_the_answer_on_top(
    arguments: tuple[str, ...],
    answer: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(console.out, "_width", COLUMNS)
    assert_one_screen(block(arguments, capsys), answer)


@pytest.mark.parametrize(
    ("seqs", "answer"),
    [(128, "all 9 checks hold, 1 regression check not compared"), (1, "failed")],
)
def test_a_gate_says_first_what_holds_and_what_was_not_compared(
    seqs: int,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "gate.yaml").write_text(GATE.format(seqs=seqs))
    monkeypatch.chdir(tmp_path)
    lines = block(("check", "--scenario", "gate.yaml", "--skip-regression"), capsys)
    assert max(map(len, lines)) <= COLUMNS
    assert len(lines) <= LINES and "not compared" in "".join(lines[:2])
    assert answer in " ".join(lines[:2])


def test_explain_prints_what_the_block_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    run(["replay", *SMALL, "--explain"])
    assert "failed allocations" in capsys.readouterr().out
    run(["memory", "--model", "Qwen/Qwen3-8B", "--gpu", "H200", "--explain"])
    assert "CUDA graphs" in capsys.readouterr().out


def test_a_block_folds_sentences_leaves_out_whole_ones_and_counts_the_notes_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = " ".join(["word"] * 40)
    show_block([long, *["line"] * 5], [long, long], more=[long])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert lines[1].startswith("  word")
    assert "\n".join(lines).count("word") == 80  # the answer and what it rests on: both whole
    assert lines[-1].startswith("2 more notes (no warnings): --explain") and len(lines) == LINES
    show_block(["answer", *["line"] * 8], [long, "short"])
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "note: short",
        "1 more note (no warnings): --explain tells all, --json has every figure",
    ]


def test_a_caution_is_seen_before_all_that_an_answer_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever its words are: it is one where it is made."""
    long = "First sentence of a caution. " + " ".join(["word"] * 140)
    show_block(["line"] * 12, ["plain", Caution("read this"), Caution(long)], more=["fact"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "note: read this",
        "note: First sentence of a caution.",
        "2 more notes (1 warning cut short): --explain tells all, --json has every figure",
    ]
    assert len(lines) == LINES


def test_the_last_column_of_a_wide_table_is_folded_or_left_out() -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("name", "what it is"):
        table.add_column(title, no_wrap=True)
    table.add_row("a" * 30, " ".join(["word"] * 40))
    lines = table_rows(table)
    assert max(map(len, lines)) <= COLUMNS and "\n".join(lines).count("word") == 40
    table.add_row("a" * 95, "")
    assert table_rows(table)[0] == "name"


def test_a_sweep_leaves_the_command_that_runs_its_winner(capsys: pytest.CaptureFixture[str]) -> None:
    lines = block(("sweep", *SMALL, "--set", "max_num_seqs=2,64", *SLO), capsys)
    command = next(line for line in lines if line.startswith("replay it: "))
    assert command == "replay it: pagecast replay chat --limit 40 --max-num-seqs 64"
    assert run(command.split()[3:]) == 0
    assert "served all" in capsys.readouterr().out


RUN = "tests/engine/recorded/h200b-qwen3-8b-chat-async"


def test_a_validation_of_decisions_says_that_times_were_not_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(__file__).resolve().parents[2] / RUN
    lines = block(("validate", str(folder)), capsys)
    assert lines[0] == "chat: same decisions as pagecast 0.1.0; times are not compared: add --costs auto"
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ({"ttft_s.mean": -1.2, "tpot_s.mean": 3.4, "ttft_s.p99": 80.0}, "agrees: means within 4% "),
        ({"ttft_s": 0.0}, "agrees: means within 1% "),
        ({"ttft_s.mean": 31.0, "tpot_s.mean": 0.4}, "differs (forecast: TTFT mean +31.0%, TPOT mean +0.4%)"),
        ({"kv_usage": 3.0}, "nothing to compare"),
    ],
)
def test_a_verdict_goes_by_the_means_of_latencies(errors: dict[str, float], words: str) -> None:
    assert verdict(errors.items()).startswith(words)


def test_results_name_the_model_that_they_are_of(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"model_id": "Qwen/Qwen3-4B", "ttfts": []}')
    assert model_named(path) == "Qwen/Qwen3-4B"
    path.write_text("[1, 2]")
    assert model_named(path) is None and model_named(tmp_path / "none.json") is None


@pytest.mark.slow
def test_a_calibration_says_first_what_was_fitted_and_how_far_it_may_be_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of = "tests/engine/recorded/h100t-qwen3-8b-azure-sync"
    folder = str(Path(__file__).resolve().parents[2] / run_of)
    lines = block(("calibrate", "--from-run", folder, "--out", str(tmp_path / "a.json")), capsys)
    assert_one_screen([line for line in lines if str(tmp_path) not in line], "fitted to 2,394 steps of 1 run")
    assert lines[1].startswith("no run was left out of the fit") and len(lines) <= LINES
