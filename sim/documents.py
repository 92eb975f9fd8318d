"""Reading of small documents from outside (JSON, and the text behind YAML) within bounds.

A document has a greatest size, a greatest depth of nesting, and is read from whatever the path names: a file,
a pipe, a device without an end. Whatever is wrong with it is one line of `BadInput`.
"""

from __future__ import annotations

import json
import os
import select
import stat
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pagecast.sim.core.errors import BadInput

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

MIB = 1 << 20
MOST_DEPTH = 32
_MOST_LISTED = 20  # fields: more are not listed in an error
_SILENCE_S = 10.0


def read_text(path: str | Path, most_bytes: int, remedy: str) -> str:
    """The document's text. `remedy` ends every error: what to give instead.

    Errors: BadInput for a path that can't be read, more than `most_bytes`, a pipe that stays silent, and
    text that is not UTF-8.
    """
    try:
        with os.fdopen(_open(path), "rb") as stream:
            _await(path, stream.fileno(), remedy)
            data = stream.read(most_bytes + 1)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; {remedy}") from None
    except OSError as error:
        raise BadInput(f"{path}: can't be read ({error.strerror or error}); {remedy}") from None
    except ValueError:  # a zero byte in the path
        raise BadInput(f"{path}: can't be the name of a file; {remedy}") from None
    if len(data) > most_bytes:
        raise BadInput(f"{path}: larger than {most_bytes // MIB} MiB; {remedy}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 at byte {error.start}; {remedy}") from None


def read_json(path: str | Path, most_bytes: int, remedy: str) -> Any:
    """The document as plain values. Errors: BadInput as of `read_text`, with the line of what is no JSON."""
    text = read_text(path, most_bytes, remedy)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}:{error.lineno}: not valid JSON ({error.msg}); {remedy}") from None
    except RecursionError:
        raise BadInput(f"{path}: nested too deeply, beyond {MOST_DEPTH} levels; {remedy}") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise BadInput(f"{path}: not valid JSON (an integer of thousands of digits); {remedy}") from None
    if _deeper(value, MOST_DEPTH):
        raise BadInput(f"{path}: nested too deeply, beyond {MOST_DEPTH} levels; {remedy}")
    return value


def _open(path: str | Path) -> int:
    # Without blocking, for a pipe that nobody writes to would keep `open` for ever.
    return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))


def _await(path: str | Path, handle: int, remedy: str) -> None:
    """Waits a while for the first byte of a pipe. Errors: BadInput where none comes."""
    kind = os.fstat(handle).st_mode
    if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or stat.S_ISCHR(kind):
        ready, _, _ = select.select([handle], [], [], _SILENCE_S)
        if not ready:
            raise BadInput(f"{path}: nothing has been written to it for {_SILENCE_S:.0f} s; {remedy}")
        os.set_blocking(handle, True)


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper; level by level, for recursion has a limit of its own."""
    row = [value]
    for _ in range(levels):
        row = [child for item in row if isinstance(item, dict | list) for child in _children(item)]
        if not row:
            return False
    return any(isinstance(item, dict | list) for item in row)


def _children(item: dict[str, Any] | list[Any]) -> list[Any]:
    return list(item.values()) if isinstance(item, dict) else item


def field_problem(
    error: ValidationError, model: type[BaseModel], section: str = "", *, document: str = ""
) -> str:
    """The first wrong field of `model`, and how it is wrong; `section` is its part of the document.

    `document`: what the whole is ("a fleet"), to be asked where a field of it is not known.
    """
    first = error.errors()[0]
    place = first["loc"]
    name = ".".join(str(part) for part in ((section, *place) if section else place))
    fields = _section_of(model, place[:-1]).model_fields
    if first["type"] == "extra_forbidden":
        alone = len(place) == 1 and not section
        return unknown_field(name, fields, f"is this {document}?" if alone and document else "")
    if first["type"] == "missing":
        return f"field {name!r} is missing: {fields[str(place[-1])].description}"
    if first["type"] == "model_type":
        return f"{name} is {first['input']!r}: {_as_mapping(_section_of(model, place), first['input'])}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and isinstance(first["input"], dict):  # fields at odds with each other
        return f"{name}: {message}" if place else message
    if first["type"] in WORDS:
        bounds = first.get("ctx", {})
        least = bounds.get("ge", 0)  # the least that can be divided by, where it must be above 0
        message = WORDS["greater_than" if 0 < least < _TINY else first["type"]].format(**{"gt": 0, **bounds})
    if first["type"] == "less_than_equal" and first["ctx"]["le"] == 1 and 2 <= first["input"] <= 100:
        message = f"give a fraction: {first['input'] / 100:g} for {first['input']:g}%"
    return f"{name} is {first['input']!r}: {message}" if place else message


_TINY = 1e-6
# What a value may be, by the type of pydantic's error.
WORDS = {
    "greater_than": "it must be above {gt:g}",
    "greater_than_equal": "it must be at least {ge:g}",
    "less_than": "it must be below {lt:g}",
    "less_than_equal": "it must be at most {le:g}",
    "finite_number": "it must be a finite number",
    "int_type": "give a whole number",
    "int_parsing": "give a whole number",
    "int_from_float": "give a whole number",
    "float_type": "give a number",
    "float_parsing": "give a number",
    "dict_type": "write fields: {{NAME: VALUE}}",
    "bool_type": "give true or false",
    "bool_parsing": "give true or false",
}


def _as_mapping(model: type[BaseModel], value: Any) -> str:
    """What to write in place of a value that stands where a mapping of `model`'s fields must."""
    written = [f"{{{name}: {value}}}" for name in model.model_fields if _is_enough(model, name, value)]
    if written:
        return f"write {' or '.join(written)}"
    return f"write it as FIELD: VALUE; fields are {', '.join(model.model_fields)}"


def _is_enough(model: type[BaseModel], field: str, value: Any) -> bool:
    """Whether a mapping of this field alone is a `model`."""
    from pydantic import ValidationError

    try:
        model.model_validate({field: value})
    except ValidationError:
        return False
    return True


def unknown_field(name: str, fields: Iterable[str], otherwise: str = "") -> str:
    """The part of an error that names an unknown field, with the nearest one where there is one.

    Where there is none: `otherwise`, and the fields, if they are few.
    """
    names = list(fields)
    near = get_close_matches(name.rpartition(".")[2].replace("-", "_"), names, n=1)
    text = f"field {name!r} is not known"
    if near:
        return f"{text}; did you mean {near[0]}?"
    if otherwise:
        text += f"; {otherwise}"
    if len(names) > _MOST_LISTED:
        return f"{text} See the fields in `pagecast replay --help`" if otherwise else text
    return f"{text}{' Its' if otherwise else ';'} fields are {', '.join(names)}"


def _section_of(model: type[BaseModel], place: tuple[int | str, ...]) -> type[BaseModel]:
    """The innermost model that a field's place leads through."""
    for part in place:
        field = model.model_fields.get(str(part))
        if field is not None:
            model = _model_in(field.annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model in a type such as `tuple[Group, ...] | None`."""
    if hasattr(annotation, "model_fields"):
        nested: type[BaseModel] = annotation
        return nested
    models = (_model_in(part) for part in get_args(annotation))
    return next((model for model in models if model is not None), None)
