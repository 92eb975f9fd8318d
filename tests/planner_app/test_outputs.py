"""Files that can't be written end a command in one line and exit code 2, and devices stay devices."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import yaml
from pagecast.planner_app.cli import run
from pagecast.sim.core.errors import BadInput
from pagecast.traces import write as writing
from pagecast.traces.write import replacing

REPLAY = ["replay", "chat", "--limit", "20"]
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.is_char_device(), reason="needs /dev/full")


def check_file(folder: Path, check: str) -> str:
    path = folder / "check.yaml"
    path.write_text(f"check:\n  trace: chat\n  limit: 20\n{check}")
    return str(path)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(arguments) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


@needs_full
@pytest.mark.parametrize("option", ["--report", "--perfetto"])
def test_a_replay_onto_a_full_device_fails(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    if option == "--report":
        pytest.importorskip("plotly")
    assert "/dev/full: can't be written (No space left" in refused([*REPLAY, option, "/dev/full"], capsys)
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@needs_full
@pytest.mark.parametrize("option", ["--junit", "--markdown"])
def test_a_gate_onto_a_full_device_fails(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = check_file(tmp_path, "  slo: ttft_p99<100s\n")
    message = refused(["check", "--scenario", file, option, "/dev/full"], capsys)
    assert "/dev/full: can't be written" in message


def test_a_device_is_written_to_and_stays_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with replacing(tmp_path / "pipe") as place:
        place.write_text("text")
    assert os.read(reader, 10) == b"text"
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
    os.close(reader)


def test_a_disk_that_is_full_only_at_the_end_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "fsync", full)
    path = tmp_path / "junit.xml"
    path.write_text("old")
    with pytest.raises(BadInput, match="No space left"), replacing(path) as place:
        place.write_text("new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["junit.xml"]


@pytest.mark.parametrize("name", ["t.txt", "t", "t.pftrace", "t.gz"])
def test_an_ending_that_perfetto_does_not_know_is_refused_before_the_replay(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(["replay", "nowhere", "--perfetto", str(tmp_path / name)], capsys)
    assert "the ending is not known; name a file .json or .json.gz" in message


@pytest.mark.parametrize(
    ("command", "endings"),
    [
        (["replay", "{file}", "--report", "{file}"], ".html or .htm"),
        (["check", "--scenario", "{file}", "--junit", "{file}"], ".xml"),
    ],
)
def test_a_report_does_not_overwrite_what_it_is_made_from(
    command: list[str], endings: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "input.yaml"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,5,5\n")
    message = refused([part.format(file=path) for part in command], capsys)
    assert f"{path}: the ending is not known; name a file {endings}" in message
    assert path.read_text().startswith("arrival_s")


@pytest.mark.parametrize("value", [".nan", ".inf"])
@pytest.mark.parametrize("field", ["limits: {ttft_s.p99: {max: %s}}", "regression: {ttft_s.p99: %s}"])
def test_a_limit_that_is_no_number_is_bad_input(
    value: str, field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = check_file(tmp_path, f"  {field % value}\n")
    assert yaml.safe_load(Path(file).read_text())["check"]
    message = refused(["check", "--scenario", file], capsys)
    assert "ttft_s.p99" in message
    assert "finite number" in message
