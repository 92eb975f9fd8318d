"""Versions of engines: their order, and which of the known ones a version means."""

from __future__ import annotations

from collections.abc import Sequence


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split("."))


def since(version: str, first: str) -> bool:
    """Whether a version is `first` or a later one."""
    return _key(version) >= _key(first)


def known_version(version: str, known: Sequence[str]) -> str | None:
    """The known version that a full one belongs to: 0.33 for 0.33.0; None where there is none."""
    return next((one for one in known if version == one or version.startswith(f"{one}.")), None)


def nearest_version(version: str, known: Sequence[str]) -> str:
    """The newest known version that is not newer, else the oldest; `known`: oldest first."""
    return max((one for one in known if since(version, one)), key=_key, default=known[0])
