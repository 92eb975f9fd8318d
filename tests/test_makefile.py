"""`make demo` shows progress and its result, and of an installation its errors only."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def made(*arguments: str) -> str:
    command = ["make", "-C", str(ROOT), "--no-print-directory", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_make
def test_demo_echoes_no_command_and_installs_quietly() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("$(BIN)/python:", "$(VENV)/.base:", "demo:"):
        lines = recipe.split(f"\n{target}", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
        assert lines
        assert all(line.startswith("\t@") for line in lines), target
    planned = made("--dry-run", "--always-make", "demo")
    assert "installing pagecast into" in planned
    assert "install -qq " in planned


def test_an_error_of_a_quiet_installation_is_shown() -> None:
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-index", "pagecast-has-no-such-part"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode != 0
    assert "ERROR" in ended.stderr
    assert "WARNING" not in ended.stderr
