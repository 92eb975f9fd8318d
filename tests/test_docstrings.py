"""Docstrings: every public module, class and function has one, and the examples in them run."""

import ast
import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("sim", "engine", "kernels", "planner_app", "traces")
FILES = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
EXAMPLES = [path for path in FILES if ">>> " in path.read_text(encoding="utf-8")]
QUESTION = re.compile(r"(What|How|Which|Where|Who|Whether|When|Why)\b")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def undocumented(body: list[ast.stmt], inside: str) -> list[str]:
    """Public classes, functions and methods without a docstring."""
    missing = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                missing.append(inside + node.name)
            if isinstance(node, ast.ClassDef):
                missing += undocumented(node.body, f"{inside}{node.name}.")
    return missing


def test_every_public_name_has_a_docstring():
    missing = [
        f"{name(path)}: {each}"
        for path in FILES
        for each in undocumented(ast.parse(path.read_text(encoding="utf-8")).body, "")
    ]
    assert not missing


def test_modules_open_with_what_they_are_not_with_a_question():
    docs = {name(path): ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in FILES}
    assert not [module for module, doc in docs.items() if not doc or QUESTION.match(doc)]


@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_examples_in_docstrings_run(path):
    module = import_module("pagecast." + name(path).removesuffix(".py").replace("/", "."))
    assert doctest.testmod(module).failed == 0
