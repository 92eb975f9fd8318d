"""Result of reading a launch: fields of a scenario, and notes on options that a forecast leaves out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pagecast.planner_app.launch.options import EngineOption, Given
from pagecast.sim.core.errors import BadInput
from pagecast.sim.note import Caution
from pagecast.sim.scenario import Scenario, value_type

_READABLE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_UNKNOWN = re.compile(r"\$\(|\$\{?\w+\}?")
_POWERS = "kmgt"


@dataclass
class Reading:
    """The options of one start of an engine, as they become fields.

    `where`: the file and line, for errors and notes. `files`: documents that the same script writes.
    """

    where: str
    given: Given
    fields: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1

    def value(self, name: str) -> Any:
        """The value given of the option whose own name this is; None where it is not given."""
        return next((value for option, value in self.given.values.items() if option.names[0] == name), None)

    def follow(self) -> None:
        """Makes fields of the options that stand for one, and a note of those that are not modelled."""
        left_out = []
        for option, before in self.given.replaced:
            last = _shown(option, self.given.values[option])
            self.caution(f"{_shown(option, before)} is given before {last}, which replaces it in the engine")
        for option, value in self.given.values.items():
            if option.kept == "followed" and option.detail != "-":
                self.fields[option.detail] = self.typed(option, value, option.detail)
            elif option.kept == "not-modelled" and option.changes(value):
                left_out.append(_shown(option, value))
        if left_out:
            self.caution(f"not modelled, though a forecast may depend on it: {', '.join(sorted(left_out))}")

    def note(self, text: str) -> None:
        """Adds a note."""
        self.notes.append(f"{self.where}: {text}")

    def caution(self, text: str) -> None:
        """Adds a note on a part that is left out though a forecast depends on it."""
        self.notes.append(Caution(f"{self.where}: {text}"))

    def typed(self, option: EngineOption, value: Any, name: str) -> Any:
        """A value as the scenario's field `name` takes it. Errors: BadInput."""
        self.known(option, value)
        info = Scenario.flat_fields()[name]
        kind: Any = value_type(info)
        if kind is bool:
            return _truth(value)
        if kind is int:
            return self.whole(option, value)
        if kind is float:
            return self.number(option, value)
        words = [word for word in get_args(info.annotation) if isinstance(word, str)]
        if words and value not in words:
            self.caution(f"{option.written} {value} is not modelled; {name} can be {', '.join(words)}")
            return info.default
        return str(value)

    def known(self, option: EngineOption, value: Any) -> None:
        """Errors: BadInput for a value with a variable that nothing sets."""
        unset = _UNKNOWN.search(value) if isinstance(value, str) else None
        if unset is not None:
            raise BadInput(
                f"{self.where}: the value of {option.written} is {value}, and nothing there sets {unset[0]}; "
                "write the value itself"
            )

    def whole(self, option: EngineOption, value: Any) -> int:
        """A whole number, also as 32k (thousands) or 32K (of 1,024). Errors: BadInput."""
        self.known(option, value)
        match = _READABLE.fullmatch(str(value))
        if match is not None:
            base = 1000 if match[2].islower() else 1024
            return int(float(match[1]) * base ** (_POWERS.index(match[2].lower()) + 1))
        try:
            return int(str(value))
        except ValueError:
            raise BadInput(f"{self.where}: {option.written} is {value!r}: give a whole number") from None

    def number(self, option: EngineOption, value: Any) -> float:
        """Errors: BadInput."""
        self.known(option, value)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise BadInput(f"{self.where}: {option.written} is {value!r}: give a number") from None

    def count(self, name: str) -> int:
        """The whole number given of an option of GPUs or ranks; 1 where it is not given."""
        for option, value in self.given.values.items():
            if option.names[0] == name:
                return max(self.whole(option, value), 1)
        return 1

    def document(self, name: str) -> dict[str, Any] | None:
        """The JSON object given of an option; None where it is not given. Errors: BadInput."""
        value = self.value(name)
        if value is None or isinstance(value, dict):
            return value
        try:
            data = json.loads(value)
        except ValueError as error:
            raise BadInput(f"{self.where}: --{name} is no JSON ({error}): {value}") from None
        if not isinstance(data, dict):
            raise BadInput(f"{self.where}: --{name} is {value}: give a JSON object of fields")
        return data


def _truth(value: Any) -> bool:
    return value if isinstance(value, bool) else str(value).lower() not in ("false", "0", "no", "off")


def _shown(option: EngineOption, value: Any) -> str:
    if value is True or (value is False and option.kind == "switch"):
        return option.written if value else f"--no-{option.names[0]}"
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{option.written} {text}"
