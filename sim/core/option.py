"""Options: fields of settings that a user gives by name, and how settings are made of them.

A class of settings declares each option once, with its description and bounds. `sim.scenario.flat` makes of
that the names on the command line and in YAML, which have one level whatever the classes are nested in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Option:
    """One option. `flat`: its name for users, where that is not the field's own.

    `ge`, `gt`, `le`: bounds of a number. `check` refuses other values that cannot be. `read` makes the
    field's value of a text, and `write` a text of the value; `form`: the type that YAML may have in place of
    the text, which is kept as JSON. `needs`: in words, and as columns, what of the trace it needs to have an
    effect. `otherwise`: how a profile does without the option, where giving it is an error. `open`: None
    where it is not given, and then as the engine that is chosen has it.
    Errors of `check` and `read`: BadInput, or ValueError for a message that the name is put before.
    """

    about: str
    flat: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    check: Callable[[Any], Any] | None = None
    read: Callable[[str], Any] | None = None
    write: Callable[[Any], str] = str
    form: type | None = None
    needs: tuple[str, tuple[str, ...]] | None = None
    otherwise: str = ""
    open: bool = False


@dataclass(frozen=True)
class Section:
    """Settings of the class `kind`, nested in others.

    A class with an option that has no default is there where that option is given, and None elsewhere; one
    that is for some engines, where `profile` begins the profile's name. `engine`: those profiles in words.
    """

    kind: type
    profile: str = ""
    engine: str = ""

    @cached_property
    def required(self) -> str:
        """The field that must be given for the section to be there; empty where there is none."""
        without = (one.name for one in fields(self.kind) if one.default is MISSING)
        return next(without, "")


@dataclass(frozen=True)
class Choice:
    """Settings of one of several classes, each chosen by a word; the first is the default."""

    kinds: Mapping[str, type]
    about: str


def option(about: str, default: Any = MISSING, **more: Any) -> Any:
    """A field that users give; `more` as in `Option`."""
    return field(default=default, metadata={"declared": Option(about, **more)})


def section(kind: type, profile: str = "", engine: str = "") -> Any:
    """A field that holds the settings of `kind`."""
    declared = Section(kind, profile, engine)
    default = None if declared.required or profile else kind()
    return field(default=default, metadata={"declared": declared})


def choice(about: str, kinds: Mapping[str, type]) -> Any:
    """A field that holds settings of one of `kinds`."""
    return field(default=next(iter(kinds.values()))(), metadata={"declared": Choice(kinds, about)})


def chunked_prefill_option(default: bool) -> Any:
    """The option of all engines that can do without chunks; `default`: what this one does by itself."""
    return option(
        "cut long prompts into chunks; vllm and sglang can do without, and trtllm does by default",
        default,
        open=True,
        flat="enable_chunked_prefill",
        otherwise="always cuts long prompts into chunks",
    )
