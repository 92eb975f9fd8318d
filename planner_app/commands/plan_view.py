"""A plan on the console: the answer on one screen, or all that it rests on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pagecast.planner_app import console
from pagecast.planner_app.commands.screen import folded, room_below, show_block
from pagecast.planner_app.planner.traffic import traffic
from pagecast.planner_app.wording.assumed import assumed
from pagecast.planner_app.wording.costs_name import costs_name
from pagecast.planner_app.wording.engine_defaults import engine_defaults
from pagecast.planner_app.wording.quantities import counted
from rich.table import Table

if TYPE_CHECKING:
    from pagecast.planner_app.planner.capacity.binding import Binding
    from pagecast.planner_app.planner.capacity.envelope import Envelope
    from pagecast.planner_app.planner.capacity.planning import Answer, CapacityPlan
    from pagecast.traces.schema import Trace

_LOOPS = {"concurrency": " (closed loop)", "rate": " (open loop)"}
_TITLES = {
    "concurrency": "admissible concurrency",
    "rate": "highest request rate",
    "users": "users who think",
}


def show_answer(work: Trace, result: CapacityPlan, unshared: CapacityPlan | None = None) -> None:
    """Prints how much load the server takes, what breaks first, what would help, and how far to trust it.

    `unshared`: the plan without the reuse that was assumed.
    """
    scenario = result.scenario
    lines = [
        traffic(work),
        f"on {scenario.tensor_parallel_size} x {scenario.gpu} with {scenario.model}, SLO {result.slo.text}",
        *_buy(result),
    ]
    if any(answer.value is not None for answer in result.answers.values()):
        lines += console.table_lines(_table(result))
    lines += [] if unshared is None else [without_reuse_line(unshared)]
    lines += _drawn(result)
    lines += [line for answer in result.answers.values() for line in _first_to_break(answer)]
    notes = [note for note in (result.rejects, *result.notes) if note]
    took = f"{console.seconds(result.wall_s)}, {counted(result.replays, 'replay')}"
    trust, rules = assumed(scenario)
    if room_below(lines) < len(folded(trust)):  # what breaks last is told by --explain then
        lines.insert(len(lines) - 1, trust)
        trust = ""
    show_block(lines, notes, took, more=[*filter(None, [trust]), rules])


def _drawn(result: CapacityPlan) -> list[str]:
    """What the intervals are of."""
    draws = max((answer.draws for answer in result.answers.values()), default=0)
    return [f"90% interval: from {counted(draws, 'draw')} of {result.drawn}"] if draws else []


def without_reuse_line(result: CapacityPlan) -> str:
    """The other end of what an assumed reuse brackets."""
    most = [
        f"{_TITLES[answer.kind]} {'none' if answer.value is None else _number(answer.value)}"
        for answer in result.answers.values()
    ]
    need = result.replicas
    taken = "" if need is None else f": take {counted(need.count, 'replica')}"
    return f"without reuse{taken}; {', '.join(most)}"


def _buy(result: CapacityPlan) -> list[str]:
    """The replicas for the trace's rate, and what they cost."""
    need = result.replicas
    if need is None:
        return []
    text = f"take {counted(need.count, 'replica')} for {_number(need.requests_per_s)} requests/s"
    if need.gpus != need.count:
        text += f", {counted(need.gpus, 'GPU')}"
    if need.low is not None and need.low != need.high:
        text += f" (90%: {need.low:,} to {'any number' if need.high is None else f'{need.high:,}'})"
    cost = result.cost
    if cost is not None and cost.usd_per_hour is not None:
        text += f", ${cost.usd_per_hour:,.2f} per hour"
    if cost is not None and cost.usd_per_million_output_tokens is not None:
        text += f", ${cost.usd_per_million_output_tokens:,.2f} per million output tokens"
    return [text]


def _first_to_break(answer: Answer) -> list[str]:
    """What breaks just above an answer, and what would help; or why there is no answer."""
    from pagecast.planner_app.planner.capacity.planning import shown

    title = _TITLES[answer.kind]
    if answer.value is None or answer.at is None:
        return [f"{title}: none; {answer.sentence}"]
    if answer.sentence or answer.beyond is None:
        return [f"{title}: {answer.sentence}"]
    first = f"{shown(answer.kind, answer.beyond.amount)}: {_breaks(answer)}"
    return [f"at {first}{_helps(answer.binding)}"]


def _breaks(answer: Answer) -> str:
    assert answer.beyond is not None
    names = [re.split("[<>]", term.text)[0] for term in answer.beyond.broken]
    if names == ["backlog_growth"]:
        return "the queue keeps growing"
    told = ["the queue" if name == "backlog_growth" else name for name in names]
    return f"{' and '.join(told)} break{'s' if len(told) == 1 else ''}"


def _helps(bind: Binding | None) -> str:
    if bind is None or bind.without.holds:
        return ""
    from pagecast.planner_app.planner.capacity.binding import TWICE

    needs = {**TWICE, "compute": "a GPU twice as fast"}
    enough = [needs[each.limit] for each in bind.helped if each.holds]
    if enough:
        return f"; {' or '.join(enough)} would carry 25% more load{bind.less}"
    return f", limited by {bind.limit}; no one setting, doubled, would carry 25% more load{bind.less}"


def show(result: CapacityPlan) -> None:
    """Prints the answers, what breaks beyond them, what binds, and the envelope."""
    scenario = result.scenario
    console.out.print(
        f"{result.trace}: {result.requests:,} requests on {scenario.model}, "
        f"{scenario.tensor_parallel_size} x {scenario.gpu}, {scenario.profile.label}, "
        f"costs {costs_name(result.costs)}",
        soft_wrap=True,
    )
    if defaults := engine_defaults(scenario):
        console.out.print(defaults, soft_wrap=True)
    console.out.print(f"SLO: {result.slo.text}", soft_wrap=True)
    if result.rejects:
        console.out.print(result.rejects, soft_wrap=True)
    if any(answer.value is not None for answer in result.answers.values()):
        console.out.print(_table(result))
        for line in _drawn(result):
            console.out.print(line, soft_wrap=True)
    if result.replicas is not None:
        spread = "if sessions are spread evenly and each keeps to its replica"
        console.out.print(f"replicas: {result.replicas.sentence}, {spread}", soft_wrap=True)
    if result.cost is not None:
        console.out.print(f"cost: {result.cost.sentence}", soft_wrap=True)
    for answer in result.answers.values():
        for line in _lines(answer):
            console.out.print(line, soft_wrap=True)
    console.out.print(_envelope(result.envelope), soft_wrap=True)
    for note in result.notes:
        console.out.print(f"note: {note}", soft_wrap=True)
    console.out.print(f"planned in {result.wall_s:.1f} s with {result.replays:,} replays", soft_wrap=True)


def _table(result: CapacityPlan) -> Table:
    table = Table(box=None, pad_edge=False)
    draws = max(answer.draws for answer in result.answers.values())
    spans = ["90% interval"] if draws else []
    for title in ("", "most", *spans, "output tokens/s", "limit"):
        table.add_column(title, justify="left" if title in ("", "limit") else "right", no_wrap=True)
    for answer in result.answers.values():
        title = _TITLES[answer.kind] + _LOOPS.get(answer.kind, "")
        if answer.value is None or answer.at is None:
            table.add_row(title, "none")
            continue
        unit = "/s" if answer.kind == "rate" else ""
        span = (
            ""
            if answer.low is None or answer.high is None
            else (f"{_number(answer.low)} to {_number(answer.high)}")
        )
        limit = answer.binding.limit if answer.binding else "-"
        output = f"{answer.at.output_tokens_per_s:,.0f}"
        table.add_row(title, f"{_number(answer.value)}{unit}", *([span] if draws else []), output, limit)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value.is_integer() else f"{value:.3g}"


def _lines(answer: Answer) -> list[str]:
    """Lines that explain an answer: the SLO at it, terms that break above it, and the limit that binds."""
    from pagecast.planner_app.planner.capacity.planning import judgment, shown

    title = _TITLES[answer.kind]
    if answer.value is None or answer.at is None:
        return [f"{title}: none; {answer.sentence}"]
    lines = [f"{title}: at {shown(answer.kind, answer.value)} {', '.join(map(judgment, answer.at.terms))}"]
    if answer.at.counts.sentence:
        lines.append(f"  {answer.at.counts.sentence}")
    if answer.sentence:
        lines.append(f"  {answer.sentence}")
    if answer.beyond is not None:
        broken = " and ".join(
            f"{judgment(term)}, not {_bound_of(term.text)}" for term in answer.beyond.broken
        )
        counts = answer.beyond.counts.sentence
        lines.append(
            f"  at {shown(answer.kind, answer.beyond.amount)} {broken}" + (f": {counts}" if counts else "")
        )
    if answer.binding is not None:
        lines.append(f"  {answer.binding.sentence}")
        full = answer.binding.full
        lines.append(
            f"  at that load the batch is full {full['batch']:.0%} of the time, the token budget "
            f"{full['budget']:.0%}, requests wait for KV blocks {full['kv']:.0%}; "
            f"{full['kv_used']:.0%} of KV is in use"
        )
    return lines


def _bound_of(term: str) -> str:
    """The bound of a term: `<2s`, `>0.99`."""
    tail = term.rpartition(")")[2]
    return tail[min(at for at in (tail.find("<"), tail.find(">")) if at >= 0) :]


def _envelope(fits: Envelope) -> str:
    limits = ", ".join(f"{name} {value:,}" for name, value in fits.limits.items())
    alone = f"; by KV blocks {fits.hbm:,} if nothing is shared" if fits.hbm != fits.hbm_shared else ""
    return (
        f"room by arithmetic: {fits.concurrency:,} requests at once ({limits}{alone}); "
        f"{fits.pool_blocks:,} KV blocks, {fits.blocks.mean:,.0f} in use by a request on average, "
        f"{fits.blocks.most:,} at most"
    )
