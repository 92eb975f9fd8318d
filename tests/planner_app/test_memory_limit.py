"""A machine with too little memory is told in one line, with exit code 3."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.commands import registry

resource = pytest.importorskip("resource", reason="limits of memory are POSIX's")


PROGRAM = """
import resource
from pathlib import Path
from pagecast.planner_app.cli import main
import pagecast.planner_app.commands.trace
pages = int(Path("/proc/self/statm").read_text().split()[0])
most = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
main(["trace", "generate", "{out}", "--requests", "20000000"])
"""


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="asks /proc how much is in use")
def test_a_bound_on_memory_ends_in_one_line_and_3(tmp_path: Path) -> None:
    program = PROGRAM.format(out=tmp_path / "big.parquet")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if "pagecast: " in line]
    assert len(lines) == 1
    assert "out of memory" in lines[0]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        ImportError("libx.so: failed to map segment from shared object"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_form_of_it_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def execute(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(registry, "execute", execute)
    monkeypatch.setattr("pagecast.planner_app.cli.drop_stdout", lambda: None)
    assert run(["replay"]) == 3
    message = capfd.readouterr().err
    assert message.count("\n") == 1
    assert "out of memory" in message
