"""Digest of the kernels' code, by which recorded step times are told apart."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

_DIGITS = 8
_HERE = Path(__file__)
_NOT_LAUNCHED = (_HERE.name, "reference.py")


@cache
def code_digest(folder: Path = _HERE.parent) -> str:
    """The first hexadecimal digits of a hash of the modules in `folder`, without comments and docstrings.

    Equal for all versions of Python that parse the code alike.
    """
    digest = sha256()
    for path in sorted(folder.glob("*.py")):
        if path.name not in _NOT_LAUNCHED:
            digest.update("\n".join((path.name, *_words(ast.parse(path.read_bytes())))).encode())
    return digest.hexdigest()[:_DIGITS]


def _words(node: object) -> Iterator[str]:
    """A syntax tree in words: nodes by type, and their fields but for empty ones."""
    if isinstance(node, list):
        for each in node:
            yield from _words(each)
    elif isinstance(node, ast.AST):
        yield type(node).__name__
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(value, list):
                value = [each for each in value if not _is_text(each)]
            if value is not None and value != []:
                yield name
                yield from _words(value)
    else:
        yield repr(node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
