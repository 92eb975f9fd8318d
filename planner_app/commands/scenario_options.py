"""The options that commands share: every field of a scenario by its name, and how a trace is read.

    @with_options
    def plan_command(arguments: WorkArguments, ask: PlanOptions) -> None:
        work, scenario = load(arguments)

`WorkArguments` stands for a trace, one option per field of `Scenario` and of `Load`, and those for reading a
trace. A field that `Scenario` or `Load` gains is an option of every command.
"""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pagecast.planner_app.commands.field_options import (
    Gather,
    field_option,
    model_options,
    parameter,
    scenario_fields,
)
from pagecast.planner_app.commands.ignored_options import refuse_options
from pagecast.planner_app.commands.load_options import load_options
from pagecast.planner_app.commands.reading import LoadOptions, read_with_progress
from pagecast.planner_app.planner.load_fields import load_fields, make_load
from pagecast.sim.core.errors import BadInput
from pagecast.sim.note import Caution
from pagecast.sim.scenario import Scenario
from pagecast.traces.bundled import sample_names
from pagecast.traces.load import Load
from pagecast.traces.operations import scale
from pagecast.traces.schema import Trace
from pagecast.traces.shared_prefix import assume_reuse

if TYPE_CHECKING:
    from pagecast.planner_app.launch.launch import Launch
    from pagecast.planner_app.launch.startup_log import StartupLog

Opt = typer.Option
_LEAST_OF_RATE = 0.75  # less of the rate that was asked for gets a note
_TRACE = parameter(
    "trace",
    str | None,
    typer.Argument(
        help="trace file of any known format, a sample's name, or a folder of replay --out; "
        "without it, requests are made: --input-len, --output-len",
        show_default=False,
    ),
    None,
)


@dataclass(frozen=True, slots=True)
class GivenScenario:
    """Options of the command line: a scenario file, fields that replace its own, and the work.

    `trace` is read as `reading` says and sent as `load` says; None: `load` makes requests. `launch`: a start
    of an engine, whose fields replace the file's. `log`: one that has taken place, which replaces those in
    turn.
    """

    scenario: Path | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    reading: LoadOptions = field(default_factory=lambda: LoadOptions())
    launch: Launch | None = None
    log: StartupLog | None = None
    trace: str | None = None
    load: Load = field(default_factory=Load)

    @property
    def starts(self) -> list[Launch | StartupLog]:
        """The launch and the log, as far as they were given."""
        return [start for start in (self.launch, self.log) if start is not None]

    @classmethod
    def of(cls, given: dict[str, Any]) -> GivenScenario:
        """From the options that were given."""
        fields = {name: value for name, value in given.items() if name in scenario_fields()}
        reading = {name: value for name, value in given.items() if name in LoadOptions.model_fields}
        of_load = {name: value for name, value in given.items() if name in load_fields()}
        scenario, launch, log = (given.get(name) for name in ("scenario", "launch", "log"))
        return cls(
            scenario,
            fields,
            LoadOptions(**reading),
            launched(launch),
            logged(log),
            given.get("trace"),
            make_load(of_load),
        )


def command_line(command: str, given: GivenScenario, point: Mapping[str, Any]) -> str:
    """The command that serves the same work with the fields of `point`; empty where a start script or a log
    gave fields."""
    if given.launch is not None or given.log is not None:
        return ""
    reading = {name: getattr(given.reading, name) for name in given.reading.model_fields_set}
    words = ["pagecast", command, *([] if given.trace is None else [given.trace])]
    words += [] if given.scenario is None else ["--scenario", str(given.scenario)]
    for name, value in {**given.fields, **reading, **given.load.given(), **point}.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{option}")
        elif value is not None:
            for each in value if isinstance(value, list | tuple) else (value,):
                words += [f"--{option}", f"{each:g}" if isinstance(each, float) else str(each)]
    return shlex.join(words)


ABOUT_LAUNCH = (
    "the start of an engine, whose options become the scenario's: a command (vllm serve MODEL ...), "
    "@FILE of a start script or a manifest, or @FILE#NAME of one of its containers; options given here win"
)


ABOUT_LOG = (
    "an engine's start-up log, or a folder of them: its options and KV blocks become the scenario's, and "
    "notes say where our own prediction differs"
)


def start_options() -> list[inspect.Parameter]:
    """`--launch` and `--log`."""
    return [
        parameter("launch", str | None, Opt(help=ABOUT_LAUNCH), None),
        parameter("log", str | None, Opt(help=ABOUT_LOG), None),
    ]


def launched(text: str | None) -> Launch | None:
    """What `--launch` gives; None where it is not given. Errors: BadInput."""
    if text is None:
        return None
    from pagecast.planner_app.launch.launch import read_launch

    return read_launch(text)


def logged(path: str | None) -> StartupLog | None:
    """What `--log` gives; None where it is not given. Errors: BadInput."""
    if path is None:
        return None
    from pagecast.planner_app.launch.startup_log import read_log

    return read_log(path)


def scenario_options(kind: type[Scenario] = Scenario) -> list[inspect.Parameter]:
    """`--scenario`, `--launch`, `--log`, and one option per field of a scenario."""
    about = "YAML file of scenario fields; options given here win"
    fields = [field_option(name, info) for name, info in scenario_fields(kind).items()]
    return [parameter("scenario", Path | None, Opt(help=about), None), *start_options(), *fields]


ScenarioOnly = Annotated[GivenScenario, Gather(scenario_options(), GivenScenario.of)]
WorkArguments = Annotated[
    GivenScenario,
    Gather([_TRACE, *scenario_options(), *model_options(LoadOptions), *load_options()], GivenScenario.of),
]


def started(arguments: GivenScenario, *, measured: bool = True) -> tuple[Scenario, tuple[str, ...]]:
    """The file's scenario, or the default one, with what was given, and notes on a launch and a log.

    `measured`: with the KV blocks of the log. Errors: BadInput.
    """
    log, starts = arguments.log, arguments.starts
    fields: dict[str, Any] = {}
    for start in starts:
        fields |= start.fields
    fields |= arguments.fields
    if arguments.scenario is not None:
        scenario = Scenario.load(arguments.scenario, **fields)
    else:
        scenario = Scenario.make(fields, starts[-1].where if starts else "options")
    notes = [*_replaced(starts, arguments.fields), *(note for start in starts for note in start.notes)]
    if log is None:
        return scenario, tuple(notes)
    if arguments.scenario is None and "model" not in fields:
        raise BadInput(f"{log.where}: the log names no model; give --model")
    if arguments.scenario is None and "gpu" not in fields:
        notes.append(f"{log.where}: the log names no GPU; {scenario.gpu} is taken, so give --gpu")
    with_blocks = log.measured(scenario)
    notes += log.compared(scenario)
    own = "num_gpu_blocks" in arguments.fields or not measured
    return scenario if own else with_blocks, tuple(notes)


def _replaced(starts: Sequence[Launch | StartupLog], fields: Mapping[str, Any]) -> list[Caution]:
    """A note for each start on its fields that are given other values beside it, which win."""
    notes = []
    for start in starts:
        options = {name: f"--{name.replace('_', '-')}" for name in fields}
        changed = [
            f"{options[name]} {start.fields[name]} (here {value})"
            for name, value in fields.items()
            if name in start.fields and start.fields[name] != value
        ]
        if changed:
            notes.append(Caution(f"{start.where}: not as it is started: {', '.join(changed)}"))
    return notes


def load(
    arguments: GivenScenario, *, reach: Callable[[Trace, float], Trace] | None = None
) -> tuple[Trace, Scenario]:
    """Reads or makes the trace, and reads the scenario; of a folder that `replay --out` wrote, both.

    `reach` as in `trace_of`. Errors: BadInput.
    """
    trace, scenario, notes = unsent(arguments, reach=reach)
    sending = arguments.load
    if trace is None:
        trace = _made(scenario, arguments.reading, sending)
    else:
        trace = sending.sent(trace, scenario.seed)
    return replace(trace, notes=(*notes, *trace.notes)) if notes else trace, scenario


def unsent(
    arguments: GivenScenario, *, reach: Callable[[Trace, float], Trace] | None = None
) -> tuple[Trace | None, Scenario, tuple[str, ...]]:
    """The trace as it is read (None: the load makes requests), the scenario, and notes on a launch and a log.

    Errors: BadInput.
    """
    name = arguments.trace
    folder = Path(name or "")
    if name is not None and name not in sample_names() and os.path.isfile(folder / "trace.parquet"):
        beside = folder / "scenario.yaml"
        if arguments.scenario is None and beside.is_file():
            arguments = replace(arguments, scenario=beside)
        name = str(folder / "trace.parquet")
    scenario, notes = started(arguments)
    return None if name is None else _read(name, scenario, arguments.reading, reach), scenario, notes


def trace_of(
    name: str | None,
    scenario: Scenario,
    options: LoadOptions,
    sending: Load,
    *,
    reach: Callable[[Trace, float], Trace] | None = None,
) -> Trace:
    """Reads a trace as the options say, scales its arrivals, and has its requests sent as the load says.

    Without a name the load makes the requests. `reach` gives a trace the rate that is asked for; by default
    its arrivals are scaled, and it gets a note where that is not enough. Errors: BadInput.
    """
    if name is None:
        return _made(scenario, options, sending)
    return sending.sent(_read(name, scenario, options, reach), scenario.seed)


def _read(
    name: str, scenario: Scenario, options: LoadOptions, reach: Callable[[Trace, float], Trace] | None
) -> Trace:
    """A trace as the options say, its arrivals scaled. Errors: BadInput."""
    speedup, rate = options.speedup, options.rate
    if not 0 < speedup < float("inf"):
        raise BadInput(f"--speedup is {speedup}; it must be above 0")
    if rate is not None and not 0 < rate < float("inf"):
        raise BadInput(f"--rate is {rate}; it must be above 0, in requests per second")
    if rate is not None and speedup != 1:
        raise BadInput(f"--rate {rate:g} and --speedup {speedup:g} both set the load; give one of them")
    trace = read_with_progress(name, options, seed=scenario.seed)
    if options.assume_reuse is not None:
        trace = assume_reuse(trace, options.assume_reuse, block_tokens=scenario.block_tokens)
    if rate is not None:
        trace = (reach or _at_rate)(trace, rate)
    elif speedup != 1:
        trace = scale(trace, speedup)
    return trace


def _made(scenario: Scenario, options: LoadOptions, made: Load) -> Trace:
    """The requests that a load makes. Errors: BadInput where it makes none, or options are for a trace."""
    if not made.makes:
        raise BadInput(
            "give a trace (a file, or a sample's name), or requests to make: --input-len, --output-len"
        )
    instead = "" if options.rate is None else "; --request-rate says how often made requests come"
    refuse_options(options, f"is for a trace that is read: leave it out, or give a trace{instead}")
    return made.trace(scenario.seed)


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
