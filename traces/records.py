"""Records of JSON lines, checked field by field: every reader reports bad rows in the same way."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from typing import Any

from pagecast.sim.core.errors import check_given_once
from pagecast.traces.source import MAX_LINE_BYTES, MIB, Source

_BLANK_LINES = 1000


class _GivenTwice(Exception):
    """A field stands twice in an object; the message says which, and what to do."""


class _HalfCharacter(Exception):
    """A text holds one half of a character that takes two (a lone surrogate)."""


def _check_whole(value: Any, text: str | bytes) -> None:
    """Raises where a text of `value` can't be written again. `text` is what it was read of."""
    if (b"\\u" if isinstance(text, bytes) else "\\u") in text:  # type: ignore[operator]
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise _HalfCharacter(f"\\u{ord(half):04x} is half of a character; repair or remove it") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            check_given_once(name, seen, f"the field {name}", error=_GivenTwice)
            seen.add(name)
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


class Record:
    """One JSON object with the line it came from; its getters check and name the field on error."""

    __slots__ = ("line", "prefix", "source", "values")

    def __init__(self, source: Source, line: int, values: dict[str, Any], prefix: str = "") -> None:
        self.source, self.line, self.values, self.prefix = source, line, values, prefix

    def fail(self, field: str, problem: str) -> Exception:
        """The error for one field of this line."""
        return self.source.fail(problem, self.line, self.prefix + field)

    def required(self, field: str) -> Any:
        """The value of a field. Raises BadInput where it is missing or null."""
        value = self.values.get(field)
        if value is None:
            raise self.fail(field, "missing; every line needs it")
        return value

    def whole(self, field: str, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self.required(field)
        if type(value) is not int:
            if not isinstance(value, float) or not value.is_integer():
                raise self.fail(field, f"{_show(value)} is no whole number; correct the line")
            value = int(value)
        if value < least:
            raise self.fail(field, f"{value} is less than {least}; correct or remove the line")
        if value >= 1 << 62:
            raise self.fail(field, "larger than 2**62; correct or remove the line")
        return value

    def number(self, field: str, least: float = 0.0) -> float:
        """A finite number of at least `least`."""
        value = self.required(field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(field, f"{_show(value)} is no number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise self.fail(field, f"{value} is not finite; correct or remove the line")
        if value < least:
            raise self.fail(field, f"{value:g} is less than {least:g}; correct or remove the line")
        return value

    def text(self, field: str, *, numbers: bool = True) -> str:
        """A string, or with `numbers` a number written out (ids come as either)."""
        value = self.required(field)
        if isinstance(value, str):
            return value
        if numbers and isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        raise self.fail(field, f"{_show(value)} is no text")

    def has(self, field: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(field) is not None

    def part(self, field: str) -> Record:
        """An object within the record."""
        value = self.required(field)
        if not isinstance(value, dict):
            raise self.fail(field, "is no JSON object; correct or remove the line")
        return Record(self.source, self.line, value, f"{self.prefix}{field}.")

    def items(self, field: str) -> list[Any]:
        """A list."""
        value = self.required(field)
        if not isinstance(value, list):
            raise self.fail(field, f"{_show(value)} is no list")
        return value


def records(source: Source, limit: int | None = None) -> Iterator[Record]:
    """The JSON objects of a file, one per line, at most `limit`; blank lines are passed over.

    Raises BadInput for a broken or cut-off line, one that is no object, and text that is not UTF-8.
    """
    count = blank = 0
    for number, line in source.lines():
        if limit is not None and count >= limit:
            return
        if line.isspace():
            blank += 1
            if blank > _BLANK_LINES:
                raise source.fail(f"more than {_BLANK_LINES} blank lines; is this a trace?", number)
            continue
        count += 1
        yield Record(source, number, _parse(source, number, line))


def items(source: Source, limit: int | None = None) -> Iterator[Record]:
    """The objects of a file: one array of them, one per line, or indented; read piece by piece.

    Lines of the others count items from 1. Raises BadInput like `records`, and for an item of more than
    64 MiB.
    """
    if by_line(source):
        yield from records(source, limit)
        return
    count, text, at, chunk = 0, "", 0, MIB
    array = _begin(source).startswith("[")
    with source.open() as stream, io.TextIOWrapper(stream, "utf-8-sig") as reader:
        while limit is None or count < limit:
            at = _skip(text, at, "" if not array else "[," if count == 0 else ",")
            if array and at < len(text) and text[at] == "]":
                return
            if count and not array and at == len(text):
                text, at = _more(source, reader, MIB, count), 0
                if not text:
                    return
                continue
            try:
                value, end = _DECODER.raw_decode(text, at)
                _check_whole(value, text[at:end])
                at = end
            except (_GivenTwice, _HalfCharacter) as error:
                raise source.fail(f"item {count + 1}: {error}") from None
            except (ValueError, RecursionError) as error:
                text, at = text[at:], 0
                more = _more(source, reader, chunk, count)
                if not more or len(text) > MAX_LINE_BYTES:
                    problem = "the file ends within it" if not more else f"unreadable ({error})"
                    raise source.fail(f"item {count + 1}: {problem}; repair or remove it") from None
                text, chunk = text + more, 2 * chunk
                continue
            count, chunk = count + 1, MIB
            if not isinstance(value, dict):
                raise source.fail(f"item {count}: {_show(value)} is no JSON object; repair or remove it")
            yield Record(source, count, value)


def by_line(source: Source) -> bool:
    """Whether each line is to be an object: neither an array nor an indented object begins the file."""
    begin = _begin(source)
    return not begin.startswith("[") and begin.split("\n", 1)[0].strip() != "{"


def _begin(source: Source) -> str:
    return source.head.decode("utf-8-sig", errors="replace").lstrip()


def _skip(text: str, at: int, marks: str) -> int:
    while at < len(text) and (text[at].isspace() or text[at] in marks):
        at += 1
    return at


def _more(source: Source, reader: io.TextIOWrapper, size: int, count: int) -> str:
    try:
        return reader.read(size)
    except UnicodeDecodeError:
        raise source.fail(f"not UTF-8 after item {count}; convert the file to UTF-8") from None


def _parse(source: Source, number: int, line: bytes) -> dict[str, Any]:
    try:
        # The end of the line would count as column 1 of the next.
        value = _DECODER.decode(line.rstrip(b"\r\n").decode("utf-8-sig"))
        _check_whole(value, line)
    except (_GivenTwice, _HalfCharacter) as error:
        raise source.fail(str(error), number) from None
    except UnicodeDecodeError:
        raise source.fail("not UTF-8; convert the file to UTF-8", number) from None
    except json.JSONDecodeError as error:
        cut = "" if line.endswith(b"\n") else " (the file may be cut off here)"
        raise source.fail(
            f"broken JSON at column {error.colno}: {error.msg}{cut}; repair or remove the line", number
        ) from None
    except (ValueError, RecursionError) as error:
        raise source.fail(f"unreadable JSON ({error}); repair or remove the line", number) from None
    if not isinstance(value, dict):
        raise source.fail(f"{_show(value)} is no JSON object; each line describes one request", number)
    return value


def _show(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
