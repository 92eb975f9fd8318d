"""The core compiles: mypyc takes every file that `make compile` gives it, and the result decides the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRANSLATE = "import sys; from mypyc.build import mypycify; mypycify(sys.argv[1:], target_dir='c')"
COMPILE = "from mypyc.__main__ import main; main()"


def compiled_files() -> list[str]:
    """The files that `make compile` gives to mypyc, from the folder `src`."""
    command = ["make", "-C", str(ROOT), "--dry-run", "compile"]
    plan = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [word for word in plan.split() if word.startswith("pagecast/")]


def output_of(program: str, *arguments: str, folder: Path, **environment: str) -> str:
    """What a Python program prints in a folder; fails where the program does."""
    command = [sys.executable, "-c", program, *arguments]
    variables = {**os.environ, **environment}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_mypyc_translates_the_core(tmp_path):
    pytest.importorskip("mypyc")
    (tmp_path / "pagecast").symlink_to(ROOT / "src" / "pagecast")
    files = compiled_files()
    assert len(files) > 50
    output_of(TRANSLATE, "--ignore-missing-imports", *files, folder=tmp_path)


REPLAYS = """
import pickle

import pandas as pd
from pagecast.sim.core import step
from pagecast.sim.core.engines.registry import PROFILES
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

trace = read("traces/samples/chat.jsonl.gz", limit=300)
scenarios = [{"engine": name} for name in PROFILES]
scenarios += [{"model": "openai/gpt-oss-20b"}, {"kv_offloading_size": 4}, {"async_scheduling": True}]
for fields in scenarios:
    tight = {"model": "Qwen/Qwen3-8B", "costs": "roofline", "num_gpu_blocks": 3000, **fields}
    scenario = pickle.loads(pickle.dumps(Scenario.make(tight)))  # as for another process
    result = replay(trace, scenario, keep_steps=True)
    print(fields, *[pd.util.hash_pandas_object(table).sum() for table in (result.steps, result.requests)])
print(step.__file__)
"""


def replays(tree: Path) -> list[str]:
    """What the replays of some scenarios decide and measure, a line each; last, the file that ran them."""
    return output_of(REPLAYS, folder=ROOT, PYTHONPATH=str(tree)).splitlines()


@pytest.mark.slow
@pytest.mark.skipif(None in (shutil.which("gcc"), shutil.which("make")), reason="needs make and a C compiler")
def test_the_compiled_core_decides_as_plain_python(tmp_path):
    pytest.importorskip("mypyc")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "src" / "pagecast", tmp_path / "pagecast", ignore=ignored)
    *plain, file = replays(tmp_path)
    assert file.endswith("step.py")
    output_of(COMPILE, "--ignore-missing-imports", *compiled_files(), folder=tmp_path)
    *compiled, file = replays(tmp_path)
    assert file.endswith(".so")
    assert compiled == plain
