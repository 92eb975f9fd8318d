"""Examples in docstrings run."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("sim", "engine", "kernels", "planner_app", "traces")
FILES = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
EXAMPLES = [path for path in FILES if ">>> " in path.read_text(encoding="utf-8")]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_examples_in_docstrings_run(path):
    module = import_module("pagecast." + name(path).removesuffix(".py").replace("/", "."))
    assert doctest.testmod(module).failed == 0
