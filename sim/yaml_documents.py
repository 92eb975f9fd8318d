"""YAML documents: reading of those from outside within bounds, and writing.

The bounds are of size, depth, and what aliases expand to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from pagecast.sim.core.errors import BadInput
from pagecast.sim.documents import MIB, MOST_DEPTH, read_text

MOST_NODES = 10_000  # aliases expanded
_MOST_BYTES = MIB
_MOST_SCALAR = 64  # characters of a number or a date
# Numbers of YAML 1.2 that YAML 1.1, which PyYAML reads, takes for texts: 2e9, 1.5e9, 1e-1.
_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """The safe loader within bounds; a field given twice is an error, not the last one's victory."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[int, int] = {}  # of nodes by identity, aliases expanded

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As the parent's, counting depth and nodes. Errors: ComposerError."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if self._depth >= MOST_DEPTH:
            raise _problem(f"nested too deeply, beyond {MOST_DEPTH} levels", mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if id(node) not in self._sizes:
            size = self._size(node, mark)
            if size > MOST_NODES:
                raise _problem(f"more than {MOST_NODES:,} values, aliases expanded", mark)
            self._sizes[id(node)] = size
        return node

    def _size(self, node: Any, mark: Any) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        if node.end_mark is None:
            raise _problem("an alias of what it stands in", mark)
        pairs = isinstance(node, yaml.MappingNode)
        parts = [part for pair in node.value for part in pair] if pairs else node.value
        return 1 + sum(self._sizes[id(part)] for part in parts)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """As the parent's, after a look at the keys."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _problem("a field's name must be a text", key.start_mark)
            if key.value in seen:
                raise _problem(f"field {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """As the parent's, with numbers and dates that can't be made as errors of their line."""
        plain = not isinstance(node, yaml.ScalarNode) or node.tag.endswith((":str", ":binary"))
        if not plain and len(node.value) > _MOST_SCALAR:
            raise _problem(f"a number of {len(node.value):,} characters", node.start_mark)
        try:
            value = super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            raise _problem(f"{node.value!r} can't be read ({error})", node.start_mark) from None
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise _problem(f"{value} is beyond 64 bits", node.start_mark)
        return value


class _Dumper(yaml.SafeDumper):
    """The safe dumper, which puts quotes around a text that `_Loader` would take for a number."""


for _reader_or_writer in (_Loader, _Dumper):
    _reader_or_writer.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def _problem(what: str, mark: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(problem=what, problem_mark=mark)


def parse_yaml(text: str) -> Any:
    """The value that a text stands for. Errors: yaml.YAMLError, also for what is beyond the bounds."""
    return yaml.load(text, Loader=_Loader)


def parse_documents(text: str) -> list[Any]:
    """The values of all documents in a text. Errors as of `parse_yaml`."""
    return list(yaml.load_all(text, Loader=_Loader))


def yaml_text(value: Any) -> str:
    """A document that `parse_yaml` reads as this value, its fields in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def read_mapping(path: str | Path, remedy: str) -> dict[str, Any]:
    """The fields of a document that is one mapping, by their names as text; {} for an empty one.

    Errors: BadInput naming file and line.
    """
    text = read_text(path, _MOST_BYTES, remedy)
    try:
        data = parse_yaml(text)
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
        what = getattr(error, "problem", None) or "not YAML"
        raise BadInput(f"{path} line {line}: {what}; write `field: value` lines") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise BadInput(f"{path}: must hold `field: value` lines")
    return {str(key): value for key, value in data.items()}
