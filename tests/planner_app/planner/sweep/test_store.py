"""A folder that is no study, or whose disk is full, ends a sweep in one line with no worker left."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pagecast.planner_app.planner.sweep.store import Store

SWEEP = ["sweep", "chat", "--limit", "60", "--set", "max_num_seqs=1:40:1", "--workers", "3"]

needs_ps = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="looks for processes by ps")


def other_table(folder: Path) -> None:
    database = sqlite3.connect(folder / "study.sqlite")
    database.executescript("CREATE TABLE trials (a, b); INSERT INTO trials VALUES (1, 2);")
    database.close()


def other_rows(folder: Path) -> None:
    Store(folder, {}).close()
    database = sqlite3.connect(folder / "study.sqlite")
    database.executescript(
        "INSERT INTO trials (number, point, figures, terms, reason) VALUES (1, '[', '{}', '[]', '');"
    )
    database.close()


def full(folder: Path) -> None:
    """Every insertion fails, as on a disk that is full."""
    Store(folder, {}).close()
    database = sqlite3.connect(folder / "study.sqlite")
    database.executescript(
        "CREATE TRIGGER full BEFORE INSERT ON trials BEGIN SELECT RAISE(ABORT, 'disk is full'); END;"
    )
    database.close()


def no_database(folder: Path) -> None:
    (folder / "study.sqlite").write_text("a diary")


def a_folder_for_the_table(folder: Path) -> None:
    (folder / "trials.parquet").mkdir()


def session_members(session: int) -> list[str]:
    """The programs of a session that still run; those that only wait to be reaped left out."""
    listed = subprocess.run(["ps", "-eo", "sid=,stat=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return [row[2] for row in rows if row[0] == str(session) and not row[1].startswith("Z")]


@needs_ps
@pytest.mark.parametrize(
    "make",
    [
        other_table,
        other_rows,
        no_database,
        pytest.param(full, marks=pytest.mark.slow),
        pytest.param(a_folder_for_the_table, marks=pytest.mark.slow),
    ],
)
def test_a_folder_that_is_no_study_is_one_line_and_leaves_no_process(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path)
    assert str(tmp_path) in refused_alone([*SWEEP, "--out", str(tmp_path)])


@pytest.mark.slow
@needs_ps
def test_a_baseline_that_can_not_be_written_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "baseline.json").mkdir()
    check = tmp_path / "check.yaml"
    check.write_text("check: {trace: chat, limit: 60, draws: 6, regression: {ttft_s.p99: 5}}\n")
    arguments = ["check", "--scenario", str(check), "--write-baseline", str(tmp_path), "--workers", "3"]
    assert "baseline.json: can't be written" in refused_alone(arguments)


def refused_alone(arguments: list[str]) -> str:
    """The one line of a command that fails, of whose processes none is left."""
    program = [sys.executable, "-m", "pagecast", *arguments]
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True, start_new_session=True)
    _, message = process.communicate(timeout=100)
    assert process.returncode == 2, message
    assert message.count("\n") == 1
    end = time.monotonic() + 10
    while left := session_members(process.pid):
        assert time.monotonic() < end, left
        time.sleep(0.1)
    return message
