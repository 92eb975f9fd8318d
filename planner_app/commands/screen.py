"""One screen: the first block of a command's answer, of at most 12 lines of 100 columns.

An answer comes first, then what it rests on, then what qualifies it. What has no room is printed with
`--explain`, and is in `--json`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from pagecast.planner_app import console
from pagecast.planner_app.wording.quantities import counted

_MUST_BE_SEEN = ("not modelled", "no effect", "change nothing", "changes nothing")
LINES, COLUMNS = 12, 100
ALL_TOLD = "--explain tells all, --json has every figure"


def show_block(
    lines: Sequence[str],
    notes: Sequence[str] = (),
    took: str = "",
    *,
    more: Sequence[str] = (),
    rest: str = ALL_TOLD,
) -> None:
    """Prints a block, and how to see the rest.

    `lines` are folded where there is room for that. Then come as many of `more` and of the `notes` as there
    is room for, a line of each. `took`: how long it took.
    """
    # What a forecast leaves out, and options that do nothing, must be seen.
    first = [note for note in notes if any(mark in note for mark in _MUST_BE_SEEN)]
    notes = [note for note in notes if note not in first]
    seen = _fitting([f"note: {note}" for note in first], LINES // 2)
    block = [*_fitting(lines, LINES - 1 - len(seen)), *seen]
    block += [clipped(line) for line in more[: LINES - 1 - len(block)]]
    room = LINES - 1 - len(block)
    block += [clipped(f"note: {note}") for note in notes[:room]]
    left = len(notes) - room
    begin = f"{counted(left, 'more note')}: " if left > 0 else ""
    for line in [*block, clipped(f"{begin}{rest}" + (f" (took {took})" if took else ""))]:
        console.out.print(line, soft_wrap=True)


def show_notes(notes: Iterable[str]) -> None:
    """Prints whole notes, folded."""
    for part in (part for note in notes for part in folded(f"note: {note}")):
        console.out.print(part, soft_wrap=True)


def _fitting(lines: Sequence[str], room: int) -> list[str]:
    """The lines, folded at words; from the last one up they are cut instead, where they take more room."""
    folds = [folded(line) for line in lines[:room]]
    for at in reversed(range(len(folds))):
        if sum(map(len, folds)) <= room:
            break
        folds[at] = [clipped(lines[at])]
    return [line for fold in folds for line in fold]


def folded(line: str, indent: int = 2) -> list[str]:
    """The line in parts of at most `COLUMNS`, those after the first indented."""
    if len(line) <= COLUMNS:
        return [line]
    return textwrap.wrap(line, COLUMNS, subsequent_indent=" " * indent, break_on_hyphens=False)


def clipped(line: str) -> str:
    """A line of at most `COLUMNS`: it ends at a word."""
    if len(line) <= COLUMNS:
        return line
    return line[: COLUMNS - 3].rsplit(" ", 1)[0].rstrip(",;:") + " ..."
