"""An installation has every file of the package, its names and its types."""

import os
import subprocess
import sys
from pathlib import Path

import pagecast
import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = "from setuptools import setup; setup()"
USER = """
from pagecast import Scenario, read, replay

scenario = Scenario(gpu="H100")
reveal_type(replay(read("chat"), scenario))
scenario.gpu.no_such_method()
"""


def files_of(package: Path) -> set[str]:
    paths = (Path(folder, name) for folder, _, names in os.walk(package, followlinks=True) for name in names)
    left_out = (".pyc", ".so")
    return {path.relative_to(package).as_posix() for path in paths if path.suffix not in left_out}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder of packages that a wheel would unpack."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("build")
    command = ["-q", "egg_info", "--egg-base", str(folder), "build_py", "--build-lib", str(folder / "lib")]
    subprocess.run([sys.executable, "-c", BUILD, *command], cwd=ROOT, check=True, capture_output=True)
    return folder / "lib"


def test_an_installation_has_every_file(installed):
    files = files_of(installed / "pagecast")
    assert files == files_of(ROOT / "src" / "pagecast")
    assert {
        "py.typed",
        "traces/samples/chat.jsonl.gz",
        "sim/machine/models.json",
        "sim/machine/gpus.csv",
    } < files


def test_mypy_sees_the_types_of_an_installation(installed, tmp_path):
    """In an environment that has only pagecast, as a user's mypy without stubs of its dependencies."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "pagecast.pth").write_text(f"{installed}\n", encoding="utf-8")
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "user.py"]
    without_path = {
        name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")
    }
    done = subprocess.run(command, cwd=tmp_path, env=without_path, capture_output=True, text=True)
    assert 'Revealed type is "pagecast.sim.replay.result.Result"' in done.stdout, done.stdout
    assert '"str" has no attribute "no_such_method"' in done.stdout


def test_the_package_offers_its_public_names():
    assert dir(pagecast) == sorted(pagecast.__all__)
    for name in pagecast.__all__:
        assert getattr(pagecast, name) is not None
    with pytest.raises(AttributeError, match="'pagecast' has no attribute 'no_such_name'"):
        _ = pagecast.no_such_name


def test_a_trace_is_replayed_by_public_names_alone():
    result = pagecast.replay(pagecast.read("chat", limit=20), pagecast.Scenario(gpu="H100", max_num_seqs=64))
    assert isinstance(result, pagecast.Result)
    assert result.summary["completed"] == len(result.requests) == 20
