"""Fields of loads from outside: what they may be, and loads made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.documents import field_problem
from pagecast.sim.scenario.flat import flat_model
from pagecast.traces.load import Load
from pydantic import ValidationError
from pydantic.fields import FieldInfo


def load_fields() -> Mapping[str, FieldInfo]:
    """The fields of a load by name."""
    return flat_model(Load).model_fields


def make_load(fields: Mapping[str, Any], where: str = "") -> Load:
    """A load of fields from outside. Errors: BadInput naming the field, what it may be, and `where` it is."""
    before = where and f"{where}: "
    try:
        return Load(**flat_model(Load)(**fields).__dict__)
    except ValidationError as error:
        problem = field_problem(error, flat_model(Load), document="a load")
        raise BadInput(before + problem) from None
    except BadInput as error:  # fields at odds with each other
        raise BadInput(f"{before}{error}") from None


def checked_field(name: str, value: Any) -> str | int | float | None:
    """A field of a load by itself, as a load takes it. Errors: BadInput."""
    try:
        checked: str | int | float | None = getattr(flat_model(Load)(**{name: value}), name)
        return checked
    except ValidationError as error:
        raise BadInput(field_problem(error, flat_model(Load), document="a load")) from None
