"""One screen: the first block of a command's answer, of at most 12 lines of 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from pagecast.planner_app import console
from pagecast.planner_app.wording.quantities import counted

LINES, COLUMNS = 12, 100


def show_block(lines: Sequence[str], notes: Sequence[str] = (), took: str = "") -> None:
    """Prints an answer, the beginnings of as many notes as there is room for, and how to see the rest."""
    # What a forecast leaves out of a start script comes first: it must be seen.
    notes = sorted(notes, key=lambda note: "not modelled" not in note)
    room = max(LINES - 1 - len(lines), 0)
    for line in [*lines[: LINES - 1], *(f"note: {note}" for note in notes[:room])]:
        console.out.print(clipped(line), soft_wrap=True)
    left = len(notes) - room
    more = f"{counted(left, 'more note')}: " if left > 0 else ""
    console.out.print(f"{more}--explain tells all, --json has every figure" + (f" ({took})" if took else ""))


def clipped(line: str) -> str:
    """A line of at most `COLUMNS`: it ends at a word."""
    if len(line) <= COLUMNS:
        return line
    return line[: COLUMNS - 3].rsplit(" ", 1)[0].rstrip(",;:") + " ..."
