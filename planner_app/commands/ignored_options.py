"""Refusal of options that would have no effect beside others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pagecast.planner_app.options import Options
from pagecast.planner_app.planner.execution.options import Drawn
from pagecast.planner_app.planner.sweep.space import knob_name
from pagecast.sim.core.errors import BadInput


def refuse_options(
    values: Options | Mapping[str, object], reason: str, *, beyond: type[Options] | None = None
) -> None:
    """Refuses the options that are given: of a model, all of them, or those `beyond` another model's.

    `values` may be what options have by their names without dashes, None where one is not given. `reason`:
    why they have no effect, and what to do. Errors: BadInput, `--NAME REASON`.
    """
    if isinstance(values, Options):
        given = values.given(beyond)
    else:
        given = [f"--{name}" for name, value in values.items() if value is not None]
    if len(given) == 1:
        raise BadInput(f"{given[0]} {reason}")
    if given:
        raise BadInput(f"{', '.join(given[:-1])} and {given[-1]}: each {reason}")


def refuse_without_draws(drawn: Drawn) -> None:
    """Errors: BadInput where nothing is drawn, and an option says how."""
    if not drawn.replicates:
        given = {"fixed-workload": drawn.fixed_workload or None}
        refuse_options(given, "is for the draws behind intervals: give --replicates N as well")


def refuse_set_twice(option: str, settings: Iterable[str], fixed: Mapping[str, object]) -> None:
    """Errors: BadInput for a field that is given a value, and by `option` several."""
    for text in settings:
        name = knob_name(text)
        given = {name.replace("_", "-"): fixed.get(name)}
        refuse_options(given, f"is what {option} {text} varies: leave one of them out")
