"""Figures that a check may name: those of a replay's summary, and the number of unserved requests."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from difflib import get_close_matches
from math import isnan

from pagecast.planner_app.planner.directions import more_is_better
from pagecast.planner_app.planner.gate.check_file import CheckFile
from pagecast.planner_app.planner.served import ENDLESS, RequestCounts
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import Result
from pagecast.sim.replay.rejections import KINDS, is_kind
from pagecast.sim.replay.replicates import absent, summary_figures

UNSERVED = "unserved"
_REASON = "rejected_reasons."
SIZES = ("num_gpu_blocks", "requests")  # which may be bounded, but are no forecasts
FigureDraws = Mapping[str, Sequence[float | None]]


def compared(result: Result) -> dict[str, float]:
    """Every figure that may be compared with a baseline's, by name; NaN where this replay has none."""
    return summary_figures(result) | {UNSERVED: float(RequestCounts.of(result.requests).unserved)}


def bounded(result: Result) -> dict[str, float]:
    """Every figure that may be bounded, by name; NaN where this replay has none."""
    sizes = {name: float(result.summary[name]) for name in SIZES}
    return compared(result) | sizes


def exists(name: str, figures: Container[str]) -> bool:
    """Whether there is such a figure: one of `figures`, or one that is a number where it is lacking.

    Of the reasons of rejection those that a replica may have.
    """
    if name in figures:
        return True
    return not isnan(absent(name)) and (not name.startswith(_REASON) or is_kind(name.removeprefix(_REASON)))


def value_of(name: str, figures: Mapping[str, float]) -> float:
    """A figure's value, of those that exist."""
    return figures.get(name, absent(name))


def draws_of(name: str, draws: FigureDraws) -> Sequence[float | None] | None:
    """A figure's draws; None where it does not exist."""
    if not exists(name, draws):
        return None
    if name in draws:
        return draws[name]
    return [absent(name)] * max(map(len, draws.values()), default=0)


def check_names(file: CheckFile, figures: Mapping[str, float]) -> None:
    """Errors: BadInput for a figure that no replay has, or a regression of one that can't be compared."""
    for where, names in (("limits", file.check.limits), ("regression", file.check.regression)):
        for name in names:
            if name.startswith(_REASON) and not exists(name, figures):
                raise BadInput(
                    f"{file.path}: check.{where}: no request is ever rejected for "
                    f"{name.removeprefix(_REASON)!r}; after {_REASON} give one of these, with numbers for N: "
                    f"{'; '.join(KINDS)}"
                )
            if not exists(name, figures):
                near = get_close_matches(name.replace("_", "."), figures, 1, 0.5)
                hint = f"did you mean {near[0]}?" if near else "see the names in `pagecast replay --json`"
                raise BadInput(f"{file.path}: check.{where}: no figure is called {name!r}; {hint}")
    for name in file.check.regression:
        reason = ""
        if name in SIZES:
            reason = f"{name} follows from trace and scenario, so that no draw forecasts it"
        elif more_is_better(name) is None:
            reason = f"neither more nor less of {name} is better"
        if reason:
            raise BadInput(f"{file.path}: check.regression: {reason}; bound it with check.limits")


def leaves_out_unserved(name: str) -> bool:
    """Whether a figure is of a latency that an unserved request would make endless, were it counted."""
    stem = name.partition(".")[0]
    return stem.endswith("_s") and stem.partition("_")[0] in ENDLESS
