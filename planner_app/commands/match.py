"""`pagecast match`: a measurement beside its forecast, and what explains that they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.output import Explained
from pagecast.planner_app.commands.scenario_options import GivenScenario, ScenarioOnly, started
from pagecast.planner_app.commands.screen import LINES, folded, show_block, show_notes, table_rows
from pagecast.planner_app.options import Options
from pagecast.planner_app.wording.accuracy import corrections_lines
from pagecast.planner_app.wording.server_figures import figure, percent, title, verdict
from pagecast.sim.core.errors import BadInput, Unfinished
from pagecast.sim.costs.calibration.file import own_folder
from pagecast.sim.costs.measured.corrections import read_corrections
from pagecast.sim.fitting.explain import WARM, Explanation, Fact, Setup, distance, warmed
from pagecast.sim.fitting.match import MATCHING, Match, match
from pagecast.sim.note import Caution
from pagecast.sim.replay.simulation import replay
from pagecast.sim.runs.bench_results import BenchResults, model_named, read_results
from pagecast.sim.runs.forecast import scenario_of
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.server_forecast import forecast_of_metrics
from pagecast.sim.runs.server_metrics import ServerFigures, read_metrics
from pagecast.sim.scenario import Scenario
from pagecast.traces.shared_prefix import most_hits, with_hit_rate
from pydantic import Field
from rich.table import Table

_OF_SERVER = ("hit_rate", "preemptions")  # what metrics add to a benchmark's results
_ALL_FOUND = 0.9  # of the most that prompts can hit: all of them were in the cache before
_MORE_FOUND = 0.1  # hits beyond those of an empty cache
_MOST_ROWS = 6  # of figures, in the answer
_SAME_FACTOR = 5e-4  # by which a factor of step times must differ from 1 to be one
_SAME_S = 5e-6  # seconds that a step must take longer
_UNCHANGED = "no calibration is written: step times need no correction"
_STOPPED = "interrupted: other explanations were not tried, and no calibration is written"
_SAME_BLOCKS = 0.02  # predictions of KV blocks are as close
_WORSE = 5.0  # percent of a figure by which a calibration may be further off without a word


class MatchOptions(Options):
    """What was measured, and where the calibration goes."""

    results: Path | None = Field(
        default=None,
        description="results of a benchmark with its requests, or the folder of a recorded run",
    )
    metrics: tuple[Path, ...] = Field(
        default=(),
        description="metrics of the server: a range query's JSON, or dumps of /metrics in order of time",
    )
    seconds: float | None = Field(
        default=None, gt=0, description="from the first dump of metrics to the last"
    )
    run: int | None = Field(default=None, description="of results with several runs, the one to match")
    column: tuple[str, ...] = Field(
        default=(), description="what a column of a table of results is called, as arrival=timestamp"
    )
    client_ms: float | None = Field(
        default=None,
        ge=0,
        description="milliseconds that the client's TTFT and E2E hold beside the engine's [6.2, and 1.9 per "
        "1,000 prompt tokens]",
    )
    name: str | None = Field(
        default=None, description="name of the calibration, which --costs takes then [the results']"
    )
    out: Path | None = Field(default=None, description="file to write the calibration to, in place of a name")


@with_options
def match_command(arguments: ScenarioOnly, ask: MatchOptions, output: Explained) -> None:
    """Sets a measurement beside its forecast, tells what explains the difference, and writes a calibration.

    The scenario is that of the start script (--launch), of the start-up log (--log), or given by options.
    Each explanation (host, kernels, tokens of a step, KV blocks, a warm cache, the client) is tried in the
    simulator. The calibration is then one of the --costs of replay, plan, sweep and the dashboard.
    """
    if ask.results is None and not ask.metrics:
        raise BadInput("give --results FILE of a benchmark, --metrics FILE of the server, or both")
    if ask.out is not None:
        console.check_place("--out", ask.out)
    arguments = _with_model(ask, arguments)
    scenario, notes = _scenario(ask, arguments)
    if not _names_gpu(ask, arguments):
        notes += (Caution(f"no --gpu was given: the forecast is of {scenario.gpu}, the default"),)
    stated = scenario if arguments.log is None else started(arguments, measured=False)[0]
    server = read_metrics(*ask.metrics, seconds=ask.seconds) if ask.metrics else None
    scenario = _as_told(scenario, stated, server, arguments)
    if ask.results is None:
        assert server is not None
        _metrics_alone(server, scenario, notes, output)
        return
    results = read_results(ask.results, ask.client_ms, run=ask.run, columns=ask.column)
    results, more, cold = _with_server(results, server, scenario)
    facts = _facts(Setup(scenario, scenario.step_costs(), results), stated, arguments, cold)
    logged = bool(_of_log(arguments))
    known = {
        "blocks": _blocks(server, stated, arguments) is not None,
        "warm": _hits(server) is not None,
        "chunk": logged,
        "ahead": logged,
    }
    name = ask.name or (ask.out.stem if ask.out is not None else results.name)
    where = _place(ask.out or own_folder() / f"{name}.json")
    complete = True
    with console.progress("replays", MATCHING) as update:
        try:
            found = match(
                results,
                scenario,
                name,
                measured=_of_server(server, scenario, arguments),
                facts=facts,
                known=[cause for cause, told in known.items() if told],
                progress=update,
            )
        except Unfinished as stopped:
            found, complete = stopped.answer, False
    file = where if _changes(found) else None
    if file is not None:
        found.corrections.save(file)
    notes += more
    if output.json_only:
        told = {"notes": list(notes), "file": None if file is None else str(file), "complete": complete}
        console.print_json({**as_dict(found), **told})
    else:
        taken = _UNCHANGED if file is None else f"written to {file}: --costs {ask.out or name} takes it"
        (_show_all if output.explain else show_answer)(found, notes, taken if complete else _STOPPED)
    if not complete:
        raise typer.Exit(130)


def _show_all(found: Match, notes: Sequence[str], taken: str) -> None:
    show_notes(notes)
    show(found)
    console.out.print(taken, soft_wrap=True)


def _place(path: Path) -> Path:
    """Where the calibration goes. Errors: BadInput where the file there is something else."""
    if path.exists() and read_corrections(path) is None:
        raise BadInput(f"{path}: is there, and no calibration of this kind; give another --name or --out")
    return path


def _with_model(ask: MatchOptions, arguments: GivenScenario) -> GivenScenario:
    """The options with the model that the results name, where nothing else names one."""
    starts = arguments.starts
    named = arguments.scenario is not None or "model" in arguments.fields
    if named or ask.results is None or any("model" in start.fields for start in starts):
        return arguments
    if ask.results.is_dir():
        if not starts:
            return arguments  # the run is the scenario
        model: str | None = scenario_of(RecordedRun.load(ask.results), "roofline").model
    else:
        model = model_named(ask.results)
    if model is None:
        return arguments
    return replace(arguments, fields={**arguments.fields, "model": model})


def _scenario(ask: MatchOptions, arguments: GivenScenario) -> tuple[Scenario, tuple[str, ...]]:
    """The scenario given; a recorded run's own, where none is."""
    alone = arguments.scenario is None and arguments.launch is None and arguments.log is None
    if alone and ask.results is not None and ask.results.is_dir():
        scenario = scenario_of(RecordedRun.load(ask.results), arguments.fields.get("costs", "auto"))
        return scenario.changed(**arguments.fields), ()
    return started(arguments)


def _names_gpu(ask: MatchOptions, arguments: GivenScenario) -> bool:
    """Whether the GPU is known from what was given, and not the default."""
    if "gpu" in arguments.fields or arguments.scenario is not None:
        return True
    recorded = not arguments.starts and ask.results is not None and ask.results.is_dir()
    return recorded or any("gpu" in start.fields for start in arguments.starts)


def _as_told(
    scenario: Scenario, stated: Scenario, server: ServerFigures | None, arguments: GivenScenario
) -> Scenario:
    """The scenario with KV blocks and tokens of a step as log and metrics tell them, whatever was stated."""
    told = {"num_gpu_blocks": _blocks(server, stated, arguments), **_of_log(arguments)}
    return scenario.changed(**{name: value for name, value in told.items() if value is not None})


def _of_log(arguments: GivenScenario) -> dict[str, int]:
    fields = {} if arguments.log is None else arguments.log.fields
    return {name: fields[name] for name in ("max_num_batched_tokens",) if name in fields}


def _with_server(
    results: BenchResults, server: ServerFigures | None, scenario: Scenario
) -> tuple[BenchResults, tuple[str, ...], BenchResults | None]:
    """The results with prompts that give the server's hit rate, notes, and the results as they were stated.

    The last is there where all prompts were found in the cache. Where results have lengths alone, prompts
    share one beginning.
    """
    rate = _hits(server)
    if rate is None:
        text = (
            "the results have no contents of prompts: the hit rate is unknown, and counted as 0; --metrics "
            "of the server tell it"
        )
        return results, (text,) if results.trace.lengths_only else (), None
    if scenario.enable_prefix_caching and rate >= _ALL_FOUND * most_hits(
        results.trace, scenario.block_tokens
    ):
        cold = replay(results.trace, scenario).summary["token_hit_rate"] or 0.0
        if rate > cold + _MORE_FOUND:
            # Prompts of unknown contents are parts of one text: what they share, all of it was in the cache.
            trace = results.trace
            if trace.lengths_only:
                trace = with_hit_rate(trace, 1.0, block_tokens=scenario.block_tokens, even=True)
            return warmed(replace(results, trace=trace)), (), results
    if not results.trace.lengths_only:
        return results, (), None
    # What is shared, latencies tell: as much of each prompt, or a share of it.
    ways = [
        replace(
            results, trace=with_hit_rate(results.trace, rate, block_tokens=scenario.block_tokens, even=even)
        )
        for even in (True, False)
    ]
    costs = scenario.step_costs()
    results = min(ways, key=lambda way: distance(Setup(scenario, costs, way))) if rate else ways[0]
    return results, (results.trace.notes[-1],), None


def _facts(
    base: Setup, stated: Scenario, arguments: GivenScenario, cold: BenchResults | None
) -> tuple[Fact, ...]:
    """Differences from what was stated, as log and metrics tell them."""
    facts = []
    own, blocks = stated.limits().num_blocks, base.scenario.limits().num_blocks
    if abs(own / blocks - 1) > _SAME_BLOCKS:
        other = base.scenario.changed(num_gpu_blocks=own)
        words = f"{blocks:,} KV blocks, as the server says, not {own:,}"
        facts.append(Fact("blocks", float(blocks), words, replace(base, scenario=other)))
    stating = arguments.launch or arguments.scenario or "max_num_batched_tokens" in arguments.fields
    if _of_log(arguments) and stating:
        said = started(replace(arguments, log=None))[0].max_num_batched_tokens
        tokens = base.scenario.max_num_batched_tokens
        if said != tokens:
            other = base.scenario.changed(max_num_batched_tokens=said)
            words = f"steps of {tokens:,} tokens, as the log says, not {said:,}"
            facts.append(Fact("chunk", float(tokens), words, replace(base, scenario=other)))
    if cold is not None:
        words = f"{WARM}: the server found almost all of them there"
        facts.append(Fact("warm", 1.0, words, replace(base, results=cold)))
    return tuple(facts)


def _hits(server: ServerFigures | None) -> float | None:
    return None if server is None else server.figures.get("hit_rate")


def _blocks(server: ServerFigures | None, scenario: Scenario, arguments: GivenScenario) -> int | None:
    """The KV blocks that log or metrics tell."""
    blocks = arguments.log.blocks(scenario) if arguments.log is not None else None
    return server.num_blocks if blocks is None and server is not None else blocks


def _of_server(
    server: ServerFigures | None, scenario: Scenario, arguments: GivenScenario
) -> dict[str, float]:
    """What is known of the server beside latencies: KV blocks, as measured, and hits."""
    known: dict[str, float] = {}
    if server is not None:
        known |= {name: server.figures[name] for name in _OF_SERVER if name in server.figures}
    blocks = _blocks(server, scenario, arguments)
    return known if blocks is None else {"num_gpu_blocks": float(blocks), **known}


def _metrics_alone(
    server: ServerFigures, scenario: Scenario, notes: tuple[str, ...], output: Explained
) -> None:
    """Metrics without results: means beside a forecast at the same load."""
    ours = forecast_of_metrics(server, scenario)
    rows = {name: (value, ours.get(name)) for name, value in server.figures.items()}
    if output.json_only:
        body = {name: {"measured": real, "forecast": value} for name, (real, value) in rows.items()}
        console.print_json({"figures": body, "notes": [*notes, *server.notes]})
        return
    table = _table("", "measured", "forecast", "error")
    errors: dict[str, float] = {}
    for name, (real, value) in rows.items():
        error = None if value is None or not real else 100 * (value / real - 1)
        errors |= {} if error is None else {name: error}
        table.add_row(title(name), figure(name, real), figure(name, value), percent(error))
    alone = "metrics have means alone, which no explanation is told from: --results of a benchmark do"
    lines = [verdict(errors.items()), *table_rows(table)[: LINES - 4]]
    show_block(lines, [alone, *notes, *server.notes], rest="--json has every figure")


def as_dict(found: Match) -> dict[str, Any]:
    """The match as plain JSON."""
    best = found.explained.told or found.explained.best
    return {
        "name": found.name,
        "figures": {
            row.name: {
                "measured": row.measured,
                "forecast": row.forecast,
                "matched": row.matched,
                "errors_percent": list(row.errors_percent),
            }
            for row in found.rows
        },
        "explanation": None
        if best is None
        else {"cause": best.cause, "size": best.size, "words": best.words},
        "explanations": [
            {"cause": one.cause, "size": one.size, "words": one.words, "distance": one.distance}
            for one in (*found.explained.facts, *found.explained.tried)
        ],
        "distance": found.explained.stated,
        "corrections": asdict(found.corrections),
    }


def _changes(found: Match) -> bool:
    """Whether the calibration changes any step: where it does not, there is none to take."""
    fitted = found.corrections
    factors = (fitted.decode, fitted.prompt)
    return abs(fitted.step_s) >= _SAME_S or any(abs(factor - 1) >= _SAME_FACTOR for factor in factors)


def show_answer(found: Match, notes: Sequence[str], taken: str) -> None:
    """Prints whether the forecast agrees, what explains that it does not, and the figures side by side."""
    lines = [
        verdict((row.name, row.errors_percent[0]) for row in found.rows),
        *_explanation(found)[:2],
        *table_rows(_figures(found, _MOST_ROWS)),
    ]
    show_block([*lines, *_worse(found), taken], notes)


def _worse(found: Match) -> list[str]:
    """The figure that the calibration takes furthest from the measurement, if any."""
    if not _changes(found):
        return []
    further = [
        (
            abs(after) - abs(before),
            f"{title(row.name)} is further off: {percent(after)} for {percent(before)}",
        )
        for row in found.rows
        for before, after in [row.errors_percent]
        if before is not None and after is not None
    ]
    most, words = max(further, default=(0.0, ""))
    return [f"with the calibration {words}"] if most > _WORSE else []


def _figures(found: Match, most: int | None = None) -> Table:
    """Measurement and forecast, and where there is a calibration the forecast with it."""
    changes = _changes(found)
    table = _table("", "measured", "forecast", "error", *(("corrected", "error") if changes else ()))
    for row in found.rows[:most]:
        before, after = row.errors_percent
        values = (figure(row.name, value) for value in (row.measured, row.forecast, row.matched))
        real, ours, matched = values
        more = (matched, percent(after)) if changes else ()
        table.add_row(title(row.name), real, ours, percent(before), *more)
    return table


def show(found: Match) -> None:
    """Prints whether the forecast agrees, the figures and the explanations."""
    for part in folded(verdict((row.name, row.errors_percent[0]) for row in found.rows)):
        console.out.print(part, soft_wrap=True)
    console.out.print(_figures(found))
    for line in [*_explanation(found), *_worse(found)]:
        console.out.print(line, soft_wrap=True, markup=False, highlight=False)
    for line in corrections_lines(found.corrections)[1:]:
        console.out.print(line, soft_wrap=True, markup=False, highlight=False)


def _explanation(found: Match) -> list[str]:
    explained, told, best = found.explained, found.explained.told, found.explained.best
    if explained.begun is False:
        return []
    lines = []
    if told is not None:
        lines.append(f"explained by: {told.words}; that takes {_taken(told, explained.stated)} away")
        others = [one.words for one in explained.facts if one is not told]
        lines += [f"told as well: {words}" for words in others]
    if best is not None:
        how = "explained by" if told is None else "what is left is explained by"
        lines.append(f"{how}: {best.words}; that takes {_taken(best, explained.distance)} away")
        if explained.near:
            lines.append(f"as likely: {'; '.join(one.words for one in explained.near)}")
    if not lines and explained.tried:
        left, whole = f"{explained.distance:.1%}", f"{explained.stated:.1%}"
        corrected = (
            "" if left == whole else f"; with step costs corrected a request is off by {left}, not {whole}"
        )
        lines.append(f"no setting explains the difference{corrected or f', {whole} a request'}")
    if not lines:
        lines.append(f"the difference ({explained.stated:.1%} a request) needs no explanation")
    return lines


def _taken(one: Explanation, distance: float) -> str:
    return f"{1 - one.distance / distance:.0%} of the difference"


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, one in enumerate(titles):
        table.add_column(one, justify="right" if number else "left", no_wrap=True)
    return table
