"""Corrections to step costs, fitted to a user's measurements: the file, and how they apply.

Three numbers: host time that each step exposes (seconds, added), and factors on the device time of decode
steps and of steps with prompts. `sd` are their standard deviations given the results, `prior_sd` what was
assumed before them: a result that says nothing of a number leaves its prior.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.documents import read_json

KIND = "pagecast corrections of measured operations"
FORMAT = 1
MEASURED = "measured"
NAMES = ("step_s", "decode", "prompt")
_MOST_BYTES = 1 << 20
_BOUNDS = {"step_s": (-0.1, 1.0), "decode": (0.1, 10.0), "prompt": (0.1, 10.0)}


@dataclass(frozen=True)
class Corrections:
    """Corrections of step costs for one set-up: of measured operations, or of the `base` named.

    `covariance` is of (step_s in ms, ln decode, ln prompt); `made_for` names model, GPU, engine and sharding;
    `sources` the results that were fitted, with their errors before and after.
    """

    name: str
    step_s: float
    decode: float
    prompt: float
    covariance: tuple[tuple[float, ...], ...] = ()
    prior_sd: tuple[float, ...] = ()
    made_for: dict[str, Any] = field(default_factory=dict)
    sources: tuple[dict[str, Any], ...] = ()
    base: str = MEASURED

    @property
    def sd(self) -> tuple[float, ...]:
        """Standard deviations: of step_s in ms, and of the logarithms of the factors."""
        return tuple(math.sqrt(row[at]) for at, row in enumerate(self.covariance))

    def save(self, path: str | Path) -> Path:
        """Writes the file; returns its path. Errors: BadInput."""
        where = Path(path)
        body = {"format": FORMAT, "kind": KIND, **asdict(self)}
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"{where}: can't be written ({error.strerror})") from None
        return where


def read_corrections(path: str | Path) -> Corrections | None:
    """The corrections in a file; None where it holds something else. Errors: BadInput for broken ones."""
    where = Path(path)
    if not where.is_file():
        return None
    body = read_json(where, _MOST_BYTES * 16, "give a file that `pagecast calibrate` wrote")
    if not isinstance(body, dict) or body.get("kind") != KIND:
        return None
    if body.get("format") != FORMAT:
        raise BadInput(f"{where}: version {body.get('format')!r} of the format; calibrate again")
    try:
        corrections = Corrections(
            name=str(body["name"]),
            **{name: float(body[name]) for name in NAMES},
            covariance=tuple(tuple(float(value) for value in row) for row in body["covariance"]),
            prior_sd=tuple(float(value) for value in body["prior_sd"]),
            made_for=dict(body["made_for"]),
            sources=tuple(dict(source) for source in body["sources"]),
            base=str(body.get("base", MEASURED)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{where}: field missing or of the wrong kind ({error}); calibrate again") from None
    for name, (least, most) in _BOUNDS.items():
        if not least <= getattr(corrections, name) <= most:
            raise BadInput(
                f"{where}: {name} is {getattr(corrections, name):g}, must be from {least:g} to {most:g}"
            )
    return corrections
