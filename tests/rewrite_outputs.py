"""Outputs in the documentation, made again where commands print something else now.

    python -m tests.rewrite_outputs [--slow] [PAGE ...]

runs the commands of the pages [all of them] as `tests/test_docs.py` does, and writes their output in place of
the output shown. Where lines are left out (`...`), each part that is shown is replaced by as many lines: the
first, the last, or those most like it. Read the changes before they are committed.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .documented import PAGES, ROOT, Command, commands, difference

_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def printed(words: tuple[str, ...], desk: Path) -> list[str]:
    """The lines that a command prints."""
    program = words[1:] if words[0] == "python" else ("-m", "pagecast", *words[1:])
    done = subprocess.run(
        [sys.executable, *program],
        cwd=desk,
        env=_ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return (done.stdout + done.stderr).splitlines()


def again(shown: tuple[str, ...], lines: list[str]) -> list[str]:
    """What to show of these lines, with as many left out as before."""
    if "..." not in shown:
        return lines
    parts: list[list[str]] = [[]]
    for line in shown:
        if line == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    result: list[str] = []
    for number, part in enumerate(parts):
        first = 0
        if number:
            first = len(lines) - len(part) if number == len(parts) - 1 else _most_like(part, lines)
            result.append("...")
        result += lines[first : first + len(part)]
    return result


def _most_like(part: list[str], lines: list[str]) -> int:
    """Where the lines most like a part begin."""
    windows = [lines[at : at + len(part)] for at in range(max(len(lines) - len(part), 0) + 1)]
    ratios = [difflib.SequenceMatcher(None, "\n".join(part), "\n".join(one)).ratio() for one in windows]
    return ratios.index(max(ratios))


def rewrite(page: Path, desk: Path, *, slow: bool) -> int:
    """Makes the outputs of a page again; returns how many changed."""
    changed = 0
    for each in commands(page):
        if not _runs(each, slow=slow):
            continue
        lines = [line.rstrip() for line in printed(each.words, desk)]
        if not each.output or not difference(each.output, lines):
            continue
        text = page.read_text(encoding="utf-8")
        shown = "\n".join(each.output)
        if text.count(shown) != 1:
            print(f"{page.relative_to(ROOT)}: {' '.join(each.words)}: shown twice; change it by hand")
            continue
        page.write_text(text.replace(shown, "\n".join(again(each.output, lines))), encoding="utf-8")
        changed += 1
    return changed


def _runs(each: Command, *, slow: bool) -> bool:
    if not each.runs or (each.mark == "slow" and not slow):
        return False
    example = each.words[0] == "python" and each.words[1].startswith("examples/")
    return example or each.words[0].endswith("pagecast")


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the outputs in the documentation again.")
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="default: all")
    parser.add_argument("--slow", action="store_true", help="also those marked slow")
    options = parser.parse_args()
    for page in [path.resolve() for path in options.pages] or PAGES:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("examples", "tests", "traces"):
                (Path(folder) / name).symlink_to(ROOT / name)
            changed = rewrite(page, Path(folder), slow=options.slow)
        if changed:
            print(f"{page.relative_to(ROOT)}: {changed} outputs", flush=True)


if __name__ == "__main__":
    main()
