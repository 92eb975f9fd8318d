"""`pagecast trace generate`: requests, conversations, or a ServeGen workload, from laws and a seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.bounds import MOST_REQUESTS
from pagecast.planner_app.commands.ignored_options import refuse_options
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
_MESSAGE, _THINK, _MOST_TOKENS = "lognormal:p50=60,sigma=1", "lognormal:p50=8,sigma=0.7", 32_768
_WITH_CV = ("gamma", "weibull")
Lossy = Annotated[bool, Opt("--lossy", help="drop what the file's form can't hold")]


def generate_command(
    out: Annotated[
        Path, typer.Argument(help="file to write: .parquet, .jsonl or .csv (these with .gz or .zst too)")
    ],
    arrivals: Annotated[str | None, Opt(help=f"{', '.join(KINDS)} [poisson]")] = None,
    rate: Annotated[
        float | None, Opt(help="requests per second [5]; with --turns, sessions per second [1]")
    ] = None,
    cv: Annotated[
        float | None, Opt(help="coefficient of variation of the times between, for gamma and weibull [1]")
    ] = None,
    count: Annotated[
        int | None, Opt("--requests", max=MOST_REQUESTS, help="how many [1000 unless --duration]")
    ] = None,
    duration: Annotated[
        float | None, Opt(help="seconds within which requests (sessions) start; ServeGen: 600")
    ] = None,
    input_law: Annotated[str | None, Opt("--input", help=f"prompt tokens: {lengths.HELP} [{_INPUT}]")] = None,
    output_law: Annotated[
        str | None, Opt("--output", help=f"generated tokens, written likewise [{_OUTPUT}]")
    ] = None,
    like: Annotated[str | None, Opt(help="draw input and output lengths from this trace instead")] = None,
    turns: Annotated[str | None, Opt(help="turns of a session, likewise: makes conversations")] = None,
    message: Annotated[
        str | None, Opt(help=f"with --turns: tokens that a later turn adds [{_MESSAGE}]")
    ] = None,
    think: Annotated[
        str | None, Opt(help=f"with --turns: seconds between answer and next turn [{_THINK}]")
    ] = None,
    system_prompt: Annotated[
        list[int] | None, Opt(help="with --turns: tokens of a shared system prompt; may be repeated")
    ] = None,
    most_tokens: Annotated[
        int | None, Opt(help=f"with --turns: end a session before it grows beyond this [{_MOST_TOKENS}]")
    ] = None,
    servegen_clients: Annotated[
        Path | None, Opt("--servegen", help="archive or folder of ServeGen clients, which give all the rest")
    ] = None,
    start: Annotated[
        float | None, Opt(help="with --servegen: second of the clients' day to begin at [0]")
    ] = None,
    seed: Annotated[int, Opt(help="same seed, same trace")] = 0,
    lossy: Lossy = False,
    json: Annotated[bool, Opt("--json", help="print one JSON object (the trace's description)")] = False,
) -> None:
    """Generates a trace from distributions; the same options and seed give the same trace."""
    _check(count, duration, rate)
    drawn = {"arrivals": arrivals, "cv": cv, "input": input_law, "output": output_law, "like": like}
    of_turns = {
        "message": message,
        "think": think,
        "system-prompt": system_prompt or None,
        "most-tokens": most_tokens,
    }
    most = count or (_COUNT if duration is None else None)
    recipe: dict[str, Any] = {"make": "requests", "requests": most, "duration": duration}
    if servegen_clients is not None:
        refuse_options(
            {**drawn, "turns": turns, **of_turns}, "is for drawn requests: leave it out, or --servegen"
        )
        where = str(servegen_clients.absolute())
        recipe |= {"make": "servegen", "servegen": where, "start": start or 0.0, "rate": rate}
        recipe |= {"duration": duration or _SERVEGEN_S}
    else:
        refuse_options({"start": start}, "is for ServeGen's clients: give --servegen as well")
        recipe |= _drawn(drawn, rate, turns, of_turns)
    trace = play(recipe, seed)
    _finish(replace(trace, name=out.name.split(".")[0] or "generated"), out, lossy, json)


def _drawn(
    drawn: dict[str, Any], rate: float | None, turns: str | None, of_turns: dict[str, Any]
) -> dict[str, Any]:
    """What the recipe of requests, or with `turns` of conversations, has of options: None where not given."""
    arrivals = drawn["arrivals"] or "poisson"
    if arrivals in KINDS and arrivals not in _WITH_CV:
        refuse_options({"cv": drawn["cv"]}, f"is for --arrivals {' and '.join(_WITH_CV)}, not {arrivals}")
    usual = 5.0 if turns is None else 1.0
    recipe = {"arrivals": arrivals, "rate": rate or usual, "cv": 1.0 if drawn["cv"] is None else drawn["cv"]}
    laws = {name: drawn[name] for name in ("input", "output")}
    if drawn["like"] is not None:
        refuse_options(laws, "is what --like draws: leave one of them out")
    recipe |= {"input": laws["input"] or _INPUT, "output": laws["output"] or _OUTPUT}
    if turns is None:
        refuse_options(of_turns, "is for conversations: give --turns as well")
        return recipe if drawn["like"] is None else {**recipe, "like": lengths_of(read(drawn["like"]))}
    refuse_options({"like": drawn["like"]}, "is for single requests: leave it out, or --turns")
    most_tokens = of_turns["most-tokens"]
    recipe |= {"make": "conversations", "turns": turns}
    recipe |= {"message": of_turns["message"] or _MESSAGE, "think": of_turns["think"] or _THINK}
    recipe |= {"system_prompt": list(of_turns["system-prompt"] or ())}
    return {**recipe, "most_tokens": _MOST_TOKENS if most_tokens is None else most_tokens}


def _finish(trace: Trace, out: Path, lossy: bool, json: bool) -> None:
    write(trace, out, lossy=lossy)
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
