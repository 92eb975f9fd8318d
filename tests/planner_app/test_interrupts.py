"""Real interrupts, however many: the command says so and ends at once, and what is stored stays whole."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest
from pagecast.planner_app.cli import run as pagecast

STOPS = "pagecast: stopping...\n"
SAID = f"{STOPS}pagecast: interrupted\n"
GRID = ["--set", "kv_tokens=20000:84000:4000", "--costs", "roofline", "--limit", "300"]  # 17 trials
ENDLESS = ["--set", "max_num_seqs=1:900:1", "--costs", "roofline", "--speedup", "20"]
SIGNALS = [
    pytest.param((0.0,), marks=pytest.mark.slow),
    (0.0, 0.02),
    pytest.param((0.0, 0.001, 0.2, 0.201), marks=pytest.mark.slow),
]  # seconds after the first

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as a terminal sends them")


class Command:
    """pagecast in a session of its own, as a terminal would run it; ended for sure."""

    def __init__(self, *arguments: str) -> None:
        program = [sys.executable, "-m", "pagecast", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            program, stdout=pipe, stderr=pipe, text=True, start_new_session=True, preexec_fn=_heeds_interrupts
        )

    def interrupt(self, at: tuple[float, ...], whole_group: bool) -> None:
        """Ctrl-C goes to the whole group, workers included; `kill -INT` to the process alone."""
        first = time.monotonic()
        for offset in at:
            time.sleep(max(0.0, first + offset - time.monotonic()))
            with suppress(ProcessLookupError):  # it may have ended
                (os.killpg if whole_group else os.kill)(self.process.pid, signal.SIGINT)

    def ended(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr; fails where it does not end."""
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _heeds_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the tests themselves may run in a shell's background


def trials_in(folder: Path) -> int:
    with suppress(sqlite3.Error):
        database = sqlite3.connect(f"file:{folder}/study.sqlite?mode=ro", uri=True)
        with database:
            return int(database.execute("SELECT COUNT(*) FROM trials").fetchone()[0])
    return 0


def wait_until(condition) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < 60, "nothing happens"
        time.sleep(0.01)


def workers_of(pid: int) -> list[int]:
    """The worker processes, from their very start on."""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if b"resource_tracker" not in _program(child)]
    return []


def _program(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("at", SIGNALS)
def test_a_sweep_that_is_interrupted_ends_at_once_and_goes_on_where_it_was(at, tmp_path):
    command = ["sweep", "chat", *GRID, "--workers", "2", "--out", str(tmp_path / "study")]
    with Command(*command) as running:
        wait_until(lambda: trials_in(tmp_path / "study") >= 2 or running.process.poll() is not None)
        running.interrupt(at, whole_group=True)
        code, answer, said = running.ended()
    assert code == 130
    # What was found is printed, unless the interrupt came while a trial was stored.
    assert (answer, said) == ("", SAID) or (said == STOPS and "stopped before its end" in answer)
    kept = trials_in(tmp_path / "study")
    assert 2 <= kept < 17
    assert pagecast(["sweep", "chat", *GRID, "--workers", "1", "--out", str(tmp_path / "study")]) == 0
    table = pd.read_parquet(tmp_path / "study" / "trials.parquet")
    assert table["number"].tolist() == list(range(17))
    assert not table["ttft_p99_s"].isna().any()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for workers in /proc")
@pytest.mark.parametrize("whole_group", [True, False])
def test_workers_that_start_are_silent_and_gone_with_the_command(whole_group):
    with Command("sweep", "chat", *ENDLESS, "--workers", "2") as running:
        wait_until(lambda: len(workers_of(running.process.pid)) == 2)
        workers = workers_of(running.process.pid)
        running.interrupt((0.0, 0.01), whole_group)
        assert running.ended() == (130, "", SAID)
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


@pytest.mark.parametrize("times", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_an_interrupt_that_a_library_swallows_comes_again(times):
    """Swallowed once, the command still ends by itself; again and again, the process is ended."""
    program = f"""
import time
from pagecast.planner_app import cli
from pagecast.planner_app.commands import registry
def execute(arguments):
    for attempt in range({times}):
        try:
            if attempt == 0:
                print("ready", flush=True)
            time.sleep(60)
        except BaseException:
            pass
    time.sleep(60)
registry.execute = execute
cli.main([])
"""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=_heeds_interrupts)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=30)
    assert process.returncode == 130
    assert message == (SAID if times == 1 else "pagecast: stopping...\n")


RUN = "tests/engine/recorded/h200b-qwen3-8b-chat-async"
SYNC = "tests/engine/recorded/h100t-qwen3-8b-azure-sync"


def busy_s(pid: int) -> float:
    """CPU time of a process and of its workers: seconds, however busy the machine is."""
    total = 0.0
    for each in (pid, *workers_of(pid)):
        with suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def interrupted(at_s: float, *arguments: str) -> tuple[int, str, str]:
    """What a command says that is interrupted after so much CPU time."""
    with Command(*arguments) as running:
        wait_until(lambda: busy_s(running.process.pid) > at_s or running.process.poll() is not None)
        running.interrupt((0.0,), whole_group=True)
        return running.ended()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="reads CPU time in /proc")
def test_an_interrupted_validation_prints_the_forecast_without_its_intervals():
    code, answer, said = interrupted(5, "validate", RUN, "--costs", "auto", "--replicates", "2000")
    assert (code, said) == (130, STOPS)
    assert answer.startswith("chat: agrees: means within 2%")
    assert "interrupted: intervals are missing, or of the draws until then" in answer


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="reads CPU time in /proc")
def test_an_interrupted_calibration_prints_the_costs_and_writes_no_file(tmp_path):
    out = tmp_path / "costs.json"
    command = ["calibrate", "--from-run", SYNC, "--replicates", "2000", "--out", str(out)]
    code, answer, said = interrupted(5, *command)
    assert (code, said) == (130, STOPS)
    assert "fitted to 2,394 steps of 1 run" in answer and "no file is written" in answer
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="reads CPU time in /proc")
def test_an_interrupted_match_prints_the_forecast_and_writes_no_calibration(tmp_path):
    out = tmp_path / "mine.json"
    command = ["match", "--results", RUN, "--gpu-memory-utilization", "0.5", "--costs", "roofline"]
    code, answer, said = interrupted(4.5, *command, "--out", str(out))
    assert (code, said) == (130, STOPS)
    assert "TTFT mean" in answer and "no calibration is written" in answer
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="reads CPU time in /proc")
def test_an_interrupted_gate_prints_the_checks_of_its_one_replay(tmp_path):
    file = tmp_path / "gate.yaml"
    asked = "trace: chat, slo: ttft_p99<9s, regression: {ttft_s.p99: 5}, draws: 2000"
    file.write_text(f"model: Qwen/Qwen3-8B\ngpu: H200\ncheck: {{{asked}}}\n")
    into = str(tmp_path / "base")
    code, answer, said = interrupted(8, "check", "--scenario", str(file), "--write-baseline", into)
    assert (code, said) == (130, STOPS)
    answer = " ".join(answer.split())
    assert "the only check holds, 1 regression check not compared" in answer
    assert "interrupted: regressions were not compared" in answer
    assert not Path(into).exists()


def test_a_plan_ends_in_the_middle_of_a_search():
    with Command("plan", "chat", "--slo", "ttft_p99<2s", "--workers", "2") as running:
        wait_until(lambda: len(workers_of(running.process.pid)) == 2)
        time.sleep(1.5)  # the workers read their trace and are at work
        running.interrupt((0.0, 0.02, 0.04), whole_group=True)
        code, answers, said = running.ended()
    assert code == 130
    # Answers that were known are printed, without intervals.
    assert (answers, said) == ("", SAID) or answers.startswith("chat: 2,000 requests")
