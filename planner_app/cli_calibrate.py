"""`pagecast calibrate`: learn what steps cost from recorded runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pagecast.planner_app import console
from pagecast.sim.calibration.build import REPLICATES, Source, calibrate
from pagecast.sim.calibration.features import TERMS
from pagecast.sim.calibration.file import Calibration
from pagecast.sim.core.errors import BadInput
from rich.table import Table

Opt = typer.Option
# Terms whose full description does not fit a line of the table.
_SHORT = {
    "request": "a request in the step: scheduling, sampling, its token",
    "token_after_prompts": "a token in a step with prompts after another such",
    "kv_token": "a context token read by decode attention",
    "prompt_tile": "a tile x key block of prompt attention",
}


def calibrate_command(
    from_run: Annotated[
        list[str] | None,
        Opt(help="folder of a recorded run; FOLDER:0.5 for its first half; give it once for each run"),
    ] = None,
    out: Annotated[Path | None, Opt(help="file to write")] = None,
    name: Annotated[str | None, Opt(help="name of the calibration [the file's]")] = None,
    replicates: Annotated[int, Opt(min=0, help="resampled fits to keep, for intervals")] = REPLICATES,
    seed: Annotated[int, Opt(help="of the resampling")] = 0,
    json: Annotated[bool, Opt("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Fits step costs to recorded runs of one engine, model and GPU, and writes them to a file.

    Synchronous runs give the costs. Asynchronous ones, where given, tell what planning ahead hides.
    """
    if not from_run:
        raise BadInput("give at least one --from-run FOLDER")
    if out is None:
        raise BadInput("give --out FILE.json")
    console.check_place("--out", out)
    sources = [Source.parse(text) for text in from_run]
    made = calibrate(sources, name or out.stem, replicates=replicates, seed=seed)
    made.save(out)
    if json:
        console.print_json({
            "name": made.name, "made_for": made.made_for, "regions": made.regions,
            "cross_validation": made.cross_validation, "provenance": made.provenance, "file": str(out),
        })  # fmt: skip
    else:
        show(made, out)


def show(made: Calibration, out: Path) -> None:
    """Prints what was learnt, how well it fits, and how well runs forecast each other."""
    made_for, runs = made.made_for, made.provenance["runs"]
    console.out.print(
        f"{made_for['engine']} {made_for['engine_version']}, {made_for['model']} on {made_for['gpu']}: "
        f"{sum(run['steps'] for run in runs)} steps of {len(runs)} runs",
        soft_wrap=True,
    )
    console.out.print(_terms(made))
    console.out.print(_errors(made))
    for key, words in (("merged_terms", "can't be told from the others"), ("absent_terms", "never occur")):
        if made.provenance[key]:
            named = ", ".join(made.provenance[key])
            console.out.print(f"note: terms that {words} in these runs: {named}", soft_wrap=True)
    console.out.print(f"written to {out}", soft_wrap=True)


def _terms(made: Calibration) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("cost, microseconds", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for tokens, value in zip(made.knots, made.curve_ns, strict=True):
        if tokens in (made.knots[0], made.knots[-1]) or tokens & (tokens - 1) == 0:
            table.add_row(f"a step of {tokens} tokens: fixed cost and matrix work", f"{value / 1e3:,.1f}")
    for term, value in made.terms_ns.items():
        table.add_row(_SHORT.get(term, TERMS[term]), f"{value / 1e3:,.3f}")
    return table


def _errors(made: Calibration) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("error, percent", "steps", "time", "total", "p50", "p90"):
        left = title.startswith("error")
        table.add_column(title, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    rows = [("fit, " + str(row["region"]), row) for row in made.regions]
    rows += [(f"{row['run']} by the others, {row['steps of']}", row) for row in made.cross_validation]
    for title, row in rows:
        table.add_row(
            title, f"{row['steps']:,}", f"{row['time_percent']:.1f}", f"{row['error_percent']:+.2f}",
            f"{row['p50_percent']:.2f}", f"{row['p90_percent']:.2f}",
        )  # fmt: skip
    return table
