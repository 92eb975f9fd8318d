"""The beginning of a file, as formats are recognised by it: keys of JSON, columns of a table, or text."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property

from pagecast.traces.tabular import header

Recogniser = Callable[["Head"], int]
_KEY = re.compile(r'"([^"\\]{1,64})"\s*:')


class Head:
    """The first MiB of a file, looked at as JSON and as a table."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @cached_property
    def text(self) -> str:
        """The text, without the mark of its encoding."""
        return self.data.decode("utf-8-sig", errors="replace").lstrip()

    @cached_property
    def keys(self) -> set[str] | None:
        """The keys in the first line of a JSON file (in its head if that line has none); None for others."""
        if not self.text.startswith(("{", "[")):
            return None
        return set(_KEY.findall(self.text.split("\n", 1)[0])) or set(_KEY.findall(self.text))

    @cached_property
    def columns(self) -> list[str]:
        """The names in the first line of what may be a table; none of JSON and of bytes that are no text."""
        return [] if self.keys is not None or b"\0" in self.data else header(self.data)[0]


def json_fields(*names: str) -> Recogniser:
    """A recogniser of JSON: how many of these keys a file has, where it has at least two."""

    def count(head: Head) -> int:
        found = len(set(names) & (head.keys or set()))
        return found if found >= 2 else 0

    return count


def csv_columns(*names: str) -> Recogniser:
    """A recogniser of tables: how many of these columns a file has."""

    def count(head: Head) -> int:
        return len(set(names) & set(head.columns))

    return count
