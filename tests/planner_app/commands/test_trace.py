"""`pagecast trace`: describes, converts, generates and hands out samples; mistakes are one line."""

import json
from pathlib import Path

import pytest
from pagecast import __version__
from pagecast.planner_app.cli import run as pagecast
from pagecast.planner_app.commands.trace import app
from pagecast.sim.core.errors import BadInput
from pagecast.traces.describe import describe
from pagecast.traces.read import read
from typer.testing import CliRunner, Result


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "140"})


def facts(*arguments: object) -> dict:
    """The one object that a command prints with --json."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def test_describe_prints_one_object() -> None:
    summary = facts("describe", "chat")
    assert summary == json.loads(json.dumps(describe(read("chat"))))


def test_describe_prints_a_table() -> None:
    result = run("describe", "chat")
    assert result.exit_code == 0
    assert "chat: 2,000 requests" in result.stdout
    for word in ("input tokens", "turns per session", "think time", "burstiness", "reuse", "working set"):
        assert word in result.stdout


def test_describe_passes_reading_options_on(tmp_path: Path) -> None:
    assert facts("describe", "chat", "--limit", 10)["requests"] == 10
    path = tmp_path / "unsorted.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n5,1,1\n0,1,1\n")
    assert isinstance(run("describe", path).exception, BadInput)
    assert facts("describe", path, "--sort")["requests"] == 2


def test_convert_keeps_everything(tmp_path: Path) -> None:
    out = tmp_path / "chat.parquet"
    assert facts("convert", "chat", out) == {"requests": 2000, "out": str(out), "notes": []}
    assert facts("describe", out) == facts("describe", "chat")


def test_convert_cuts_mixes_and_scales(tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl.zst"
    assert facts("convert", "rag", out, "--rows", "100:200")["requests"] == 100
    assert facts("convert", "chat", out, "--sessions", 3)["requests"] == len(
        read("chat").requests.query("session in ['s0', 's1', 's2']")
    )
    assert facts("convert", "rag", out, "--start", 10, "--end", 20, "--scale", 2)["requests"] == (
        read("rag").requests["arrival_s"].between(10, 20).sum()
    )
    assert read(out).requests["arrival_s"].max() < 5
    assert facts("convert", "rag", out, "--mix", "chat", "--mix", "code")["requests"] == 3600


def test_convert_refuses_to_lose_anything_unasked(tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    result = run("convert", "chat", out)
    assert isinstance(result.exception, BadInput)
    assert "--lossy" in str(result.exception)
    assert not out.exists()
    assert facts("convert", "chat", out, "--lossy")["requests"] == 2000


def test_generate_requests(tmp_path: Path) -> None:
    out = tmp_path / "g.parquet"
    arguments = ("generate", out, "--rate", 10, "--requests", 300, "--input", "uniform:5-9", "--output", 3)
    summary = facts(*arguments, "--arrivals", "gamma", "--cv", 2, "--seed", 4)
    assert summary["requests"] == 300
    assert summary["input_tokens"]["max"] == 9
    first = out.read_bytes()
    facts(*arguments, "--arrivals", "gamma", "--cv", 2, "--seed", 4)
    assert out.read_bytes() == first
    assert facts("generate", out, "--like", "rag", "--duration", 20)["input_tokens"]["mean"] > 1000


def test_generate_conversations(tmp_path: Path) -> None:
    out = tmp_path / "g.jsonl"
    summary = facts("generate", out, "--turns", 3, "--requests", 60, "--system-prompt", 500, "--think", 2)
    assert summary["sessions"]["turns"]["max"] == 3
    assert summary["gap_s"]["mean"] == 2
    assert summary["sharing"]["shareable_fraction"] > 0.3
    assert "written to" in run("generate", out, "--turns", 2, "--duration", 30).stdout


def test_what_is_generated_or_sampled_is_cut_down_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.csv"
    for arguments in (["generate", str(out), "--turns", "fixed:3", "--requests", "9"], ["sample", "chat"]):
        given = ["trace", *arguments, *(["--out", str(out)] if arguments[0] == "sample" else [])]
        assert pagecast(given) == 2
        assert "--lossy" in capsys.readouterr().err
        assert pagecast([*given, "--lossy"]) == 0
        assert len(read(out)) == (9 if arguments[0] == "generate" else 2000)


def test_generate_from_servegen_clients(tmp_path: Path) -> None:
    (tmp_path / "chunk-0-trace.csv").write_text("0,2.0,1.0,Gamma,1,1\n")
    (tmp_path / "chunk-0-dataset.json").write_text(
        '{"0": {"input_tokens": "{10: 1.0}", "output_tokens": "{20: 1.0}"}}'
    )
    summary = facts("generate", tmp_path / "s.csv", "--servegen", tmp_path, "--duration", 300)
    assert summary["requests"] == pytest.approx(600, abs=120)


def test_samples_are_listed_described_and_written(tmp_path: Path) -> None:
    assert facts("sample") == {"samples": ["chat", "code", "rag"]}
    assert "coding agents" in run("sample").stdout
    assert facts("sample", "code")["requests"] == 600
    assert facts("sample", "rag", "--out", tmp_path / "rag.parquet")["requests"] == 1000
    assert len(read(tmp_path / "rag.parquet")) == 1000


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("describe", "/no/such/file"), "no such file"),
        (("describe", "chat", "--limit", "0"), "limit 0"),
        (("sample", "poetry"), "no such sample"),
        (("convert", "chat", "out.xyz"), "ending"),
        (("convert", "chat", "out.jsonl", "--form", "xml"), "choose parquet"),
        (("convert", "chat", "out.jsonl", "--rows", "a:b"), "--rows 'a:b'"),
        (("convert", "chat", "out.jsonl", "--scale", "0"), "rate factor 0"),
        (("convert", "chat", "out.jsonl", "--start", "1e9"), "nothing is left"),
        (("generate", "out.jsonl", "--arrivals", "bursty"), "no such kind"),
        (("generate", "out.jsonl", "--input", "zipf:2"), "not understood"),
        (("generate", "out.jsonl", "--requests", "0"), "--requests 0"),
        (("generate", "out.jsonl", "--rate", "-1"), "--rate -1"),
        (("generate", "out.jsonl", "--servegen", "/no/such"), "no such file"),
    ],
)
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple, part: str) -> None:
    monkeypatch.chdir(tmp_path)
    error = run(*arguments).exception
    assert isinstance(error, BadInput), error
    assert part in str(error)
    assert "\n" not in str(error)
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def test_what_the_group_lists_is_not_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert pagecast(["trace", "--help"]) == 0
    assert "..." not in capsys.readouterr().out.split("Commands:")[1]


def test_tables_end_in_no_blanks_and_one_request_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    commands = (["trace", "describe", "chat"], ["hits", "chat"], ["replay", "chat", "--costs", "roofline"])
    for command in commands:
        assert pagecast([*command, "--limit", "1"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) > 5
        assert [line for line in lines if line != line.rstrip()] == []
    assert pagecast(["trace", "describe", "chat", "--limit", "1"]) == 0
    assert capsys.readouterr().out.startswith("chat: 1 request in 1 session\n")


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert pagecast(["--version"]) == 0
    assert capsys.readouterr().out == f"pagecast {__version__}\n"
