"""Commands of a shell text, with its variables put in.

Read as a shell reads it: quotes, comments, line continuations, variables, arrays and here-documents. What a
command prints (`$(...)`) and variables that nothing sets stay as they are written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pagecast.sim.core.errors import BadInput

_VARIABLE = re.compile(r"\$(?:\{(\w+)(\[[@*]\])?(?::?[-=]([^{}]*))?\}|(\w+))")
_ARRAY = re.compile(r"\s*(?:(?:export|local|readonly|declare\s+-a)\s+)?(\w+)\+?=\((.*)\)\s*", re.DOTALL)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_REDIRECTED = re.compile(r"(?:\d|&)?>>?&?(.*)|\d?<.*")
_BEFORE_ASSIGNMENTS = ("export", "env", "local", "readonly", "declare")

Value = str | list[str]


@dataclass(frozen=True)
class Command:
    """A command's words, the variables it sees, and the line it begins in."""

    words: tuple[str, ...]
    variables: Mapping[str, Value]
    line: int


@dataclass
class Script:
    """The commands of a text. `files`: those that here-documents of it wrote, by name."""

    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


@dataclass
class _Piece:
    line: int
    text: str = ""
    document: str | None = None
    literal: bool = False  # no variables in the document


def read_shell(text: str, where: str, variables: Mapping[str, Value] | None = None) -> Script:
    """The commands of `text`. Errors: BadInput naming the line of a quote that nothing ends."""
    script = Script()
    known: dict[str, Value] = dict(variables or {})
    for piece in _pieces(text.replace("\r\n", "\n")):
        array = _ARRAY.fullmatch(piece.text)
        if array is not None:
            before = known.get(array[1], []) if "+=(" in piece.text else []
            words = _split(_expanded(array[2], known), where, piece.line)
            known[array[1]] = [*([before] if isinstance(before, str) else before), *words]
            continue
        words, files = _without_redirections(_split(_expanded(piece.text, known), where, piece.line))
        words, own = _assignments(words)
        if piece.document is not None:
            document = piece.document if piece.literal else _expanded(piece.document, known, plain=True)
            names = words[1:2] if words[:1] == ["tee"] else files
            script.files |= dict.fromkeys(names, document)
        if words:
            script.commands.append(Command(tuple(words), {**known, **own}, piece.line))
        else:
            known |= own
    return script


def _pieces(text: str) -> Iterator[_Piece]:
    """The text of each command, without comments and continuations, its quotes as they are."""
    at, line, quote, depth = 0, 1, "", 0
    piece = _Piece(1)
    ends = ""  # the line that ends the here-document
    while at < len(text):
        char = text[at]
        line += char == "\n"
        if char == "\\" and quote != "'":
            line += text[at + 1 : at + 2] == "\n"
            piece.text += " " if text[at + 1 : at + 2] == "\n" else text[at : at + 2]
            at += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (at == 0 or text[at - 1] in " \t\n;"):
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
            continue
        elif char == "(" and (depth or text[at - 1 : at] in ("=", "$")):
            depth += 1
        elif char == ")" and depth:
            depth -= 1
        elif depth and char == "\n":
            char = " "
        elif not depth and (here := _HERE.match(text, at)) and text[at : at + 3] != "<<<":
            ends, piece.literal = here[2], bool(here[1])
            at = here.end()
            continue
        elif not depth and (
            char in "\n;|" or (char == "&" and text[at - 1] != ">" and text[at + 1 :][:1] != ">")
        ):
            if char == "\n" and ends:
                piece.document, at = _document(text, at + 1, ends)
                line += piece.document.count("\n") + 1
                ends = ""
            elif ends:  # the pipe of `cat <<EOF | tee file`
                yield _Piece(piece.line, piece.text)
                piece = _Piece(line, "", None, piece.literal)
                at += 1
                continue
            yield piece
            piece = _Piece(line)
            at += 1
            continue
        if not piece.text and char.isspace():
            piece.line = line
        else:
            piece.text += char
        at += 1
    yield piece


def _document(text: str, at: int, ends: str) -> tuple[str, int]:
    """The lines from `at` to the one that is `ends`, and the place of the line end after it."""
    match = re.compile(rf"^\s*{ends}[ \t]*$", re.MULTILINE).search(text, at)
    if match is None:
        return text[at:], len(text)
    return text[at : match.start()], match.end() - 1


def _split(text: str, where: str, line: int) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadInput(
            f"{where} line {line}: {str(error).lower()}; end the quote, or give the command alone"
        ) from None


def _expanded(text: str, known: Mapping[str, Value], *, plain: bool = False) -> str:
    """The text with its variables put in. `plain`: a document, where quotes are characters."""
    made, at, quote = "", 0, ""
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            made += text[at : at + 2]
            at += 2
            continue
        if char in "'\"" and not plain and quote in ("", char):
            quote = "" if quote else char
        match = _VARIABLE.match(text, at) if quote != "'" else None
        if match is None:
            made += char
            at += 1
            continue
        name, default = match[1] or match[4], match[3]
        value = known.get(name, default)
        made += match[0] if value is None else _written(value, quote, plain=plain, apart=bool(match[2]))
        at = match.end()
    return made


def _written(value: Value, quote: str, *, plain: bool, apart: bool) -> str:
    """A variable's value so that it is read as the shell would: in quotes one word, else split at spaces."""
    words = [value] if isinstance(value, str) else value
    if plain:
        return " ".join(words)
    if not quote:
        return " ".join(shlex.quote(part) for word in words for part in ([word] if apart else word.split()))
    if apart:
        return f'"{" ".join(map(shlex.quote, words))}"'
    return re.sub(r'(["\\$`])', r"\\\1", words[0] if words else "")


def _without_redirections(words: list[str]) -> tuple[list[str], list[str]]:
    """The words that are no redirections, and the files that the others write."""
    kept: list[str] = []
    files: list[str] = []
    rest = iter(words)
    for word in rest:
        match = _REDIRECTED.fullmatch(word)
        if match is None:
            kept.append(word)
        elif ">" in word:
            files.append(match[1] or next(rest, "") if "&" not in word[1:] else "")
        elif word in ("<", "0<"):
            next(rest, None)
    return kept, [name for name in files if name]


def _assignments(words: list[str]) -> tuple[list[str], dict[str, Value]]:
    """The words behind assignments, and what those assign."""
    own: dict[str, Value] = {}
    rest = list(words)
    while rest:
        match = _ASSIGNED.fullmatch(rest[0])
        if match is not None:
            own[match[1]] = match[2]
        elif rest[0] not in _BEFORE_ASSIGNMENTS:
            break
        del rest[0]
    return rest, own
