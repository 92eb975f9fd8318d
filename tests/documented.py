"""Commands and outputs in the documentation, read from its `console` blocks.

A block holds commands (`$ pagecast ...`) and the output of each. In the output a line `...` stands for any
number of lines. A comment above the block says how it is tested:

    <!-- slow -->              run by `make test-slow` only
    <!-- not run: REASON -->   not run; its commands and options must exist

Commands in indented blocks are not run either.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?```console\n(?P<body>.*?)```", re.DOTALL)
_INDENTED = re.compile(r"^ {4,}(?:\$ )?(pagecast [^\n\\]*)", re.MULTILINE)
_ELAPSED = re.compile(r"\bin (\d+m)?[\d.]+ m?s\b")


@dataclass(frozen=True)
class Command:
    """One command of a page: its words, the output that the page shows, and the mark above its block."""

    words: tuple[str, ...]
    output: tuple[str, ...]
    mark: str

    @property
    def runs(self) -> bool:
        return not self.mark.startswith("not run")


def commands(page: Path) -> list[Command]:
    """The commands of a page, in order. A backslash at the end of a line continues a command."""
    result = []
    for block in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        text = block["body"].replace("\\\n", " ")
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, *output = part.rstrip("\n").split("\n")
            words = tuple(shlex.split(line, comments=True))
            result.append(Command(words, tuple(output), block["mark"] or ""))
    for line in _INDENTED.findall(page.read_text(encoding="utf-8")):
        result.append(Command(tuple(shlex.split(line, comments=True)), (), "not run: indented"))
    return result


def difference(shown: tuple[str, ...], printed: list[str]) -> str:
    """The first line of the page that was not printed in its place; empty where all were.

    Without `...` the whole output must be shown. Elapsed times are left out of the comparison.
    """
    if not shown:
        return ""
    expected, lines = [_plain(line) for line in shown], [_plain(line) for line in printed]
    at, anywhere = 0, False
    for line in expected:
        if line == "...":
            anywhere = True
            continue
        while anywhere and at < len(lines) and lines[at] != line:
            at += 1
        if at == len(lines) or lines[at] != line:
            return f"shown: {line}\nprinted: {lines[at] if at < len(lines) else 'nothing more'}"
        at, anywhere = at + 1, False
    rest = [] if anywhere else lines[at:]
    return f"printed, not shown: {rest[0]}" if rest else ""


def _plain(line: str) -> str:
    return _ELAPSED.sub("in N s", line.rstrip())
