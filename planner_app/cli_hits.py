"""`pagecast hits`: how much of a trace's prompts a prefix cache of each size would find, without timing."""

from __future__ import annotations

from typing import Annotated

import typer
from pagecast.planner_app import console
from pagecast.planner_app.trace_view import read_with_progress
from pagecast.sim.core.errors import BadInput
from pagecast.traces.hits import Hits, hits
from rich.table import Table

Opt = typer.Option
_CURVE = "1000,3000,10000,30000,100000,300000"


def hits_command(
    trace: Annotated[str, typer.Argument(help="trace file of any known format, or a sample's name")],
    capacity: Annotated[str, Opt(help="cache sizes in blocks, separated by commas")] = _CURVE,
    block_size: Annotated[int, Opt(help="tokens in a block (512: Mooncake's own; vLLM uses 16)")] = 512,
    limit: Annotated[int | None, Opt(help="count only the first N requests")] = None,
    sort: Annotated[bool, Opt("--sort", help="put requests out of order in order of arrival")] = False,
    session_rate: Annotated[
        float | None, Opt(help="sessions a second, where a format has no absolute times: it sets the order")
    ] = None,
    seed: Annotated[int, Opt(help="of whatever is drawn at random")] = 0,
    block_tokens: Annotated[int | None, Opt(help="tokens a hash id names, if not the format's own")] = None,
    json: Annotated[bool, Opt("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Counts prefix hits of an LRU cache by its capacity.

    A block hits only if all earlier blocks of its request hit; the trailing partial block counts as one;
    generated tokens are never inserted; requests come in the trace's order.
    """
    capacities = parse_capacities(capacity)
    work = read_with_progress(
        trace, limit=limit, sort=sort, session_rate=session_rate, seed=seed, block_tokens=block_tokens
    )
    result = hits(work, capacities, block_size)
    if json:
        console.print_json(result.to_dict())
    else:
        show(work.name, result)


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
        f"{name}: {result.references:,} references to {result.unique_blocks:,} blocks of "
        f"{result.block_size} tokens",
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
