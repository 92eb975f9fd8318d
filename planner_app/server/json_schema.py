"""Values that a JSON schema describes, made up: what a model with structured outputs would answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

_MOST_DEPTH = 24
_FULL_DEPTH = 4  # optional properties are left out below it: a schema may hold itself
_MOST_ITEMS = 64
_MOST_LETTERS = 4096
_UNKNOWN = (
    *("not", "if", "pattern", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
    *("dependentRequired", "dependentSchemas", "contains", "prefixItems", "unevaluatedProperties"),
)
_FORMATS = {
    "date": "2026-01-31",
    "time": "12:30:00Z",
    "date-time": "2026-01-31T12:30:00Z",
    "duration": "PT5M",
    "email": "name@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/",
    "uuid": "6f1d2c3e-5b4a-4c7d-8e9f-0a1b2c3d4e5f",
}
_SYLLABLES = ("ba", "de", "fi", "ko", "lu", "ma", "ne", "pi", "ro", "su", "ta", "ve")


class NotSimulated(Exception):
    """A schema with something that is not made up here, or that no value meets; the message says what."""


def made_up(schema: Any, rng: random.Random) -> Any:
    """A value that the schema allows. Errors: NotSimulated."""
    return _Maker(schema, rng).value(schema, 0)


class _Maker:
    """Makes values of one document of schemas."""

    def __init__(self, root: Any, rng: random.Random) -> None:
        self._root = root
        self._rng = rng

    def value(self, schema: Any, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise NotSimulated(f"the schema is nested more than {_MOST_DEPTH} deep")
        if schema is True:
            return self._word()
        if not isinstance(schema, Mapping):
            raise NotSimulated("a schema must be an object")
        for name in _UNKNOWN:
            if name in schema:
                raise NotSimulated(f"the schema's {name!r} is not simulated")
        if "$ref" in schema:
            return self.value(self._referred(schema["$ref"]), depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            if not isinstance(schema["enum"], list) or not schema["enum"]:
                raise NotSimulated("the schema's 'enum' must be a list of values")
            return self._rng.choice(schema["enum"])
        if "allOf" in schema:
            return self.value(self._merged(schema), depth + 1)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._any(schema[name], depth)
        return self._typed(schema, depth)

    def _any(self, schemas: Any, depth: int) -> Any:
        """Of one of the schemas; where it is deep already, of the first that comes to an end."""
        if not isinstance(schemas, list) or not schemas:
            raise NotSimulated("the schema's 'anyOf' must be a list of schemas")
        order = self._rng.sample(schemas, len(schemas)) if depth < _FULL_DEPTH else schemas
        problem = NotSimulated("")
        for schema in order:
            try:
                return self.value(schema, depth + 1)
            except NotSimulated as error:
                problem = error
        raise problem

    def _referred(self, place: Any) -> Any:
        if not isinstance(place, str) or not place.startswith("#"):
            raise NotSimulated(f"the schema's '$ref' {place!r} leads out of it")
        found = self._root
        for part in place.lstrip("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or part not in found:
                raise NotSimulated(f"the schema's '$ref' {place!r} leads nowhere")
            found = found[part]
        return found

    def _merged(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        merged = {name: value for name, value in schema.items() if name != "allOf"}
        for part in schema["allOf"]:
            whole = self._referred(part["$ref"]) if isinstance(part, Mapping) and "$ref" in part else part
            if not isinstance(whole, Mapping):
                raise NotSimulated("the schema's 'allOf' must be a list of schemas")
            properties = {**merged.get("properties", {}), **whole.get("properties", {})}
            required = [*merged.get("required", []), *whole.get("required", [])]
            merged = {**merged, **whole, "properties": properties, "required": required}
        return merged

    def _typed(self, schema: Mapping[str, Any], depth: int) -> Any:
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next((one for one in kind if one != "null"), "null")
        if kind is None:
            kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
        makers: dict[str, Callable[[Mapping[str, Any], int], Any]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._number,
            "number": self._number,
            "boolean": lambda schema, depth: self._rng.random() < 0.5,
            "null": lambda schema, depth: None,
        }
        if kind not in makers:
            raise NotSimulated(f"the schema's type {kind!r} is not known")
        return makers[kind](schema, depth)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise NotSimulated("the schema's 'properties' must be an object, and 'required' a list")
        made: dict[str, Any] = {}
        for name in (*properties, *(name for name in required if name not in properties)):
            if name in required:
                made[name] = self.value(properties.get(name, True), depth + 1)
            elif depth < _FULL_DEPTH:
                try:
                    made[name] = self.value(properties[name], depth + 1)
                except NotSimulated:
                    continue
        return made

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        least, most = int(schema.get("minItems", 0)), int(schema.get("maxItems", _MOST_ITEMS))
        count = max(least, min(most, 2 if depth < _FULL_DEPTH else 0))
        if least > min(most, _MOST_ITEMS):
            raise NotSimulated(f"the schema's 'minItems' {least} is too many")
        items = [self.value(schema.get("items", True), depth + 1) for _ in range(count)]
        if schema.get("uniqueItems"):
            unique = [item for at, item in enumerate(items) if item not in items[:at]]
            if len(unique) < least:
                raise NotSimulated("the schema's 'uniqueItems' is not simulated with so many of them")
            return unique
        return items

    def _string(self, schema: Mapping[str, Any], depth: int) -> str:
        if "format" in schema:
            if schema["format"] not in _FORMATS:
                raise NotSimulated(f"the schema's format {schema['format']!r} is not simulated")
            return _FORMATS[schema["format"]]
        least, most = int(schema.get("minLength", 0)), int(schema.get("maxLength", _MOST_LETTERS))
        if least > min(most, _MOST_LETTERS):
            raise NotSimulated(f"the schema's 'minLength' {least} is too long")
        text = " ".join(self._word() for _ in range(self._rng.randint(1, 4)))
        while len(text) < least:
            text += " " + self._word()
        return text[:most] if len(text) <= most or least <= most else text

    def _number(self, schema: Mapping[str, Any], depth: int) -> int | float:
        step = schema.get("multipleOf", 1)
        least, most = schema.get("minimum"), schema.get("maximum")
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        whole = schema.get("type") != "number" or float(step) == int(step)
        low = least if least is not None else above
        high = most if most is not None else below
        if low is None:
            low = 0 if high is None or high > 0 else high - 100 * step
        first = ceil(low / step)
        first += above is not None and first * step <= above
        count = 99 if high is None else int((high - first * step) // step)
        count -= below is not None and (first + count) * step >= below
        if count < 0:
            middle = (low + high) / 2 if high is not None else low
            if (
                schema.get("type") == "number"
                and "multipleOf" not in schema
                and high is not None
                and low <= middle
            ):
                return float(middle)
            raise NotSimulated("no number lies within the schema's bounds")
        value = (first + self._rng.randint(0, min(count, 99))) * step
        return int(value) if whole else float(value)

    def _word(self) -> str:
        return "".join(self._rng.choice(_SYLLABLES) for _ in range(self._rng.randint(1, 3)))
