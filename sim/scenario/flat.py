"""Flat names: the one level of options that the command line, YAML and links have, made of nested settings.

Each class of settings declares its options (`sim.core.option`). Here they become one pydantic model that
checks values by their flat names, and values become settings and back.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pagecast.sim.core.option import Choice, Option, Section
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, create_model
from pydantic import Field as field_info
from pydantic.fields import FieldInfo

T = TypeVar("T")
Value = str | int | float | bool | None
_MOST_FLOAT, _MOST_INT = 1e9, (1 << 53) - 1


def _once(make: Callable[[type], T]) -> Callable[[type], T]:
    """`functools.cache` for classes, whose own `__hash__` its types take for the classes'."""
    return cache(make)


class Written(NamedTuple):
    """A text, and the value that was read of it."""

    text: str
    value: Any


class Branch(NamedTuple):
    """Options that have an effect only where something else is chosen.

    `selector`: the option that chooses, by `word`, or by being given where `word` is None.
    """

    selector: str
    word: str | None
    options: tuple[str, ...]

    def chosen(self, values: Mapping[str, Any]) -> bool:
        """Whether it is what the values of all options choose."""
        value = values[self.selector]
        return value is not None if self.word is None else bool(value == self.word)

    @property
    def need(self) -> str:
        """What its options have no effect without."""
        return self.selector if self.word is None else f"{self.selector} {self.word}"


@_once
def _declared(kind: type) -> tuple[tuple[Field[Any], Any], ...]:
    """The fields of a class that are options or hold others, with what they declare."""
    return tuple((one, one.metadata["declared"]) for one in fields(kind) if "declared" in one.metadata)


def _name(one: Field[Any], declared: Option | Choice) -> str:
    return (declared.flat if isinstance(declared, Option) else "") or one.name


def _options(kind: type) -> dict[str, Option]:
    """The options of a class by flat name, without those of nested settings."""
    return {_name(one, it): it for one, it in _declared(kind) if isinstance(it, Option)}


@_once
def branches(kind: type) -> tuple[Branch, ...]:
    """All options of nested settings that may be without effect, by what must be chosen."""
    found: list[Branch] = []
    for one, declared in _declared(kind):
        if isinstance(declared, Choice):
            for word, chosen in declared.kinds.items():
                found.append(Branch(one.name, word, tuple(_options(chosen))))
        elif isinstance(declared, Section):
            found += _branches_of(declared)
    return tuple(branch for branch in found if branch.options)


def _branches_of(section: Section) -> Iterator[Branch]:
    if section.required:
        options = dict(_section_options(section.kind))
        selector = next(name for name, one in options.items() if one == section.required)
        yield Branch(selector, None, tuple(name for name in options if name != selector))
    yield from branches(section.kind)


def _section_options(kind: type) -> Iterator[tuple[str, str]]:
    """Flat names and fields of a section's options, without those of nested ones that may not be there."""
    for one, declared in _declared(kind):
        if isinstance(declared, Option):
            yield _name(one, declared), one.name
        elif isinstance(declared, Section) and not declared.required:
            yield from _section_options(declared.kind)


def engine_options(kind: type, profile: str) -> tuple[set[str], dict[str, str]]:
    """Options of sections that are for some engines: those of a profile, and errors for all others."""
    own: set[str] = set()
    foreign: dict[str, str] = {}
    for _, section in _declared(kind):
        if not isinstance(section, Section) or not section.profile:
            continue
        for name, declared in _options(section.kind).items():
            if profile.startswith(section.profile):
                own.add(name)
            elif declared.otherwise:
                foreign[name] = f"{profile} {declared.otherwise}"
            else:
                foreign[name] = f"{name} is for {section.engine}; the engine is {profile}"
    return own, foreign


@_once
def flat_model(kind: type) -> type[BaseModel]:
    """The model that checks options of `kind` by flat names: types, bounds and texts that are read."""
    options: dict[str, Any] = {}
    for name, value in _flat_fields(kind):
        options.setdefault(name, value)
    config = ConfigDict(extra="forbid", frozen=True, strict=True)
    return create_model(kind.__name__, __config__=config, **options)


@_once
def flat_defaults(kind: type) -> dict[str, Value]:
    """The default of every option by flat name."""
    return {name: info.default for name, info in flat_model(kind).model_fields.items()}


def _flat_fields(kind: type, required: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    for one, declared in _declared(kind):
        if isinstance(declared, Section):
            yield from _flat_fields(declared.kind, declared.required)
        elif isinstance(declared, Choice):
            words = tuple(declared.kinds)
            annotation: Any = Literal[words]
            yield one.name, (annotation, field_info(words[0], description=declared.about))
            for chosen in declared.kinds.values():
                yield from _flat_fields(chosen)
        else:
            yield _name(one, declared), _flat_field(kind, one, declared, optional=one.name == required)


def _flat_field(kind: type, one: Field[Any], declared: Option, *, optional: bool) -> tuple[Any, FieldInfo]:
    annotation: Any = str | None
    if declared.read is None:
        annotation = _annotation(kind, one)
        annotation = annotation | None if optional or declared.open else annotation
    if declared.read is not None:
        annotation = Annotated[annotation, AfterValidator(_reader(declared))]
    if declared.form is not None:
        annotation = Annotated[annotation, BeforeValidator(_as_json(declared.form))]
    if declared.check is not None:
        annotation = Annotated[annotation, AfterValidator(declared.check)]
    bounds = {name: bound for name in ("ge", "gt", "le") if (bound := getattr(declared, name)) is not None}
    if declared.check is None:
        bounds = _bounds(annotation, bounds.get("gt")) | bounds
    default = None if one.default is MISSING or declared.open else one.default
    return annotation, field_info(default, description=declared.about, **bounds)


def _bounds(annotation: Any, above: float | None) -> dict[str, float]:
    """What any number stays within, and is `above`: times are nanoseconds of 64 bits, which hold no infinity,
    and what is divided by a rate must stay finite too."""
    kinds = get_args(annotation) or (annotation,)
    if float in kinds:
        return {"ge": 1 / _MOST_FLOAT if above == 0 else -_MOST_FLOAT, "le": _MOST_FLOAT}
    return {"ge": -_MOST_INT, "le": _MOST_INT} if int in kinds else {}


def _annotation(kind: type, one: Field[Any]) -> Any:
    """The type of a field. Those of one class alone: others may name what only type checkers import."""
    owner = next(each for each in kind.__mro__ if one.name in vars(each).get("__annotations__", ()))
    return eval(one.type, vars(sys.modules[owner.__module__])) if isinstance(one.type, str) else one.type


def _reader(declared: Option) -> Any:
    read = declared.read
    assert read is not None
    return lambda text: None if text is None else Written(text, read(text))


def _as_json(form: type) -> Any:
    return lambda value: json.dumps(value) if isinstance(value, form) else value


def checked(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all options, texts read. Errors: pydantic's, and BadInput of readers."""
    return dict(flat_model(kind)(**options).__dict__)


def texts(values: Mapping[str, Any]) -> dict[str, Value]:
    """The values that `checked` gave as they were written."""
    return {name: value.text if isinstance(value, Written) else value for name, value in values.items()}


@_once
def open_options(kind: type) -> dict[str, str]:
    """The options of `kind` itself that the engine decides where they are not given, with their fields."""
    options = ((one, it) for one, it in _declared(kind) if isinstance(it, Option))
    return {_name(one, declared): one.name for one, declared in options if declared.open}


@_once
def of_trace(kind: type) -> dict[str, tuple[str, tuple[str, ...]]]:
    """By flat name, what of a trace options need to have an effect: in words, and the columns."""
    needs: dict[str, tuple[str, tuple[str, ...]]] = {}
    for one, declared in _declared(kind):
        if isinstance(declared, Section):
            needs |= of_trace(declared.kind)
        elif isinstance(declared, Option) and declared.needs is not None:
            needs[_name(one, declared)] = declared.needs
    return needs


def settings(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `kind` from the values that `checked` gave."""
    made: dict[str, Any] = {}
    for one, declared in _declared(kind):
        if isinstance(declared, Choice):
            chosen = declared.kinds[values[one.name]]
            made[one.name] = chosen(**settings(chosen, values))
        elif isinstance(declared, Section):
            made[one.name] = _section(declared, values)
        else:
            value = values[_name(one, declared)]
            if declared.open and value is None:
                continue
            made[one.name] = value.value if isinstance(value, Written) else value
    return made


def _section(section: Section, values: Mapping[str, Any]) -> Any:
    if section.profile and not values["engine"].startswith(section.profile):
        return None
    made = settings(section.kind, values)
    return None if section.required and made[section.required] is None else section.kind(**made)


def spread(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options by flat name, where settings and values of `kind` may be given under their fields' names.

    A section that is given whole replaces all options of that section.
    """
    options = dict(given)
    for one, declared in _declared(kind):
        if one.name not in given:
            continue
        value = given[one.name]
        if isinstance(declared, Section):
            del options[one.name]
            options |= {**_defaults(declared.kind), **_spread(value)}
        elif isinstance(declared, Choice) and is_dataclass(value):
            for word, chosen in declared.kinds.items():
                options |= _defaults(chosen)
                if type(value) is chosen:
                    options[one.name] = word
            options |= _spread(value)
        elif isinstance(declared, Option):
            written = declared.read is not None and value is not None and not isinstance(value, str)
            options[_name(one, declared)] = declared.write(options.pop(one.name)) if written else value
            if _name(one, declared) != one.name:
                options.pop(one.name, None)
    return options


def _spread(value: Any) -> dict[str, Any]:
    """The options of settings; none where there are no settings."""
    if value is None:
        return {}
    return spread(type(value), {one.name: getattr(value, one.name) for one, _ in _declared(type(value))})


@_once
def _defaults(kind: type) -> dict[str, Any]:
    return {name: info.default for name, (_, info) in _flat_fields(kind)}


def value_type(info: FieldInfo) -> type:
    """The type of an option's values: `str` for a choice of texts, `int` for an optional number."""
    annotation: Any = info.annotation
    if get_origin(annotation) is Literal:
        return type(get_args(annotation)[0])
    types = [kind for kind in get_args(annotation) if kind is not NoneType]
    kind: type = types[0] if types else annotation
    return kind
