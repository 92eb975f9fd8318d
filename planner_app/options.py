"""Options, declared once: the fields of a model are a command's options, and code takes the model whole.

    class Many(Options):
        workers: int | None = Field(default=None, ge=1, description="processes [one per core]")

    @with_options
    def check_command(scenario: Path, many: Many) -> None: ...   # --workers N

    with executor(Many(workers=2)) as run: ...

A field's name, type, default, bounds and description are those of the option. `Flag` tells what else the
command line needs. A model knows which of its fields were given (`given`), so that those without effect
beside others can be refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pagecast.sim.core.errors import BadInput
from pagecast.sim.documents import WORDS, field_problem
from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of the command line, in the metadata of a field.

    `names`: where they are not the field's. `kind`: the type that is written, where a validator makes the
    field's of it. `hidden`: not in the help. `variables` of the environment give it too: the first that is
    set. `absent`: the field is for Python alone.
    """

    names: tuple[str, ...] = ()
    kind: Any = None
    hidden: bool = False
    variables: tuple[str, ...] = ()
    absent: bool = False


PYTHON_ONLY = Flag(absent=True)


class Options(BaseModel):
    """Options of a question or of a service. Errors: BadInput naming the option."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True
    )

    @classmethod
    def flat_fields(cls) -> Mapping[str, FieldInfo]:
        """The fields that are options of the command line."""
        return {name: info for name, info in cls.model_fields.items() if not flag_of(info).absent}

    @classmethod
    def option(cls, name: str) -> str:
        """A field's option, as it is written."""
        info = cls.model_fields.get(name)
        names = () if info is None else flag_of(info).names
        return names[0] if names else f"--{name.replace('_', '-')}"

    def given(self, beyond: type[Options] | None = None) -> list[str]:
        """The options that were given, as they are written: `beyond` another model's, where that is named."""
        others = () if beyond is None else beyond.model_fields
        return [
            self.option(name) for name in type(self).model_fields if name in self.model_fields_set - {*others}
        ]

    @model_validator(mode="wrap")
    @classmethod
    def _tell(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            raise BadInput(_problem(error, cls)) from None


def flag_of(info: FieldInfo) -> Flag:
    """What a field says of its option beyond its type, default and description."""
    return next((one for one in info.metadata if isinstance(one, Flag)), Flag())


_WORDS = {**WORDS, "literal_error": "choose {expected}"}


def _problem(error: ValidationError, kind: type[Options]) -> str:
    """The first option that is wrong, and what it may be."""
    first = error.errors()[0]
    problem, name = field_problem(error, kind), str(first["loc"][0]) if first["loc"] else ""
    if first["type"] in _WORDS:
        words = _WORDS[first["type"]].format(**first.get("ctx", {}))
        return f"{kind.option(name)} is {first['input']}; {words}"
    return kind.option(name) + problem.removeprefix(name) if name and problem.startswith(name) else problem
