"""Tests of the package list: an installation has every module."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOP_LEVEL = ("sim", "engine", "kernels", "planner_app", "traces")


def _folders_with_modules() -> dict[str, str]:
    folders = {module.parent for top in TOP_LEVEL for module in (ROOT / top).rglob("*.py")}
    paths = [folder.relative_to(ROOT).as_posix() for folder in folders]
    return {f"pagecast.{path.replace('/', '.')}": path for path in paths}


def test_every_folder_of_modules_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert setuptools["package-dir"] == _folders_with_modules()
    assert sorted(setuptools["packages"]) == sorted(_folders_with_modules())


def test_every_data_file_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = setuptools["package-data"]
    missing = []
    for name, path in _folders_with_modules().items():
        folder = ROOT / path
        covered = {file for pattern in patterns.get(name, []) for file in folder.glob(pattern)}
        own = _folders_with_modules().values()
        for file in folder.rglob("*"):
            inside = file.parent.relative_to(ROOT).as_posix()
            nearest = max((each for each in own if inside == each or inside.startswith(f"{each}/")), key=len)
            if (
                file.is_file()
                and file.suffix not in (".py", ".pyc")
                and nearest == path
                and file not in covered
            ):
                missing.append(file.relative_to(ROOT).as_posix())
    assert not missing
