"""`pagecast trace generate`: requests, conversations, or a ServeGen workload, from laws and a seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.bounds import MOST_REQUESTS
from pagecast.planner_app.commands.trace_view import show
from pagecast.sim.core.errors import BadInput
from pagecast.traces import lengths
from pagecast.traces.arrivals import KINDS
from pagecast.traces.describe import describe
from pagecast.traces.read import read
from pagecast.traces.recipe import lengths_of, play
from pagecast.traces.schema import Trace
from pagecast.traces.write import write

Opt = typer.Option
_COUNT, _SERVEGEN_S = 1000, 600.0
_INPUT, _OUTPUT = "lognormal:p50=1000,sigma=0.8,max=32000", "lognormal:p50=200,sigma=0.7,max=4000"


def generate_command(
    out: Annotated[
        Path, typer.Argument(help="file to write: .parquet, .jsonl or .csv (these with .gz or .zst too)")
    ],
    arrivals: Annotated[str, Opt(help=", ".join(KINDS))] = "poisson",
    rate: Annotated[
        float | None, Opt(help="requests per second [5]; with --turns, sessions per second [1]")
    ] = None,
    cv: Annotated[
        float, Opt(help="coefficient of variation of the times between, for gamma and weibull")
    ] = 1.0,
    count: Annotated[
        int | None, Opt("--requests", max=MOST_REQUESTS, help="how many [1000 unless --duration]")
    ] = None,
    duration: Annotated[
        float | None, Opt(help="seconds within which requests (sessions) start; ServeGen: 600")
    ] = None,
    input_law: Annotated[str, Opt("--input", help=f"prompt tokens: {lengths.HELP}")] = _INPUT,
    output_law: Annotated[str, Opt("--output", help="generated tokens, written likewise")] = _OUTPUT,
    like: Annotated[str | None, Opt(help="draw input and output lengths from this trace instead")] = None,
    turns: Annotated[str | None, Opt(help="turns of a session, likewise: makes conversations")] = None,
    message: Annotated[
        str, Opt(help="with --turns: tokens that a later turn adds")
    ] = "lognormal:p50=60,sigma=1",
    think: Annotated[
        str, Opt(help="with --turns: seconds between answer and next turn")
    ] = "lognormal:p50=8,sigma=0.7",
    system_prompt: Annotated[
        list[int] | None, Opt(help="with --turns: tokens of a shared system prompt; may be repeated")
    ] = None,
    most_tokens: Annotated[int, Opt(help="with --turns: end a session before it grows beyond this")] = 32_768,
    servegen_clients: Annotated[
        Path | None, Opt("--servegen", help="archive or folder of ServeGen clients, which give all the rest")
    ] = None,
    start: Annotated[float, Opt(help="with --servegen: second of the clients' day to begin at")] = 0.0,
    seed: Annotated[int, Opt(help="same seed, same trace")] = 0,
    json: Annotated[bool, Opt("--json", help="print one JSON object (the trace's description)")] = False,
) -> None:
    """Generates a trace from distributions; the same options and seed give the same trace."""
    _check(count, duration, rate)
    most = count or (_COUNT if duration is None else None)
    recipe: dict[str, Any] = {"make": "requests", "requests": most, "duration": duration}
    if servegen_clients is not None:
        where = str(servegen_clients.absolute())
        recipe |= {"make": "servegen", "servegen": where, "start": start, "rate": rate}
        recipe |= {"duration": duration or _SERVEGEN_S}
    else:
        laws = {"input": input_law, "output": output_law}
        usual = 5.0 if turns is None else 1.0
        recipe |= {"arrivals": arrivals, "rate": rate or usual, "cv": cv, **laws}
    if turns is not None and servegen_clients is None:
        recipe |= {"make": "conversations", "turns": turns, "message": message, "think": think}
        recipe |= {"system_prompt": list(system_prompt or ()), "most_tokens": most_tokens}
    elif like is not None and servegen_clients is None:
        recipe |= {"like": lengths_of(read(like))}
    trace = play(recipe, seed)
    _finish(replace(trace, name=out.name.split(".")[0] or "generated"), out, json)


def _finish(trace: Trace, out: Path, json: bool) -> None:
    write(trace, out)
    facts = describe(trace)
    if json:
        console.print_json({**facts, "out": str(out)})
    else:
        show(facts)
        console.out.print(f"written to {out}", soft_wrap=True, markup=False)


def _check(count: int | None, duration: float | None, rate: float | None) -> None:
    if count is not None and count < 1:
        raise BadInput(f"--requests {count}: generate at least one")
    for name, value in (("--duration", duration), ("--rate", rate)):
        if value is not None and not 0 < value < float("inf"):
            raise BadInput(f"{name} {value:g}: give a positive number")
