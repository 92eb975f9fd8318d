"""Columns of texts that have a form of their own: multimodal items, and numbers of draft tokens."""

from __future__ import annotations

from pagecast.sim.core.errors import BadInput

_MOST_DIGITS = 18  # of a number below 2**62; Python refuses thousands


def multimodal_items(text: str, tokens: int) -> list[tuple[str, int, int]]:
    """The items `IDENTIFIER@OFFSET+LENGTH` of a prompt of so many tokens, as identifier, offset and length.

    Errors: BadInput for another form, and for items that overlap or pass the prompt's end.
    """
    items = []
    end = 0
    for part in text.split():
        name, _, place = part.rpartition("@")
        offset, length = map(_whole, place.split("+", 1)) if "+" in place else (None, None)
        if not name or offset is None or not length:
            raise BadInput(f"{part!r} must be IDENTIFIER@OFFSET+LENGTH; correct or remove it")
        if offset < end or offset + length > tokens:
            raise BadInput(f"{part!r} overlaps another item, or the prompt's end; correct or remove it")
        end = offset + length
        items.append((name, offset, length))
    return items


def draft_numbers(text: str) -> list[int]:
    """Numbers of draft tokens, step by step. Errors: BadInput for anything but whole numbers from 0 on."""
    numbers = []
    for part in text.split():
        number = _whole(part)
        if number is None:
            raise BadInput(f"{part!r} is no whole number of at least 0; write numbers with spaces between")
        numbers.append(number)
    return numbers


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None
