"""`pagecast memory`: where a GPU's memory goes, and how many KV blocks and sequences fit."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Annotated, Any

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.field_options import Gather, field_option, scenario_fields, with_options
from pagecast.planner_app.commands.output import Explained
from pagecast.planner_app.commands.scenario_options import GivenScenario, start_options, started
from pagecast.planner_app.commands.screen import show_block, table_rows
from pagecast.planner_app.options import Options
from pagecast.planner_app.wording.assumed import rules
from pagecast.planner_app.wording.engine_defaults import engine_defaults
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import GIB
from pagecast.sim.machine.memory import BudgetOptions, HbmBudget
from pagecast.sim.scenario import Scenario
from pydantic import Field
from rich.table import Table

_MOST_ITEMS = 3  # that are told apart in the answer
LENGTHS = (2048, 8192, 32_768, 131_072)


def _options() -> list[inspect.Parameter]:
    """The scenario's fields that the budget depends on; of these a model and a GPU must be given."""
    names = [field.name for field in fields(BudgetOptions) if field.name in scenario_fields()]
    own = [
        field_option("model"),
        field_option("assume_dense"),
        field_option("gpu", required=True),
        field_option("engine"),
        *start_options(),
    ]
    names += ["enable_prefix_caching", "speculative_config"]  # what is loaded and kept beside the model
    return [*own, *(field_option(name) for name in names)]


def _scenario(values: dict[str, Any]) -> Scenario:
    arguments = GivenScenario.of(values)
    if "model" not in values and arguments.launch is None and arguments.log is None:
        raise BadInput("name a --model, or give the --launch or the --log of one")
    scenario, notes = started(arguments, measured=False)
    for note in notes:
        console.err.print(note, markup=False)
    return scenario.changed(num_gpu_blocks=None)


class MemoryOptions(Options):
    """What takes memory beside the scenario's own, and what is told of it."""

    enforce_eager: bool = Field(default=False, description="no compilation and no CUDA graphs")
    model_runner: str = Field(
        default="auto", description="vLLM's model runner: v1, v2, or auto as in vLLM 0.24"
    )
    sequence_tokens: int = Field(default=2048, description="length that the bytes per token are given for")


@with_options
def memory_command(
    scenario: Annotated[Scenario, Gather(_options(), _scenario)], ask: MemoryOptions, output: Explained
) -> None:
    """Itemises one GPU's memory and prints the KV blocks, tokens and sequences that fit."""
    budget = scenario.budget(**ask.model_dump())
    assert budget is not None
    if output.json_only:
        console.print_json({**as_dict(budget), "engine": scenario.engine, "defaults": scenario.defaults})
    elif output.explain:
        show(budget, engine_defaults(scenario))
    else:
        show_answer(budget, scenario)
    if budget.out_of_memory is not None:
        raise typer.Exit(BadInput.exit_code)


def as_dict(budget: HbmBudget) -> dict[str, Any]:
    """The budget as plain JSON: bytes, blocks, tokens, and sequences by their length."""
    figures = budget.bytes_per_token
    return {
        "model": budget.model,
        "gpu": budget.gpu,
        "tensor_parallel_size": budget.tensor_parallel_size,
        "total_bytes": budget.total_bytes,
        "starts": budget.out_of_memory is None,
        "items": [
            {"name": i.name, "bytes": i.bytes, "counted": i.counted, "detail": i.detail} for i in budget.items
        ],
        "limit": budget.limit,
        "kv_bytes": budget.kv_bytes,
        "block_size": budget.layout.block_size,
        "block_bytes": budget.layout.block_bytes,
        "kv_groups": budget.kv_groups,
        "num_gpu_blocks": budget.num_gpu_blocks,
        "uncertain_blocks": budget.uncertain_blocks,
        "kv_tokens": budget.kv_tokens,
        "bytes_per_token": {
            "sequence_tokens": figures.sequence_tokens,
            "theoretical": figures.theoretical,
            "allocated": figures.allocated,
            "admissible": figures.admissible,
        },
        "sequences": {str(tokens): budget.sequences(tokens) for tokens in LENGTHS},
        "notes": notes_of(budget),
    }


def notes_of(budget: HbmBudget) -> list[str]:
    """Sentences that qualify a budget; the first is on memory that is missing, where it is."""
    missing = budget.out_of_memory
    return [*([] if missing is None else [sentence(missing)]), *budget.notes]


def show_answer(budget: HbmBudget, scenario: Scenario) -> None:
    """Prints whether the model starts, the tokens and sequences that fit, and the largest items."""
    each = f"each of {budget.tensor_parallel_size} x " if budget.tensor_parallel_size > 1 else ""
    missing = budget.out_of_memory
    unsure = f", give or take {budget.uncertain_blocks:,} on a real start" if budget.uncertain_blocks else ""
    longest = scenario.max_model_len or max(LENGTHS)
    fits = ", ".join(
        f"{budget.sequences(tokens):,} of {tokens // 1024}k" for tokens in LENGTHS if tokens <= longest
    )
    # Layers with windows keep few tokens of a long sequence, so that no one number of tokens fits.
    tokens = f"; KV for {budget.kv_tokens:,} tokens in all" if budget.kv_groups == 1 else ""
    starts = f"starts{tokens}" if missing is None else "does not start"
    lines = [
        f"{budget.model} on {each}{budget.gpu}: {starts}",
        f"sequences at once: {fits} tokens" if missing is None else sentence(missing),
        f"KV blocks: {budget.num_gpu_blocks:,} of {budget.layout.block_size} tokens{unsure}; "
        f"set by {budget.limit}",
    ]
    items = sorted((item for item in budget.items if item.bytes >= 0), key=lambda item: -item.bytes)
    others = items[_MOST_ITEMS:]
    table = Table(box=None, pad_edge=False)
    for title in (f"of {budget.total_bytes / GIB:.1f} GiB", "GiB", "share", ""):
        table.add_column(title, justify="right" if title in ("GiB", "share") else "left", no_wrap=True)
    for item in items[:_MOST_ITEMS]:
        share = f"{item.bytes / budget.total_bytes:.1%}"
        table.add_row(item.name, f"{item.bytes / GIB:.2f}", share, item.detail)
    if others:
        total = sum(item.bytes for item in others)
        names = ", ".join(item.name for item in others)
        table.add_row("others", f"{total / GIB:.2f}", f"{total / budget.total_bytes:.1%}", names)
    short = sum(-item.bytes for item in budget.items if item.bytes < 0)
    if short:
        share = f"{short / budget.total_bytes:.1%}"
        table.add_row("missing", f"{short / GIB:.2f}", share, "more than the GPU has")
    lines += table_rows(table)
    show_block(lines, budget.notes, more=[rules(scenario)])


def show(budget: HbmBudget, defaults: str) -> None:
    """Prints `defaults`, the items, the three bytes-per-token figures, and what fits."""
    each = f"each of {budget.tensor_parallel_size} x " if budget.tensor_parallel_size > 1 else ""
    total = f"{budget.total_bytes / GIB:.2f} GiB"
    console.out.print(f"{budget.model} on {each}{budget.gpu}: {total}", soft_wrap=True)
    if defaults:
        console.out.print(defaults, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for title, side in (("item", "left"), ("GiB", "right"), ("share", "right")):
        table.add_column(title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("")
    for item in budget.items:
        share = item.bytes / budget.total_bytes
        star = "" if item.counted else "*"
        table.add_row(item.name + star, f"{item.bytes / GIB:.2f}", f"{share:.1%}", item.detail)
    console.out.print(table)
    console.out.print("* not counted in gpu_memory_utilization: must fit in what that leaves", soft_wrap=True)
    console.out.print(_figures(budget))
    for note in notes_of(budget):
        console.out.print(f"note: {note}", soft_wrap=True, markup=False)


def _figures(budget: HbmBudget) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    unsure = f", give or take {budget.uncertain_blocks:,} on a real start" if budget.uncertain_blocks else ""
    table.add_row("KV blocks", f"{budget.num_gpu_blocks:,} of {budget.layout.block_size} tokens{unsure}")
    table.add_row("KV tokens", f"{budget.kv_tokens:,}, set by {budget.limit}")
    per = budget.bytes_per_token
    table.add_row(
        "bytes per token",
        f"{per.theoretical:,.0f} theoretical, {per.allocated:,.0f} allocated, {per.admissible:,.0f} "
        f"admissible (sequences of {per.sequence_tokens:,} tokens)",
    )
    if budget.out_of_memory is None:
        fits = ", ".join(f"{budget.sequences(tokens):,} of {tokens // 1024}k" for tokens in LENGTHS)
        table.add_row("sequences", f"{fits} tokens")
    return table
