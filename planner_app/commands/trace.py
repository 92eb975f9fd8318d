"""`pagecast trace`: look at traces, convert and cut them, generate new ones, take a bundled sample."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.ignored_options import refuse_options
from pagecast.planner_app.commands.output import Output
from pagecast.planner_app.commands.reading import AnyReadOptions, read_with_progress
from pagecast.planner_app.commands.trace_generate import LOSSY, generate_command
from pagecast.planner_app.commands.trace_view import describe_and_show, written
from pagecast.planner_app.options import Options
from pagecast.sim.core.errors import BadInput
from pagecast.traces import operations
from pagecast.traces.bundled import sample_names
from pagecast.traces.read import read
from pagecast.traces.write import FORMS, write
from pydantic import Field
from rich.table import Table

Arg = typer.Argument
app = typer.Typer(
    help="Look at traces, convert and cut them, generate new ones.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command("generate", short_help="Makes a trace from distributions, or of ServeGen's clients")(
    generate_command
)

TraceName = Annotated[
    str,
    Arg(help="trace file of any known format, a sample's name, a recorded run, or folder of replay --out"),
]


class ConvertOptions(Options):
    """How a trace is cut, mixed and scaled, and written."""

    form: str | None = Field(default=None, description=f"{', '.join(FORMS)} [by OUT's ending]")
    lossy: bool = LOSSY
    mix: tuple[str, ...] = Field(
        default=(), description="another trace to play at the same time; may be repeated"
    )
    scale: float | None = Field(default=None, description="make requests come this many times as often")
    scale_think: bool = Field(default=False, description="divide think times as well")
    start: float | None = Field(
        default=None, description="keep what arrives from here, in seconds; it becomes 0"
    )
    end: float | None = Field(default=None, description="keep what arrives before this, in seconds")
    rows: str | None = Field(default=None, description="keep rows A:B, from A (counted from 0) to before B")
    sessions: int | None = Field(default=None, description="keep the first N sessions")


@app.command("describe", short_help="Prints load, burstiness, lengths, sessions and reuse")
@with_options
def describe_command(trace: TraceName, reading: AnyReadOptions, output: Output) -> None:
    """Prints a trace's load, burstiness, lengths, sessions, and how much of it could be reused."""
    describe_and_show(read_with_progress(trace, reading), output.json_only)


@app.command("convert", short_help="Writes another form; cuts, mixes and scales on the way")
@with_options
def convert_command(
    trace: TraceName,
    out: Annotated[Path, Arg(help="file to write: .parquet, .jsonl or .csv (these with .gz or .zst too)")],
    ask: ConvertOptions,
    reading: AnyReadOptions,
    output: Output,
) -> None:
    """Writes a trace in another form, on the way cut (first), mixed and scaled (last) if asked."""
    if ask.scale is None:
        refuse_options({"scale-think": ask.scale_think or None}, "goes with --scale: give that as well")
    work = read_with_progress(trace, reading)
    if any(value is not None for value in (ask.start, ask.end, ask.rows, ask.sessions)):
        rows = _range(ask.rows)
        work = operations.slice(work, start_s=ask.start, end_s=ask.end, rows=rows, sessions=ask.sessions)
    if ask.mix:
        others = [read_with_progress(name, reading) for name in ask.mix]
        work = operations.mix([work, *others], name=work.name)
    if ask.scale is not None:
        work = operations.scale(work, ask.scale, think_times=ask.scale_think)
    write(work, out, ask.form, lossy=ask.lossy)
    written(work, out, output.json_only)


class MetricsOptions(Options):
    """The load of a trace that is made from metrics."""

    seconds: float | None = Field(default=None, gt=0, description="from the first dump to the last")
    rate: float | None = Field(
        default=None,
        gt=0,
        description="requests per second, where the metrics do not tell or another is meant",
    )
    requests: int | None = Field(
        default=None, ge=1, description="how many requests, at one rate [those of the span, as they came]"
    )
    seed: int = Field(default=0, description="seed of all random draws")


@app.command("from-metrics", short_help="Makes a trace with the load that a server's metrics show")
@with_options
def from_metrics_command(
    metrics: Annotated[
        list[Path],
        Arg(help="a range query's JSON, or dumps of /metrics in order of time, and last the file to write"),
    ],
    ask: MetricsOptions,
    output: Output,
) -> None:
    """Makes a trace with a server's load: its rate over time, lengths of prompts and answers, and hit rate.

    Metrics are those of vLLM, SGLang or TensorRT-LLM. The last of METRICS is the file to write.
    """
    from pagecast.sim.runs.server_forecast import trace_of_metrics
    from pagecast.sim.runs.server_metrics import read_metrics

    *files, out = metrics
    if not files:
        raise BadInput(f"{out}: give the metrics, and after them the file to write")
    server = read_metrics(*files, seconds=ask.seconds)
    work = trace_of_metrics(server, rate=ask.rate, requests=ask.requests, seed=ask.seed, name=files[0].stem)
    write(work, out)
    written(work, out, output.json_only)


class SampleOptions(Options):
    """Where a sample is written."""

    out: Path | None = Field(
        default=None, description="file to write the sample to, in the form of its ending"
    )
    lossy: bool = LOSSY


@app.command("sample", short_help="Lists the bundled samples, describes or writes one")
@with_options
def sample_command(
    ask: SampleOptions,
    output: Output,
    name: Annotated[str | None, Arg(help="a sample's name; without one they are listed")] = None,
) -> None:
    """Lists the bundled samples, describes one, or writes it to a file."""
    if name is None:
        refuse_options({"out": ask.out}, "is a file for a sample: name the sample before it")
    if ask.out is None:
        refuse_options({"lossy": ask.lossy or None}, "is for a file: give --out as well")
    if name is None:
        _list_samples(output.json_only)
        return
    work = read(name if name.startswith("sample:") else f"sample:{name}")
    if ask.out is None:
        describe_and_show(work, output.json_only)
    else:
        write(work, ask.out, lossy=ask.lossy)
        written(work, ask.out, output.json_only)


def _list_samples(json: bool) -> None:
    if json:
        console.print_json({"samples": sample_names()})
        return
    from pagecast.traces.samples import MAKERS

    table = Table(box=None, pad_edge=False, show_header=False)
    for sample in sample_names():
        table.add_row(sample, (MAKERS[sample].__doc__ or "").split("\n", 1)[0])
    console.out.print(table)


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        return int(first or 0), int(last or 1 << 62) if colon else int(first) + 1
    except ValueError:
        raise BadInput(f"--rows {text!r}: write A:B, such as 0:1000") from None
