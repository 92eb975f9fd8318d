"""`pagecast trace`: look at traces, convert and cut them, generate new ones, take a bundled sample."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.ignored_options import refuse_options
from pagecast.planner_app.commands.trace_generate import Lossy, generate_command
from pagecast.planner_app.commands.trace_view import describe_and_show, read_with_progress, written
from pagecast.sim.core.errors import BadInput
from pagecast.traces import operations
from pagecast.traces.bundled import sample_names
from pagecast.traces.read import read
from pagecast.traces.source import MAX_BYTES
from pagecast.traces.write import FORMS, write
from rich.table import Table

Arg, Opt = typer.Argument, typer.Option
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
Limit = Annotated[int | None, Opt(help="read only the first N requests")]
Sort = Annotated[bool, Opt("--sort", help="put requests out of order in order of arrival")]
SessionRate = Annotated[float | None, Opt(help="sessions per second, where a format has no absolute times")]
Think = Annotated[float | None, Opt(help="seconds before the next turn, where a format has none (ShareGPT)")]
Seed = Annotated[int, Opt(help="seed of all random draws")]
Tokenizer = Annotated[Path | None, Opt(help="transformers folder, for formats that hold texts (ShareGPT)")]
BlockTokens = Annotated[int | None, Opt(help="tokens a hash id names, if not the format's own number")]
MaxBytes = Annotated[int, Opt(help="refuse files that are larger than this when unpacked")]
Json = Annotated[bool, Opt("--json", help="print one JSON object and nothing else")]


@app.command("describe", short_help="Prints load, burstiness, lengths, sessions and reuse")
def describe_command(
    trace: TraceName,
    limit: Limit = None,
    sort: Sort = False,
    session_rate: SessionRate = None,
    think: Think = None,
    seed: Seed = 0,
    tokenizer: Tokenizer = None,
    block_tokens: BlockTokens = None,
    max_bytes: MaxBytes = MAX_BYTES,
    json: Json = False,
) -> None:
    """Prints a trace's load, burstiness, lengths, sessions, and how much of it could be reused."""
    work = read_with_progress(
        trace,
        limit=limit,
        sort=sort,
        session_rate=session_rate,
        think_s=think,
        seed=seed,
        tokenizer=tokenizer,
        block_tokens=block_tokens,
        max_bytes=max_bytes,
    )
    describe_and_show(work, json)


@app.command("convert", short_help="Writes another form; cuts, mixes and scales on the way")
def convert_command(
    trace: TraceName,
    out: Annotated[Path, Arg(help="file to write: .parquet, .jsonl or .csv (these with .gz or .zst too)")],
    form: Annotated[str | None, Opt(help=f"{', '.join(FORMS)} [by OUT's ending]")] = None,
    lossy: Lossy = False,
    mix: Annotated[
        list[str] | None, Opt(help="another trace to play at the same time; may be repeated")
    ] = None,
    scale: Annotated[float | None, Opt(help="make requests come this many times as often")] = None,
    scale_think: Annotated[bool, Opt("--scale-think", help="divide think times as well")] = False,
    start: Annotated[float | None, Opt(help="keep what arrives from here, in seconds; it becomes 0")] = None,
    end: Annotated[float | None, Opt(help="keep what arrives before this, in seconds")] = None,
    rows: Annotated[str | None, Opt(help="keep rows A:B, from A (counted from 0) to before B")] = None,
    sessions: Annotated[int | None, Opt(help="keep the first N sessions")] = None,
    limit: Limit = None,
    sort: Sort = False,
    session_rate: SessionRate = None,
    think: Think = None,
    seed: Seed = 0,
    tokenizer: Tokenizer = None,
    block_tokens: BlockTokens = None,
    max_bytes: MaxBytes = MAX_BYTES,
    json: Json = False,
) -> None:
    """Writes a trace in another form, on the way cut (first), mixed and scaled (last) if asked."""
    if scale is None:
        refuse_options({"scale-think": scale_think or None}, "goes with --scale: give that as well")
    options = {
        "limit": limit,
        "sort": sort,
        "session_rate": session_rate,
        "think_s": think,
        "seed": seed,
        "tokenizer": tokenizer,
        "block_tokens": block_tokens,
        "max_bytes": max_bytes,
    }
    work = read_with_progress(trace, **options)
    if any(value is not None for value in (start, end, rows, sessions)):
        work = operations.slice(work, start_s=start, end_s=end, rows=_range(rows), sessions=sessions)
    if mix:
        others = [read_with_progress(name, **options) for name in mix]
        work = operations.mix([work, *others], name=work.name)
    if scale is not None:
        work = operations.scale(work, scale, think_times=scale_think)
    write(work, out, form, lossy=lossy)
    written(work, out, json)


@app.command("sample", short_help="Lists the bundled samples, describes or writes one")
def sample_command(
    name: Annotated[str | None, Arg(help="a sample's name; without one they are listed")] = None,
    out: Annotated[Path | None, Opt(help="file to write the sample to, in the form of its ending")] = None,
    lossy: Lossy = False,
    json: Json = False,
) -> None:
    """Lists the bundled samples, describes one, or writes it to a file."""
    if name is None:
        refuse_options({"out": out}, "is a file for a sample: name the sample before it")
    if out is None:
        refuse_options({"lossy": lossy or None}, "is for a file: give --out as well")
    if name is None:
        _list_samples(json)
        return
    work = read(name if name.startswith("sample:") else f"sample:{name}")
    if out is None:
        describe_and_show(work, json)
    else:
        write(work, out, lossy=lossy)
        written(work, out, json)


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
