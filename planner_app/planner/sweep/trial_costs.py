"""Step costs of a sweep's trials, and the limits they set to comparing trials.

`costs: auto` may choose a calibration for one GPU and the roofline for another: then a part of what
separates their trials is what separates the methods.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
from pagecast.planner_app.planner.fleet.knobs import fleet_at
from pagecast.planner_app.planner.sweep.space import Point, shown
from pagecast.planner_app.planner.sweep.study import SweepResult, record, records
from pagecast.planner_app.planner.sweep.trial import at
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.planner_app.wording.quantities import counted
from pagecast.sim.core.errors import BadInput
from pagecast.sim.note import Caution
from pagecast.sim.replay.notes import idle_note
from pagecast.sim.scenario import Scenario

ONE_REPLICA = (
    "each trial is one replica that serves the whole trace; `pagecast plan` tells how many a rate needs, and "
    "with prices what tokens cost at the highest load"
)
A_FLEET = "each trial is a fleet that serves the trace at its own times; its cost is of all GPUs that it held"


@dataclass(frozen=True, slots=True)
class CostUse:
    """Step costs by name, how many trials had them, which, where a knob tells, and the error to expect."""

    name: str
    trials: int
    where: str
    expected_error: str

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON."""
        return asdict(self)


def what_each_is(result: SweepResult) -> str:
    """One sentence: whether trials are of a replica or of a fleet, and what their cost counts."""
    return ONE_REPLICA if result.question.fleet is None else A_FLEET


def used(result: SweepResult) -> list[CostUse]:
    """The step costs of the trials that ran, in the order of the trials."""
    ran = result.table[(result.table["reason"] == "") & (result.table["step_costs"] != "")]
    return [
        CostUse(str(name), len(rows), _where(result, ran, str(name)), _error(result, rows))
        for name, rows in ran.groupby("step_costs", sort=False)
    ]


def notes(result: SweepResult, uses: list[CostUse]) -> list[str]:
    """Sentences on fields without effect, and on `used`, that whoever compares trials must know."""
    idle = [text] if (text := _idle(result)) else []
    if len(uses) < 2:
        return [*idle, *(each.expected_error for each in uses if each.expected_error)]
    methods = ", ".join(
        f"{each.name} ({f'{each.where}, ' if each.where else ''}{counted(each.trials, 'trial')})"
        for each in uses
    )
    advice = "" if "costs" in result.knobs else "; --costs roofline gives all trials the same method"
    differ = Caution(
        f"Step costs differ within this sweep: {methods}. What separates such trials is in part what "
        f"separates the methods{advice}."
    )
    return [*idle, differ, *(f"{each.name}: {each.expected_error}" for each in uses if each.expected_error)]


def _idle(result: SweepResult) -> str:
    """A sentence on fields that are given and change nothing in any trial that ran; empty without any."""
    scenarios = servers(result)
    return idle_note(result.question.trace, *scenarios) if scenarios else ""


def servers(result: SweepResult) -> list[Scenario]:
    """The scenarios of the trials that ran; none where a file has gone since."""
    ran = result.table[result.table["reason"] == ""]
    points = [{name: row[name] for name in result.knobs} for row in records(ran)]
    try:
        return [scenario for point in points for scenario in _scenarios(result, point)]
    except BadInput:
        return []


def _scenarios(result: SweepResult, point: Point) -> list[Scenario]:
    """The scenarios of a trial's replica, or of its fleet's. Errors: BadInput where files have gone since."""
    scenario, fleet = at(result.question.scenario, point), result.question.fleet
    return [scenario] if fleet is None else fleet_at(fleet, point).revisions(scenario)


def _where(result: SweepResult, ran: pd.DataFrame, name: str) -> str:
    """The values of the first knob that tells these trials from all others."""
    mine = ran[ran["step_costs"] == name]
    others = ran[ran["step_costs"] != name]
    for knob in result.knobs:
        values = list(dict.fromkeys(mine[knob].tolist()))
        if len(others) and not set(values) & set(others[knob].tolist()):
            return f"{knob} {', '.join(map(shown, values))}"
    return ""


def _error(result: SweepResult, rows: pd.DataFrame) -> str:
    """The error to expect of the step costs that the first of these trials was served with."""
    row = record(rows.head(1))
    names = str(row["step_costs"]).split(" and ")  # of a fleet, one for each method
    try:
        scenarios = _scenarios(result, {name: row[name] for name in result.knobs})
        models = [each.step_costs() for each in scenarios]
    except BadInput:  # a calibration's file has gone since
        return ""
    errors = (sentence(costs.expected_error()) for costs in models if costs.name in names)
    return " ".join(dict.fromkeys(errors))
