"""`pagecast calibrate`: learn what steps cost, from recorded runs or from a sweep of this machine's GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.engine import memory_table, open_engine
from pagecast.planner_app.commands.engine_options import EngineOptions, changed_options, engine_gather
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.ignored_options import refuse_options
from pagecast.planner_app.commands.output import Explained
from pagecast.planner_app.commands.screen import show_block, show_notes, table_rows
from pagecast.planner_app.options import Options
from pagecast.planner_app.planner.execution.options import MOST_REPLICATES
from pagecast.planner_app.reports import html_page
from pagecast.planner_app.wording.accuracy import corrections_lines
from pagecast.sim.core.errors import BadInput, Unfinished
from pagecast.sim.costs.calibration.file import MEASURED, Calibration
from pagecast.sim.costs.calibration.option_costs import UNKNOWN, OptionCosts
from pagecast.sim.costs.calibration.shape import CPU
from pagecast.sim.costs.calibration.trust import expected_error
from pagecast.sim.costs.families.registry import family
from pagecast.sim.costs.measured.corrections import Corrections
from pagecast.sim.fitting.build import REPLICATES, CalibrationRun, calibrate
from pagecast.sim.note import Caution
from pagecast.sim.runs.bench_results import read_results
from pagecast.sim.scenario import Scenario
from pydantic import Field
from rich.table import Table

_MOST_REGIONS = 3  # of steps, in the answer
_SPECULATION, _HOST_TIER = "speculative_config", ("kv_offloading_size", "kv_offloading_block_size")
_OF_A_CPU = "these costs are for trying the command out: no GPU to plan for is a CPU"
# Terms whose full description does not fit a line of the table.
_SHORT = {
    "request": "a request in the step: scheduling, sampling, its token",
    "token_after_prompts": "a token in a step with prompts after another such",
    "prompt_step": "a step with prompt chunks: what no one graph runs",
    "decode_after_prompts": "a decode step soon after prompts: root of their tokens",
    "shared_token": "less for a context token that another request reads too",
    "kv_token": "a context token read by decode attention",
    "launch_floor": "launching a step with prompts: the least it takes",
    "light_prompt_tile": "the same of a step with few tokens",
    "prompt_kv_token": "a context token that a prompt chunk reads",
    "prompt_tile": "a tile x key block of prompt attention",
}

_OPTION_WORDS = {
    "lookup_ns": ("n-grams: a request in the step, microseconds", 1e3),
    "lookup_prompt_ns": ("n-grams: more in a step with prompts, microseconds", 1e3),
    "lookup_sd": ("n-grams: how far these may be off, percent", 0.01),
    "load_bytes_per_s": ("loads from host memory, GB/s", 1e9),
    "store_bytes_per_s": ("stores to host memory, GB/s", 1e9),
    "offloading_step_ns": ("host tier: a step, microseconds", 1e3),
    "offloading_block_ns": ("host tier: a block submitted, microseconds", 1e3),
}


class CalibrateOptions(Options):
    """What a calibration is fitted to, runs, results or a sweep of `model`, and where it is written."""

    from_run: tuple[str, ...] = Field(
        default=(),
        description="folder of a recorded run or sweep; FOLDER:0.5 for a run's first half; once for each",
    )
    from_bench: tuple[Path, ...] = Field(
        default=(),
        description="request-level results to correct measured operations by, with --scenario: vllm bench "
        "serve --save-detailed, AIPerf, guidellm, CSV; once for each",
    )
    from_steps: tuple[Path, ...] = Field(
        default=(),
        description="times of single batches to correct step costs by, with --scenario: vllm bench forward "
        "--output-json, or a table fpm_forward_perf of aisimulate onboard; once for each",
    )
    model: str | None = Field(
        default=None,
        description="record a sweep of this model here: transformers folder; with "
        "--random-weights also a name",
    )
    out: Path | None = Field(
        default=None, description="file to write; a sweep's steps go to a folder beside it"
    )
    name: str | None = Field(default=None, description="name of the calibration [the file's]")


class OfBench(Options):
    """What results of a benchmark do not say themselves."""

    scenario: Path | None = Field(
        default=None,
        description="YAML file of the scenario that --from-bench or --from-steps were measured in",
    )
    client_ms: float | None = Field(
        default=None,
        ge=0,
        description="with --from-bench, milliseconds that the client's TTFT and E2E hold beside the "
        "engine's [6.2, and 1.9 per 1,000 prompt tokens]",
    )


class FitOptions(Options):
    """How step costs are fitted to runs, and drawn."""

    plot: Path | None = Field(default=None, description="HTML file to write, of fit against measurement")
    replicates: int = Field(
        default=REPLICATES,
        ge=0,
        le=MOST_REPLICATES,
        description="resampled fits to keep, for intervals",
    )
    seed: int = Field(default=0, description="of the resampling")


_WITHOUT = (
    *("scheduling_policy", "enable_prefix_caching", "async_scheduling"),
    *("kv_offloading_eviction_policy", "offload_prompt_only", "kv_offloading_store_threshold"),
)


@with_options
def calibrate_command(
    ask: CalibrateOptions,
    of_bench: OfBench,
    fit: FitOptions,
    engine: Annotated[EngineOptions, engine_gather(without=_WITHOUT)],
    output: Explained,
) -> None:
    """Fits step costs to recorded runs of one engine, model and GPU, and writes them to a file.

    With --model, the engine first records a sweep of batch shapes on this machine, at both pipeline depths;
    interrupted, it goes on where it stopped. Synchronous runs give the costs; asynchronous ones tell what
    planning ahead hides. With --speculative-config or --kv-offloading-size it records what n-grams or a host
    tier take beyond that as well; with --from-run, runs that had them tell it. With --from-bench, three
    corrections of measured operations are fitted instead: a benchmark's results say when tokens came, and
    little of single steps. With --from-steps they are fitted to times of single batches.
    """
    given = (ask.from_run, ask.model, ask.from_bench, ask.from_steps)
    if [bool(one) for one in given].count(True) != 1:
        raise BadInput(
            "give at least one --from-run FOLDER, --from-bench FILE or --from-steps FILE, or --model to "
            "record a sweep; not both"
        )
    if ask.out is None:
        raise BadInput("give --out FILE.json")
    console.check_place("--out", ask.out)
    if ask.model is None:
        refuse_options(
            changed_options(engine),
            "is for the engine that records a sweep: give --model, or leave it out; runs and results say "
            "themselves what they had",
        )
    name = ask.name or ask.out.stem
    if ask.from_bench:
        reason = "is for recorded runs: results of a benchmark have no steps to draw"
        refuse_options({"plot": fit.plot}, reason)
        _from_bench(ask.from_bench, of_bench, ask.out, name, output)
        return
    if ask.from_steps:
        refuse_options(
            {"client-ms": of_bench.client_ms}, "is for --from-bench: single batches have no client"
        )
        _from_steps(ask.from_steps, of_bench, ask.out, name, output)
        return
    refuse_options(of_bench, "needs --from-bench: recorded runs say themselves what they are of")
    if fit.plot is not None:
        html_page.ready("--plot", fit.plot)
    if ask.model is not None and engine["device"] == "cpu" and not output.json_only:
        console.err.print(f"note: {_OF_A_CPU}", soft_wrap=True)
    folders = ask.from_run or [str(_sweep(ask.model or "", engine, ask.out, output.json_only))]
    sources = [source for folder in folders for source in CalibrationRun.all(folder)]
    try:
        calibration = calibrate(sources, name, replicates=fit.replicates, seed=fit.seed)
    except Unfinished as stopped:
        _tell(stopped.answer, None, output)
        raise typer.Exit(130) from None
    calibration.save(ask.out)
    if fit.plot is not None:
        from pagecast.planner_app.reports.fit_report import fit_page

        html_page.write(fit.plot, fit_page(calibration, sources))
    _tell(calibration, ask.out, output)


def _tell(calibration: Calibration, out: Path | None, output: Explained) -> None:
    if output.json_only:
        console.print_json(as_dict(calibration, out))
    else:
        (show if output.explain else show_answer)(calibration, out)


def as_dict(calibration: Calibration, out: Path | None) -> dict[str, Any]:
    """What was learnt, as plain JSON."""
    return {
        "name": calibration.name,
        "made_for": calibration.made_for,
        "regions": calibration.regions,
        "cross_validation": calibration.cross_validation,
        "options": calibration.options.as_dict(),
        "provenance": calibration.provenance,
        "file": None if out is None else str(out),
    }


def _from_bench(files: Sequence[Path], of_bench: OfBench, out: Path, name: str, output: Explained) -> None:
    """Fits corrections to request-level results and writes them."""
    scenario = _measured_in(of_bench)
    results = [read_results(path, of_bench.client_ms) for path in files]
    from pagecast.sim.fitting.from_bench import REPLAYS, fit_corrections

    with console.progress("replays", REPLAYS * len(results)) as update:
        try:
            corrections = fit_corrections(results, scenario, name, update)
        except Unfinished as stopped:
            _tell_corrections(stopped.answer, None, output)
            raise typer.Exit(130) from None
    _write(corrections, out, output)


def _from_steps(files: Sequence[Path], of_bench: OfBench, out: Path, name: str, output: Explained) -> None:
    """Fits corrections to times of single batches and writes them."""
    from pagecast.sim.fitting.from_steps import fit_steps
    from pagecast.sim.runs.timed_steps import read_timed_steps

    scenario = _measured_in(of_bench)
    measured = [read_timed_steps(path, scenario.tensor_parallel_size) for path in files]
    for note in (note for one in measured for note in one.notes):
        console.err.print(f"note: {note}", soft_wrap=True, markup=False)
    _write(fit_steps(measured, scenario, name), out, output)


def _measured_in(of_bench: OfBench) -> Scenario:
    if of_bench.scenario is None:
        raise BadInput("give --scenario FILE.yaml with model, gpu and the engine's options of the results")
    return Scenario.load(of_bench.scenario)


def _write(corrections: Corrections, out: Path, output: Explained) -> None:
    corrections.save(out)
    _tell_corrections(corrections, out, output)


def _tell_corrections(corrections: Corrections, out: Path | None, output: Explained) -> None:
    if output.json_only:
        file = None if out is None else str(out)
        console.print_json({**asdict(corrections), "sd": list(corrections.sd), "file": file})
        return
    show_block([*corrections_lines(corrections), _taken(out)], rest="--json has every figure")


def _sweep(model: str, options: EngineOptions, out: Path, quiet: bool) -> Path:
    """Records the sweep, or what is missing of it, into the folder beside `out`; returns that folder.

    A plain engine records the sweep, then one with n-grams and one with a host tier what these take.
    """
    folder = out.with_suffix(".sweep")
    for about, each in _engines(options):
        with open_engine(model, each, log_events=True) as engine:
            from pagecast.engine.sweep_record import record_sweep

            if not quiet:
                console.err.print(memory_table(engine.loaded.memory))
            with console.progress(f"recording the sweep{about}, percent", 100) as update:
                record_sweep(engine, folder, partial(_tell_share, update))
    return folder


def _tell_share(update: Callable[[int], None], done: int, total: int) -> None:
    update(100 * done // total)


def _engines(options: EngineOptions) -> Iterator[tuple[str, EngineOptions]]:
    """The options of each engine that records a part of the sweep, and what it is called."""
    plain = {name: value for name, value in options.items() if name not in (*_HOST_TIER, _SPECULATION)}
    yield "", plain
    if options.get(_SPECULATION) is not None:
        yield " with n-grams", plain | {_SPECULATION: options[_SPECULATION]}
    if options.get(_HOST_TIER[0]) is not None:
        yield (
            " with a host tier",
            plain | {"pipeline_depth": 0} | {name: options[name] for name in _HOST_TIER},
        )


def _taken(out: Path | None) -> str:
    if out is None:
        return "interrupted before its errors were known: no file is written"
    return f"written to {out}: --costs {out} takes it"


def show_answer(calibration: Calibration, out: Path | None) -> None:
    """Prints what was fitted, how far it may be off, and what three steps take."""
    lines = [
        _about(calibration),
        *([] if out is None else [_reach(calibration)]),
        _taken(out),
        *table_rows(_errors(calibration.regions[:_MOST_REGIONS])),
        f"a step of {_steps(calibration)}",
    ]
    show_block(lines, _notes(calibration))


def _about(calibration: Calibration) -> str:
    made_for, runs = calibration.made_for, calibration.provenance["runs"]
    engine = f"{made_for['engine']} {made_for['engine_version']}"
    at_once = [run for run in runs if not run.get("asynchronous")]
    fitted = f"fitted to {_steps_of(at_once)}"
    if ahead := [run for run in runs if run.get("asynchronous")]:
        fitted += f"; what planning ahead hides, to {_steps_of(ahead)}"
    return f"{engine}, {made_for['model']} on {made_for['gpu']}: {fitted}"


def _steps_of(runs: list[dict[str, Any]]) -> str:
    steps = console.counted(sum(run["steps"] for run in runs), "step")
    return f"{steps} of {console.counted(len(runs), 'run')}"


def _reach(calibration: Calibration) -> str:
    """How far off the costs are on runs, or parts of a sweep, that were not fitted."""
    left_out = expected_error(calibration).figures["left_out"]
    if not left_out:
        return "no run was left out of the fit, so its error on other runs is unknown: add another --from-run"
    parts = [
        f"{name} that was left out: total step time within {total:.1f}%, the median step within {median:.1f}%"
        for name, (total, median) in left_out.items()
    ]
    return "; ".join(parts)


def _steps(calibration: Calibration) -> str:
    """What steps of few, some and the most tokens take."""
    points = [
        f"{console.counted(tokens, 'token')} takes {console.seconds(ns / 1e9)}"
        for tokens, ns in zip(calibration.knots, calibration.curve_ns, strict=True)
    ]
    return ", one of ".join((points[0], points[len(points) // 2], points[-1]))


def _notes(calibration: Calibration) -> list[str]:
    notes: list[str] = []
    if calibration.host.source == MEASURED:
        notes.append(
            Caution(
                "no run with asynchronous scheduling among them: what planning ahead hides is a lower bound, "
                "and asynchronous replays, the default, will be too slow: add such a run"
            )
        )
    if calibration.made_for["gpu"] == CPU:
        notes.append(Caution(_OF_A_CPU))
    for key, words in (
        ("dropped_terms", "did not lower the error on steps left out"),
        ("absent_terms", "never occur"),
    ):
        if calibration.provenance[key]:
            names = ", ".join(calibration.provenance[key])
            notes.append(f"terms that {words} in these runs: {names}")
    return notes


def show(calibration: Calibration, out: Path | None) -> None:
    """Prints what was learnt, how well it fits, and how well runs forecast each other."""
    console.out.print(_about(calibration), soft_wrap=True)
    console.out.print(_terms(calibration))
    if calibration.options != UNKNOWN:
        console.out.print(_options(calibration.options))
    console.out.print(_errors(calibration.regions, calibration.cross_validation))
    show_notes(_notes(calibration))
    console.out.print(_taken(out), soft_wrap=True)


def _terms(calibration: Calibration) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("cost, microseconds", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True, min_width=12)
    for tokens, value in zip(calibration.knots, calibration.curve_ns, strict=True):
        if tokens in (calibration.knots[0], calibration.knots[-1]) or tokens & (tokens - 1) == 0:
            table.add_row(f"a step of {tokens} tokens: fixed cost and matrix work", f"{value / 1e3:,.1f}")
    for term, value in calibration.terms_ns.items():
        meaning = family(calibration.shape.family).term(term).meaning
        table.add_row(_SHORT.get(term, meaning), f"{value / 1e3:,.3f}")
    return table


def _options(options: OptionCosts) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("n-grams and host tier", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True, min_width=12)
    for name, value in options.as_dict().items():
        words, scale = _OPTION_WORDS[name]
        table.add_row(words, f"{value / scale:,.3f}")
    return table


def _errors(regions: Sequence[dict[str, Any]], left_out: Sequence[dict[str, Any]] = ()) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("error of steps, percent", "steps", "of all time", "total", "median", "p90"):
        is_error = title.startswith("error")
        table.add_column(
            title, justify="left" if is_error else "right", no_wrap=not is_error, overflow="fold"
        )
    rows = [("fit, " + str(row["region"]), row) for row in regions]
    rows += [(f"{row['run']} by the others, {row['steps of']}", row) for row in left_out]
    for title, row in rows:
        table.add_row(
            title,
            f"{row['steps']:,}",
            f"{row['time_percent']:.1f}",
            f"{row['error_percent']:+.2f}",
            f"{row['p50_percent']:.2f}",
            f"{row['p90_percent']:.2f}",
        )
    return table
