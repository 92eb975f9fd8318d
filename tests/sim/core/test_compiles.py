"""The core compiles: mypyc takes every file that `make compile` gives it, which asks for more than mypy."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRANSLATE = "import sys; from mypyc.build import mypycify; mypycify(sys.argv[1:], target_dir='c')"


def compiled_files() -> list[str]:
    """The files that the Makefile compiles, from the root of the repository."""
    rule = re.search(
        r"^COMPILED := \$\(filter-out (.*?),\$\(wildcard (.*?)\)\) (.*)$", makefile(), re.MULTILINE
    )
    assert rule is not None, "the Makefile names the compiled files otherwise: this test must follow"
    excluded = {Path(pattern).name for pattern in rule[1].split()}
    files = [path for pattern in rule[2].split() for path in sorted(ROOT.glob(pattern))]
    return [str(path.relative_to(ROOT)) for path in files if path.name not in excluded] + rule[3].split()


def makefile() -> str:
    return (ROOT / "Makefile").read_text()


@pytest.mark.slow
def test_mypyc_translates_the_core(tmp_path):
    pytest.importorskip("mypyc")
    package = tmp_path / "pagecast"
    package.mkdir()
    (package / "__init__.py").touch()
    for folder in ("engine", "kernels", "planner_app", "sim", "traces"):
        (package / folder).symlink_to(ROOT / folder)
    files = [f"pagecast/{file}" for file in compiled_files()]
    assert len(files) > 50
    command = [sys.executable, "-c", TRANSLATE, "--ignore-missing-imports", *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
