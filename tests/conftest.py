"""Paths the tests share; data beside the project is used where it is present."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The arrays here are small, and tests run on every core: more threads of a library only spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Many tests start the command line: without bytecode each of them would compile the package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

SHARED = Path(__file__).resolve().parents[2] / "shared"

# Each worker of pytest-xdist has a core of its own, so that no test starts processes on the others' cores.
# Servers and browsers that tests start may use all cores, which `PAGECAST_TEST_CORES` lists.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if _WORKER and hasattr(os, "sched_setaffinity"):
    _CORES = sorted(os.sched_getaffinity(0))
    os.environ["PAGECAST_TEST_CORES"] = " ".join(map(str, _CORES))
    os.sched_setaffinity(0, {_CORES[int(_WORKER.removeprefix("gw")) % len(_CORES)]})

# No example has a time limit: how long one takes depends on what else the machine does. In CI the same
# examples every time, so that a change is judged by itself; elsewhere new ones are tried.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu where there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from searching the modules of all tests again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Libraries count what is left at Python's end."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of public traces and recorded runs beside the project; skips where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared beside the project: public traces and recorded runs are not here")
    return SHARED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Puts `__main__` back: AppTest leaves its script there, and spawned processes would run that."""
    main = sys.modules["__main__"]
    try:
        return (yield)
    finally:
        sys.modules["__main__"] = main
