"""Notes: codes with figures that qualify a forecast.

The simulator gives notes; whoever shows them composes the sentences. As text a note reads
`code: name=value, ...`: it can be printed, compared and written as JSON like any text.
"""

from __future__ import annotations

from typing import Any


class Caution(str):
    """A text that must be read before the figures are used: a part that is not modelled, an option without
    effect. The first screen of an answer has it, whatever else has room there."""


class Note(str):
    """A code, and the figures that it is about by name."""

    code: str
    figures: dict[str, Any]

    def __new__(cls, code: str, **figures: Any) -> Note:
        """A note of `code`; every keyword is a figure."""
        listed = ", ".join(f"{name}={value}" for name, value in figures.items())
        note = super().__new__(cls, f"{code}: {listed}" if listed else code)
        note.code = code
        note.figures = figures
        return note

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        """As pickle makes it again."""
        return (self.code,), self.figures


class CautionNote(Note, Caution):
    """A note that must be read before the figures are used."""
