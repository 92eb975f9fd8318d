"""`pagecast support`: which tier of step costs each model, GPU and engine gets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.model_support import five_lines
from pagecast.planner_app.commands.screen import folded
from pagecast.sim.core.engines import DEFAULT_ENGINE
from pagecast.sim.core.engines.registry import engine_texts
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.choose import ROOFLINE
from pagecast.sim.costs.calibration.file import all_shipped
from pagecast.sim.costs.calibration.support import CALIBRATED, IMPOSSIBLE, Support, support
from pagecast.sim.costs.calibration.target import Target
from pagecast.sim.costs.measured.corrections import MEASURED
from pagecast.sim.costs.measured.tables import paths
from pagecast.sim.machine.gpus import GPUS
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.machine.models import known_models
from pagecast.sim.machine.models import model as find_model
from rich.table import Table

Opt = typer.Option
_ENGINES = ("vllm", "sglang", "trtllm")
_MEASURED_IS_WIDER = (
    "M's widest are where public runs show how far it is off; r's 20% is an assumption that none checks"
)
_TITLE = 11  # columns of the titles of the five lines
_MARKS = {CALIBRATED: "C", MEASURED: "M", ROOFLINE: "r", IMPOSSIBLE: "-"}


def support_command(
    described: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="one model: what is known of it, in five lines")
    ] = None,
    model: Annotated[
        list[str] | None, Opt(help="a known model or a folder with config.json; once for each [all known]")
    ] = None,
    gpu: Annotated[list[str] | None, Opt(help="once for each [those with measured operations]")] = None,
    engine: Annotated[list[str] | None, Opt(help=f"{', '.join(_ENGINES)}; once for each [vllm]")] = None,
    tensor_parallel_size: Annotated[int, Opt(min=1, help="GPUs a replica is sharded over")] = 1,
    kv_cache_dtype: Annotated[str, Opt(help="dtype of the KV cache")] = "auto",
    async_scheduling: Annotated[
        bool, Opt("--async-scheduling/--no-async-scheduling", help="plan a step while the last one runs")
    ] = True,
    json: Annotated[bool, Opt("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Lists step costs that `--costs auto` takes, and the engines' versions; or describes one MODEL.

    C: calibrated, fitted to recordings of the set-up. M: measured, composed of operations that were measured
    on the GPU. r: roofline, from published rates. -: the model can't be
    sharded so, or its steps can't be timed.
    """
    if described is not None and (model or len(engine or []) > 1):
        raise BadInput("give one MODEL for five lines, or --model and --engine for the table of tiers")
    names = [described] if described is not None else model or known_models()
    models = [find_model(name) for name in names]
    gpus = [find_gpu(name) for name in gpu or _measured_gpus()]
    shipped, rows = all_shipped(), []
    with console.progress("set-ups", len(models) * len(gpus) * len(engine or [1])) as update:
        for each in engine or _ENGINES[:1]:
            for facts in models:
                for place in gpus:
                    target = Target(
                        facts, place, tensor_parallel_size, kv_cache_dtype, int(async_scheduling), each
                    )
                    rows.append(support(target, shipped))
                    update(len(rows))
    if json:
        lines = {"lines": five_lines(models[0], rows)} if described is not None else {}
        set_ups = [asdict(row) for row in rows]
        console.print_json({**lines, "set_ups": set_ups, "engines": engine_texts()})
        return
    if described is not None:
        for line in five_lines(models[0], rows):
            for part in folded(line, _TITLE):
                console.out.print(part, soft_wrap=True)
        return
    engines = ", ".join(f"{text} (default)" if text == DEFAULT_ENGINE else text for text in engine_texts())
    about = [
        "step costs: C fitted to runs of the set-up, M of operations measured on the GPU, r roofline, "
        "- can't be sharded or timed so",
        *_half_widths(rows),
        f"rules and defaults (--engine): {engines}",
    ]
    tiers = {row.tier for row in rows}
    if {MEASURED, ROOFLINE} <= tiers:
        about.insert(-1, _MEASURED_IS_WIDER)
    for part in (part for line in about for part in folded(line)):
        console.out.print(part, soft_wrap=True)
    console.out.print()
    for each in dict.fromkeys(row.engine for row in rows):
        _show(each, [row for row in rows if row.engine == each])
    for part in (part for reason in _reasons(rows) for part in folded(f"r: {reason}")):
        console.out.print(part, soft_wrap=True)


def _measured_gpus() -> list[str]:
    measured = {key for key, _ in paths()}
    return [gpu.name for gpu in GPUS if gpu.name.lower().replace(" ", "-") in measured]


def _show(engine: str, rows: list[Support]) -> None:
    """Prints a row per model. Where the GPUs' names don't fit, columns have numbers with a legend."""
    gpus = list(dict.fromkeys(row.gpu for row in rows))
    titles = [gpu.replace(" ", "\n") for gpu in gpus]
    table = _table(engine, rows, titles)
    unbounded = console.out.options.update_width(1000)
    if console.out.measure(table, options=unbounded).maximum > console.out.width:
        titles = [str(number) for number in range(1, len(gpus) + 1)]
        table = _table(engine, rows, titles)
        legend = ", ".join(f"{title} {gpu}" for title, gpu in zip(titles, gpus, strict=True))
        console.out.print(f"GPUs: {legend}")
    console.out.print(table)


def _table(engine: str, rows: list[Support], titles: list[str]) -> Table:
    """A row per model, and a column per GPU under its title."""
    table = Table(box=None, pad_edge=False)
    gpus = list(dict.fromkeys(row.gpu for row in rows))
    table.add_column(engine, no_wrap=True)
    for title in titles:
        table.add_column(title, justify="center", no_wrap=True)
    for model in dict.fromkeys(row.model for row in rows):
        marks = {row.gpu: _MARKS[row.tier] for row in rows if row.model == model}
        table.add_row(model, *(marks[gpu] for gpu in gpus))
    return table


def _half_widths(rows: Iterable[Support]) -> list[str]:
    """How far the 90% interval of step times reaches to each side, by tier: the least and the most."""
    lines = []
    for tier, mark in _MARKS.items():
        widths = [row.half_width_percent for row in rows if row.tier == tier and row.half_width_percent]
        if widths:
            least, most = f"{min(widths):.1f}", f"{max(widths):.1f}"
            reach = least if least == most else f"{least} to {most}"
            lines.append(f"{mark}: step times within {reach}% (90%)")
    return lines


def _reasons(rows: Iterable[Support]) -> list[str]:
    """Why set-ups have only the roofline, each reason once with how many it keeps from more."""
    counts: dict[str, int] = {}
    for row in rows:
        if row.tier == ROOFLINE:
            counts[row.detail] = counts.get(row.detail, 0) + 1
    return [f"{reason} ({count})" for reason, count in sorted(counts.items(), key=lambda item: -item[1])]
