"""Recorded draft tokens: how many were made, and how many accepted, at each step of a request.

A trace has them as texts of numbers, `"3 0 2"`: `drafts` after each step that yielded tokens, and
`accepted_drafts` at each step that verified draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.request import Request
from pagecast.traces.schema import Trace
from pagecast.traces.texts import draft_numbers

DRAFTS, ACCEPTED = "drafts", "accepted_drafts"


class RecordedDrafts:
    """Draft tokens that a trace has recorded, read step by step. Steps beyond them are drawn."""

    def __init__(self, drafts: Sequence[str] | None, accepted: Sequence[str] | None) -> None:
        self._drafts = drafts
        self._accepted = accepted
        self._drafting: dict[int, Iterator[int]] = {}
        self._accepting: dict[int, Iterator[int]] = {}

    @classmethod
    def of(cls, trace: Trace) -> RecordedDrafts | None:
        """The recorded draft tokens of a trace; None where it has none."""
        columns = []
        for name in (DRAFTS, ACCEPTED):
            present = name in trace.requests
            columns.append(trace.requests[name].fillna("").astype(str).tolist() if present else None)
        return cls(*columns) if any(column is not None for column in columns) else None

    def again(self) -> RecordedDrafts:
        """The same draft tokens, to be read from the start: each replica reads for itself."""
        return RecordedDrafts(self._drafts, self._accepted)

    def drafted(self, request: Request, most: int) -> int:
        """How many were drafted after the request's latest tokens; `most` where none are recorded."""
        number = _next(self._drafting, self._drafts, DRAFTS, request)
        return most if number is None else number

    def accepted(self, request: Request) -> int | None:
        """How many draft tokens were accepted in the step being committed; None where none are recorded."""
        return _next(self._accepting, self._accepted, ACCEPTED, request)


def _next(
    reading: dict[int, Iterator[int]], texts: Sequence[str] | None, name: str, request: Request
) -> int | None:
    if texts is None:
        return None
    numbers = reading.get(request.index)
    if numbers is None:
        numbers = reading[request.index] = iter(_numbers_of(texts[request.index], name, request.index))
    return next(numbers, None)


def _numbers_of(text: str, name: str, row: int) -> list[int]:
    """The numbers of a column's text. Errors: BadInput naming row and column."""
    try:
        return draft_numbers(text)
    except BadInput as error:
        raise BadInput(f"row {row}: {name}: {error}") from None
