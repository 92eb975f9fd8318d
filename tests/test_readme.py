"""The README shows the output of real commands."""

from pathlib import Path

from pagecast.planner_app.cli import run

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_demo_in_the_readme_is_what_make_demo_prints(capsys):
    code = run(["replay", "traces/samples/chat.jsonl.gz", "--model", "Qwen/Qwen3-8B", "--gpu", "H200"])
    printed = capsys.readouterr().out.splitlines()
    assert code == 0
    shown = {line.rstrip() for line in README.read_text(encoding="utf-8").splitlines()}
    # The last line tells this machine's time.
    missing = [line for line in printed[:-1] if line.rstrip() not in shown]
    assert not missing
