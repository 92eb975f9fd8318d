"""`pagecast trace generate`: requests, conversations, or a ServeGen workload, from laws and a seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.ignored_options import refuse_options
from pagecast.planner_app.commands.trace_view import show
from pagecast.planner_app.options import Flag, Options
from pagecast.sim.core.errors import BadInput
from pagecast.traces import lengths
from pagecast.traces.arrivals import KINDS
from pagecast.traces.describe import describe
from pagecast.traces.read import read
from pagecast.traces.recipe import lengths_of, play
from pagecast.traces.write import write
from pydantic import Field

MOST_REQUESTS = 100_000_000
_COUNT, _SERVEGEN_S = 1000, 600.0
_INPUT, _OUTPUT = "lognormal:p50=1000,sigma=0.8,max=32000", "lognormal:p50=200,sigma=0.7,max=4000"
_MESSAGE, _THINK, _MOST_TOKENS = "lognormal:p50=60,sigma=1", "lognormal:p50=8,sigma=0.7", 32_768
_WITH_CV = ("gamma", "weibull")
LOSSY: bool = Field(default=False, description="drop what the file's form can't hold")


class DrawnRequests(Options):
    """Laws that requests are drawn by."""

    arrivals: str | None = Field(default=None, description=f"{', '.join(KINDS)} [poisson]")
    cv: float | None = Field(
        default=None, description="coefficient of variation of the times between, for gamma and weibull [1]"
    )
    input: str | None = Field(default=None, description=f"prompt tokens: {lengths.HELP} [{_INPUT}]")
    output: str | None = Field(default=None, description=f"generated tokens, written likewise [{_OUTPUT}]")
    like: str | None = Field(
        default=None, description="draw input and output lengths from this trace instead"
    )


class DrawnTurns(Options):
    """Laws of conversations, beyond how many turns they have."""

    message: str | None = Field(
        default=None, description=f"with --turns: tokens that a later turn adds [{_MESSAGE}]"
    )
    think: str | None = Field(
        default=None, description=f"with --turns: seconds between answer and next turn [{_THINK}]"
    )
    system_prompt: tuple[int, ...] = Field(
        default=(), description="with --turns: tokens of a shared system prompt; may be repeated"
    )
    most_tokens: int | None = Field(
        default=None, description=f"with --turns: end a session before it grows beyond this [{_MOST_TOKENS}]"
    )


class Generated(Options):
    """How much is generated, and of which kind."""

    rate: float | None = Field(
        default=None, description="requests per second [5]; with --turns, sessions per second [1]"
    )
    requests: int | None = Field(
        default=None, le=MOST_REQUESTS, description="how many [1000 unless --duration]"
    )
    duration: float | None = Field(
        default=None, description="seconds within which requests (sessions) start; ServeGen: 600"
    )
    turns: str | None = Field(
        default=None, description="turns of a session, written like --input: makes conversations"
    )
    servegen: Path | None = Field(
        default=None, description="archive or folder of ServeGen clients, which give all the rest"
    )
    start: float | None = Field(
        default=None, description="with --servegen: second of the clients' day to begin at [0]"
    )
    seed: int = Field(default=0, description="same seed, same trace")
    lossy: bool = LOSSY

    def check(self) -> None:
        """Errors: BadInput naming the first number that can't be had."""
        if self.requests is not None and self.requests < 1:
            raise BadInput(f"--requests {self.requests}: generate at least one")
        for name, value in (("--duration", self.duration), ("--rate", self.rate)):
            if value is not None and not 0 < value < float("inf"):
                raise BadInput(f"{name} {value:g}: give a positive number")


class Described(Options):
    """How the description of a generated trace is printed."""

    json_only: Annotated[bool, Flag(("--json",))] = Field(
        default=False, description="print one JSON object (the trace's description)"
    )


@with_options
def generate_command(
    out: Annotated[
        Path, typer.Argument(help="file to write: .parquet, .jsonl or .csv (these with .gz or .zst too)")
    ],
    laws: DrawnRequests,
    turns: DrawnTurns,
    ask: Generated,
    printed: Described,
) -> None:
    """Generates a trace from distributions; the same options and seed give the same trace."""
    ask.check()
    most = ask.requests or (_COUNT if ask.duration is None else None)
    recipe: dict[str, Any] = {"make": "requests", "requests": most, "duration": ask.duration}
    if ask.servegen is not None:
        reason = "is for drawn requests: leave it out, or --servegen"
        refuse_options(laws, reason)
        refuse_options({"turns": ask.turns}, reason)
        refuse_options(turns, reason)
        where = str(ask.servegen.absolute())
        recipe |= {"make": "servegen", "servegen": where, "start": ask.start or 0.0, "rate": ask.rate}
        recipe |= {"duration": ask.duration or _SERVEGEN_S}
    else:
        refuse_options({"start": ask.start}, "is for ServeGen's clients: give --servegen as well")
        recipe |= _drawn(laws, turns, ask)
    trace = play(recipe, ask.seed)
    trace = replace(trace, name=out.name.split(".")[0] or "generated")
    write(trace, out, lossy=ask.lossy)
    facts = describe(trace)
    if printed.json_only:
        console.print_json({**facts, "out": str(out)})
    else:
        show(facts)
        console.out.print(f"written to {out}", soft_wrap=True, markup=False)


def _drawn(laws: DrawnRequests, turns: DrawnTurns, ask: Generated) -> dict[str, Any]:
    """The recipe of requests, or with turns of conversations. Errors: BadInput."""
    arrivals = laws.arrivals or "poisson"
    if arrivals in KINDS and arrivals not in _WITH_CV:
        refuse_options({"cv": laws.cv}, f"is for --arrivals {' and '.join(_WITH_CV)}, not {arrivals}")
    usual = 5.0 if ask.turns is None else 1.0
    recipe = {"arrivals": arrivals, "rate": ask.rate or usual, "cv": 1.0 if laws.cv is None else laws.cv}
    if laws.like is not None:
        lengths_given = {"input": laws.input, "output": laws.output}
        refuse_options(lengths_given, "is what --like draws: leave one of them out")
    recipe |= {"input": laws.input or _INPUT, "output": laws.output or _OUTPUT}
    if ask.turns is None:
        refuse_options(turns, "is for conversations: give --turns as well")
        return recipe if laws.like is None else {**recipe, "like": lengths_of(read(laws.like))}
    refuse_options({"like": laws.like}, "is for single requests: leave it out, or --turns")
    recipe |= {"make": "conversations", "turns": ask.turns}
    recipe |= {"message": turns.message or _MESSAGE, "think": turns.think or _THINK}
    recipe |= {"system_prompt": list(turns.system_prompt)}
    return {**recipe, "most_tokens": _MOST_TOKENS if turns.most_tokens is None else turns.most_tokens}
