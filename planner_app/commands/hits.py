"""`pagecast hits`: how much of a trace's prompts a prefix cache of each size would find, without timing."""

from __future__ import annotations

from typing import Annotated

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.output import Output
from pagecast.planner_app.commands.reading import BlockReadOptions, read_with_progress
from pagecast.planner_app.commands.screen import show_notes
from pagecast.planner_app.options import Options
from pagecast.sim.core.errors import BadInput
from pagecast.traces.describe import sharing
from pagecast.traces.hits import Hits, hits
from pagecast.traces.schema import Trace
from pydantic import Field
from rich.table import Table

_CURVE = "1000,3000,10000,30000,100000,300000"


class HitsOptions(Options):
    """Which cache a trace's prompts are looked up in."""

    capacity: str = Field(default=_CURVE, description="cache sizes in blocks, separated by commas")
    block_size: int | None = Field(
        default=None, description="tokens in a block [what the trace's hash ids name, else 16 as in vLLM]"
    )


@with_options
def hits_command(
    trace: Annotated[
        str, typer.Argument(help="trace file of any known format, a sample's name, or folder of replay --out")
    ],
    ask: HitsOptions,
    reading: BlockReadOptions,
    output: Output,
) -> None:
    """Counts prefix hits of an LRU cache by its capacity.

    A block hits only if all earlier blocks of its request hit; the trailing partial block counts as one;
    generated tokens are never inserted; requests come in the trace's order.
    """
    capacities = parse_capacities(ask.capacity)
    work = read_with_progress(trace, reading)
    result = hits(work, capacities, ask.block_size)
    note = left_out(work)
    if output.json_only:
        console.print_json({**result.to_dict(), "notes": [*work.notes, note]})
    else:
        show(work.name, result)
        show_notes((*work.notes, note))


def left_out(trace: Trace) -> str:
    """Sentences on what the ratios leave out, and how much that would change them."""
    prompts, all_of_it = (
        sharing(trace, with_outputs=outputs)["shareable_fraction"] for outputs in (False, True)
    )
    text = (
        "blocks are counted, a prompt's trailing partial one among them, and generated tokens left out, as "
        "in published hit ratios"
    )
    if all_of_it == prompts:
        return f"{text}; no prompt here quotes an answer, so that generated tokens would change nothing"
    return (
        f"{text}: with answers that later prompts quote, an endless cache would find {all_of_it:.1%} of "
        f"prompt tokens, not {prompts:.1%} (`pagecast trace describe` and `pagecast replay` count them)"
    )


def parse_capacities(text: str) -> list[int]:
    """Whole numbers separated by commas. Raises BadInput for anything else."""
    try:
        capacities = [int(part) for part in text.replace("_", "").split(",") if part.strip()]
    except ValueError:
        raise BadInput(f"--capacity {text!r}: give whole numbers of blocks, such as 1000,10000") from None
    if not capacities or min(capacities) < 1:
        raise BadInput(f"--capacity {text!r}: a cache needs at least one block")
    return capacities


def show(name: str, result: Hits) -> None:
    """Prints the ratios as a table, with what a block is."""
    console.out.print(
        f"{name}: {console.counted(result.references, 'reference')} to "
        f"{console.counted(result.unique_blocks, 'block')} of {console.counted(result.block_size, 'token')}",
        soft_wrap=True,
        markup=False,
    )
    table = Table(box=None, pad_edge=False)
    for title in ("blocks", "tokens", "hit ratio"):
        table.add_column(title, justify="right", no_wrap=True)
    for blocks, ratio in result.capacity.items():
        table.add_row(f"{blocks:,}", f"{blocks * result.block_size:,}", f"{ratio:.4f}")
    table.add_row("infinite", "", f"{result.infinite:.4f}")
    console.out.print(table)
