"""`pagecast plan --compare`: a plan for each of several servers, in one table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isinf
from typing import Any

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.output import Explained
from pagecast.planner_app.commands.plan_view import show
from pagecast.planner_app.commands.screen import room_below, show_block, table_rows
from pagecast.planner_app.planner.capacity.comparing import Compared, best, compare
from pagecast.planner_app.planner.capacity.options import CompareOptions, PlanOptions
from pagecast.planner_app.planner.capacity.planning import Answer
from pagecast.planner_app.planner.execution.executor import executor
from pagecast.planner_app.planner.execution.options import Many
from pagecast.planner_app.planner.sweep.space import parse_space, shown
from pagecast.planner_app.planner.traffic import traffic
from pagecast.planner_app.wording.assumed import rules
from pagecast.sim.note import Caution
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from rich.table import Table

_BREAKS = "breaks"
_MOST_ROWS = 6  # of servers, in the answer
_DRAWS = 20  # that tell one server from another


def plan_compared(
    work: Trace, scenario: Scenario, ask: PlanOptions, others: CompareOptions, many: Many, output: Explained
) -> None:
    """Prints a row for each server. Exit code 1 where none keeps the SLO, 130 after an interrupt.

    Errors: BadInput for a field or value that no scenario could have, and a GPU without a price.
    """
    draws = ask.replicates if "replicates" in ask.model_fields_set else 0
    ask = ask.model_copy(update={"replicates": draws, "explain": False})
    count = parse_space(others.compare, scenario).size or 0
    with executor(many) as run, console.progress("servers", count) as update:
        rows, complete = compare(work, scenario, ask, others.compare, run, update)
    winner = best(rows)
    if output.json_only:
        body: dict[str, Any] = {
            "trace": work.name,
            "requests": len(work),
            "slo": ask.slo,
            "complete": complete,
            "best": winner and winner.point,
            "servers": [row.to_dict() for row in rows],
        }
        console.print_json(body)
    else:
        _show(work, ask, rows, winner, count, explain=output.explain)
    if not complete:
        raise typer.Exit(130)
    if winner is None:
        raise typer.Exit(1)


def _show(
    work: Trace,
    ask: PlanOptions,
    rows: Sequence[Compared],
    winner: Compared | None,
    count: int,
    *,
    explain: bool,
) -> None:
    """Prints the cheapest, and a row for each server: with `explain` all of them, and the plan of each."""
    ordered = sorted(rows, key=lambda row: row.price)
    lines = [traffic(work)]
    if len(rows) < count:
        lines.append(f"interrupted: {len(rows)} of {count} servers were planned for")
    servers = console.counted(count, "server")
    if winner is None:
        lines.append(f"none of {servers} keeps SLO {ask.slo}")
    else:
        best_of = "cheapest" if winner.plan and winner.plan.cost else "best"
        lines.append(f"{best_of} of {servers} for SLO {ask.slo}: {_setting(winner)}{_cost(winner)}")
    plans = [row for row in ordered if row.plan is not None]
    most = len(ordered) if explain else min(_MOST_ROWS, room_below(lines) - 2)
    lines += table_rows(_table(plans[:most])) if plans else []
    if len(plans) > most:
        lines.append(f"and {len(plans) - most} that cost more")
    lines += [f"{_setting(row)}: {row.reason}" for row in ordered if row.plan is None]
    notes = _undecided(winner, plans)
    if not explain:
        servers_planned = [row.plan.scenario for row in plans if row.plan is not None]
        more = [rules(*servers_planned, varied=plans[0].point)] if plans else []
        show_block(lines, notes, more=more)
        return
    for line in [*lines, *(f"note: {note}" for note in notes)]:
        console.out.print(line, soft_wrap=True)
    for row in plans:
        assert row.plan is not None
        console.out.print(f"\n{_setting(row)}", soft_wrap=True)
        show(row.plan)


def _undecided(winner: Compared | None, plans: Sequence[Compared]) -> list[str]:
    """A caution where other requests, or other draws of costs, may well put another server first."""
    others = [row for row in plans if row is not winner and row.keeps]
    if winner is None or not others:
        return []
    mine = _interval(winner)
    if mine is None:
        return [Caution(f"no intervals, so the order may be chance: --replicates {_DRAWS} tells")]
    near = [row for row in others if (span := _interval(row)) and span[0] <= mine[1] and mine[0] <= span[1]]
    if not near:
        return []
    return [Caution(f"not decided: the 90% interval of {_setting(near[0])} overlaps that of the first")]


def _interval(row: Compared) -> tuple[float, float] | None:
    """The 90% interval of the load that keeps the SLO, per USD or per GPU; None where no draws were made."""
    assert row.plan is not None
    plan, cost = row.plan, row.plan.cost
    price = cost.usd_per_replica_hour if cost else float(plan.scenario.tensor_parallel_size)
    most = plan.answers.get("rate") or plan.concurrency
    if most is None or most.low is None or most.high is None:
        return None
    return most.low / price, most.high / price


def _setting(row: Compared) -> str:
    return " ".join(f"{name}={shown(value)}" for name, value in row.point.items())


def _cost(row: Compared) -> str:
    assert row.plan is not None
    need, cost = row.plan.replicas, row.plan.cost
    text = "" if need is None else f", {console.counted(need.gpus, 'GPU')}"
    if cost is not None and cost.usd_per_hour is not None:
        text += f", ${cost.usd_per_hour:,.2f} per hour"
    return text


def _table(rows: Sequence[Compared]) -> Table:
    """A row for each server; columns that none fills are left out."""
    lines = [{**{name: shown(value) for name, value in row.point.items()}, **_cells(row)} for row in rows]
    table = Table(box=None, pad_edge=False)
    names = list(dict.fromkeys(key for line in lines for key in line))
    for name in names:
        left = name in rows[0].point or name == _BREAKS
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(line.get(name, "-") for name in names))
    return table


def _cells(row: Compared) -> dict[str, str]:
    if row.plan is None:
        return {}
    plan, cells = row.plan, {}
    users, rate = plan.concurrency, plan.answers.get("rate")
    if users is not None:
        cells["users"] = _value(users)
    if rate is not None:
        cells["requests/s"] = _value(rate)
    most = rate or users
    if most is not None and most.at is not None:
        cells["tokens/s"] = f"{most.at.output_tokens_per_s:,.0f}"
    if plan.replicas is not None:
        cells["GPUs"] = f"{plan.replicas.gpus:,}"
    if plan.cost is not None and plan.cost.usd_per_hour is not None:
        cells["$/hour"] = f"{plan.cost.usd_per_hour:,.2f}"
    if plan.cost is not None and plan.cost.usd_per_million_output_tokens is not None:
        cells["$/M tokens"] = f"{plan.cost.usd_per_million_output_tokens:,.2f}"
    cells["error of steps"] = f"{plan.step_times_percent:.0f}%"
    if most is not None and most.beyond is not None:
        names = [re.split("[<>]", term.text)[0] for term in most.beyond.broken]
        cells[_BREAKS] = " and ".join("the queue" if name == "backlog_growth" else name for name in names)
    return cells


def _value(answer: Answer) -> str:
    if answer.value is None:
        return "none"
    text = _number(answer.value)
    if answer.low is not None and answer.high is not None:
        text += f" ({_number(answer.low)} to {_number(answer.high)})"
    return text + (" or more" if answer.at_limit else "")


def _number(value: float) -> str:
    return "-" if isinf(value) else f"{value:,.0f}" if value >= 100 or value.is_integer() else f"{value:.3g}"
