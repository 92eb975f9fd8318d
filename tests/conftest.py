"""Paths the tests share; data beside the project is used where it is present."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of public traces and recorded runs beside the project; skips where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared beside the project: public traces and recorded runs are not here")
    return SHARED
