"""The options that commands share: every field of a scenario by its name, and how a trace is read.

    @with_scenario
    def plan_command(trace: TraceArgument, arguments: ScenarioArguments, slo: ... = "") -> None:
        work, scenario = load(trace, arguments)

A command declares `arguments: ScenarioArguments`; the decorator puts one option for each field of `Scenario`,
and those for reading a trace, in its place. A field that `Scenario` gains is an option of every command.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pagecast.planner_app.commands.field_options import field_option, gathering, parameter
from pagecast.planner_app.commands.trace_view import read_with_progress
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario
from pagecast.traces.bundled import sample_names
from pagecast.traces.operations import scale
from pagecast.traces.schema import Trace

Opt = typer.Option
_LEAST_OF_RATE = 0.75  # less of the rate that was asked for gets a note
TraceArgument = Annotated[
    str, typer.Argument(help="trace file of any known format, a sample's name, or a folder of replay --out")
]


@dataclass(frozen=True, slots=True)
class ScenarioArguments:
    """Options of the command line: a scenario file, fields that replace its own, and reading options."""

    scenario: Path | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    reading: dict[str, Any] = field(default_factory=dict)


def _reading(
    speedup: Annotated[
        float, Opt(help="divide arrival times by this: 2 doubles the load; think times stay")
    ] = 1.0,
    rate: Annotated[
        float | None,
        Opt(
            help="scale arrival times to this many requests per second: all requests of the sessions that "
            "start in a second, as plan counts the trace's own; think times stay; not with --speedup"
        ),
    ] = None,
    limit: Annotated[int | None, Opt(help="read only the first N requests")] = None,
    sort: Annotated[bool, Opt("--sort", help="put requests out of order in order of arrival")] = False,
    tokenizer: Annotated[Path | None, Opt(help="transformers folder, for traces that hold texts")] = None,
    session_rate: Annotated[
        float | None, Opt(help="sessions per second, for traces that have no absolute times")
    ] = None,
) -> None:
    """The options of reading a trace, as a signature."""


def scenario_options(kind: type[Scenario] = Scenario) -> list[inspect.Parameter]:
    """`--scenario`, and one option per field of a scenario."""
    about = "YAML file of scenario fields; options given here win"
    fields = [field_option(name, info) for name, info in kind.flat_fields().items()]
    return [parameter("scenario", Path | None, Opt(help=about), None), *fields]


_READING = list(inspect.signature(_reading, eval_str=True).parameters.values())


def _scenario_arguments(values: dict[str, Any]) -> ScenarioArguments:
    fields = {name: values[name] for name in Scenario.flat_fields() if values[name] is not None}
    return ScenarioArguments(values["scenario"], fields, {one.name: values[one.name] for one in _READING})


with_scenario = gathering("arguments", [*scenario_options(), *_READING], _scenario_arguments)
"""Puts the shared options in the place of the parameter `arguments` of a command."""


def scenario_from(arguments: ScenarioArguments) -> Scenario:
    """The file's scenario, or the default one, with the options that were given. Errors: BadInput."""
    if arguments.scenario is not None:
        return Scenario.load(arguments.scenario, **arguments.fields)
    return Scenario.make(arguments.fields, "options")


def trace_from(name: str, scenario: Scenario, arguments: ScenarioArguments) -> Trace:
    """Reads a trace as the options say. Errors: BadInput."""
    return load_trace(name, scenario, **arguments.reading)


def load(
    name: str, arguments: ScenarioArguments, *, reach: Callable[[Trace, float], Trace] | None = None
) -> tuple[Trace, Scenario]:
    """Reads the trace and the scenario; of a folder that `replay --out` wrote, both. Errors: BadInput.

    `reach` as in `load_trace`.
    """
    folder = Path(name)
    if name not in sample_names() and os.path.isfile(folder / "trace.parquet"):
        beside = folder / "scenario.yaml"
        if arguments.scenario is None and beside.is_file():
            arguments = ScenarioArguments(beside, arguments.fields, arguments.reading)
        name = str(folder / "trace.parquet")
    scenario = scenario_from(arguments)
    return load_trace(name, scenario, reach=reach, **arguments.reading), scenario


def load_trace(
    name: str,
    scenario: Scenario,
    *,
    speedup: float = 1.0,
    rate: float | None = None,
    reach: Callable[[Trace, float], Trace] | None = None,
    **options: Any,
) -> Trace:
    """Reads a trace with `read`'s options, and scales its arrivals by `speedup` or to `rate`.

    `rate` is in requests per second: all requests of the sessions that start in a second, as `plan` counts
    the trace's own. `reach` gives a trace that rate; by default its arrivals are scaled, and it gets a note
    where that is not enough. Errors: BadInput.
    """
    if not 0 < speedup < float("inf"):
        raise BadInput(f"--speedup is {speedup}; it must be above 0")
    if rate is not None and not 0 < rate < float("inf"):
        raise BadInput(f"--rate is {rate}; it must be above 0, in requests per second")
    if rate is not None and speedup != 1:
        raise BadInput(f"--rate {rate:g} and --speedup {speedup:g} both set the load; give one of them")
    trace = read_with_progress(name, seed=scenario.seed, **options)
    if rate is not None:
        return (reach or _at_rate)(trace, rate)
    return trace if speedup == 1 else scale(trace, speedup)


def _at_rate(trace: Trace, rate: float) -> Trace:
    """The trace scaled to a rate, with a note where pauses in its sessions leave it far from that."""
    from pagecast.planner_app.planner.capacity.users import at_rate, requests_per_s_of_all

    faster = at_rate(trace, rate)
    arriving = requests_per_s_of_all(faster)
    if arriving >= _LEAST_OF_RATE * rate:
        return faster
    note = (
        f"--rate {rate:g} is not reached: sessions begin as often as that takes, but pause, and the trace "
        f"ends before enough of them are under way. {arriving:.3g} requests per second arrive on average. A "
        "trace with more sessions comes closer; plan repeats the trace until it lasts"
    )
    return replace(faster, notes=(*faster.notes, note))
