"""One screen: the first block of a command's answer, of at most 12 lines of 100 columns.

An answer comes first, then cautions, then what it rests on, then what qualifies it. A sentence is folded at
words and never cut: one that has no room is left out whole, and is printed with `--explain`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from pagecast.planner_app import console
from pagecast.planner_app.wording.quantities import counted
from pagecast.sim.note import Caution
from rich.table import Table

LINES, COLUMNS = 12, 100
ALL_TOLD = "--explain tells all, --json has every figure"
_LEAST_WIDTH = 20  # columns of a table's last cell that are worth showing
_SENTENCE_ENDS = re.compile(r"(?<=[.;])\s+")


def show_block(
    lines: Sequence[str],
    notes: Sequence[str] = (),
    took: str = "",
    *,
    more: Sequence[str] = (),
    rest: str = ALL_TOLD,
) -> None:
    """Prints a block, and how to see the rest.

    `lines` are the answer, and come first, with those of `notes` that are a `Caution`; then as many of `more`
    and of the other notes as have room whole. `took`: how long it took.
    """
    cautions = [f"note: {note}" for note in notes if isinstance(note, Caution)]
    others = [f"note: {note}" for note in notes if not isinstance(note, Caution)]
    seen, cut = _cautions(cautions, LINES // 2)
    unseen = cut
    block = [*_first(lines, LINES - 1 - len(seen)), *seen]
    for line in more:
        block += _whole(line, LINES - 1 - len(block))
    for note in others:
        parts = _whole(note, LINES - 1 - len(block))
        block += parts
        unseen += not parts
    if unseen:
        kind = f"{counted(cut, 'warning')} cut short" if cut else "no warnings"
        rest = f"{counted(unseen, 'more note')} ({kind}): {rest}"
    last = f"{rest} (took {took})" if took else rest
    for line in [*block, last if len(last) <= COLUMNS else rest]:
        console.out.print(line, soft_wrap=True)


def show_notes(notes: Iterable[str]) -> None:
    """Prints whole notes, folded."""
    for part in (part for note in notes for part in folded(f"note: {note}")):
        console.out.print(part, soft_wrap=True)


def room_below(lines: Sequence[str]) -> int:
    """How many more lines an answer has room for."""
    return LINES - 1 - sum(len(folded(line)) for line in lines)


def table_rows(table: Table) -> list[str]:
    """The lines of a table, of at most `COLUMNS`.

    The last column is folded where it is too wide, and left out where hardly a word of it has room.
    """
    lines = console.table_lines(table)
    while max(map(len, lines)) > COLUMNS and len(table.columns) > 1:
        last = table.columns.pop()
        rest = max(map(len, console.table_lines(table)))
        if rest + _LEAST_WIDTH <= COLUMNS:
            table.columns.append(last)
            last.no_wrap, last.overflow = False, "fold"
        lines = console.table_lines(table, COLUMNS)
    return lines


def _first(lines: Sequence[str], room: int) -> list[str]:
    """The first of the lines, folded, as many as have room whole."""
    shown: list[str] = []
    for line in lines:
        parts = _whole(line, room - len(shown))
        if not parts:
            break
        shown += parts
    return shown


def _whole(line: str, room: int) -> list[str]:
    """The line, folded; nothing where that takes more room."""
    parts = folded(line)
    return parts if len(parts) <= room else []


def _cautions(cautions: Sequence[str], room: int) -> tuple[list[str], int]:
    """The cautions, folded, and how many are left out; of one that is too long the first sentences stay."""
    shown: list[str] = []
    left = 0
    for caution in cautions:
        sentences = _SENTENCE_ENDS.split(caution)
        ways = [
            _whole(" ".join(sentences[:count]), room - len(shown)) for count in range(len(sentences), 0, -1)
        ]
        told = next((parts for parts in ways if parts), [])
        shown += told
        left += told is not ways[0]
    return shown, left


def folded(line: str, indent: int = 2) -> list[str]:
    """The line in parts of at most `COLUMNS`, those after the first indented."""
    if len(line) <= COLUMNS:
        return [line]
    return textwrap.wrap(line, COLUMNS, subsequent_indent=" " * indent, break_on_hyphens=False)
