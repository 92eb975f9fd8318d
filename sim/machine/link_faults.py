"""Link faults: which transfers fail and which are slow, link by link.

Written as `host-load:failing=0.1,slow=0.05,factor=20;disk-store:failing=0.2`.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecast.sim.core.errors import check_given_once

LINKS = ("host-load", "host-store", "disk-load", "disk-store")
_FIELDS = {"failing": "failing", "slow": "slow", "factor": "slowness"}


def read_link_faults(text: str) -> dict[str, dict[str, float]]:
    """The fields of `LinkSpec` to change, by link. Errors: ValueError naming what is wrong."""
    faults: dict[str, dict[str, float]] = {}
    for part in text.split(";"):
        link, _, fields = part.strip().partition(":")
        if link not in LINKS:
            raise ValueError(f"{link!r} is no link; name one of {', '.join(LINKS)}, as host-load:failing=0.1")
        remedy = "give it once, its fields with commas"
        check_given_once(link, faults, f"link {link!r}", remedy, ValueError)
        faults[link] = _faults_of(link, fields)
    return faults


def _faults_of(link: str, text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in _FIELDS:
            raise ValueError(f"{link} has {name!r}; it may have {', '.join(_FIELDS)}")
        check_given_once(_FIELDS[name], values, f"{link}: field {name!r}", error=ValueError)
        values[_FIELDS[name]] = _number(link, name, number)
    return values


def _number(link: str, name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{link}: {name} is {text!r}, must be a number") from None
    if name == "factor" and not number >= 1:
        raise ValueError(f"{link}: factor is {text}, must be at least 1")
    if name != "factor" and not 0 <= number <= 1:
        raise ValueError(f"{link}: {name} is {text}, must be a share from 0 to 1")
    return number


def link_faults_text(faults: Mapping[str, Mapping[str, float]]) -> str:
    """The text that `read_link_faults` reads."""
    words = {field: word for word, field in _FIELDS.items()}
    return ";".join(
        f"{link}:{','.join(f'{words[field]}={number}' for field, number in fields.items())}"
        for link, fields in faults.items()
    )
