"""The report of a plan: how much load keeps the SLO, what breaks beyond it, which limit binds."""

from __future__ import annotations

from pagecast.planner_app.planner.capacity.binding import NOTHING
from pagecast.planner_app.planner.capacity.bisection import LoadTrial
from pagecast.planner_app.planner.capacity.planning import Answer, CapacityPlan, shown
from pagecast.planner_app.reports import plan_charts as charts
from pagecast.planner_app.reports.html_page import HtmlTable, Section, SummaryCard, page
from pagecast.planner_app.reports.scenario_section import scenario_section
from pagecast.planner_app.wording.figures import shown as figure

TITLES = {
    "concurrency": "Admissible concurrency",
    "rate": "Highest request rate",
    "users": "Users who think",
}
UNITS = {"concurrency": "users", "rate": "requests/s", "users": "users"}
_SHARES = ("goodput", "preemptions", "kept_up", "served", "backlog_growth")  # the terms that are no times


def plan_report(result: CapacityPlan) -> str:
    """The page of a plan."""
    sections = [_answer(answer) for answer in result.answers.values()]
    alone = result.concurrency
    value, low, high = (None, 0.0, 0.0) if alone is None else _bounds(alone)
    bars = charts.envelope_bars(result.envelope.limits, value, low, high)
    sections.insert(1, Section("Static envelope", [bars, _envelope(result)]))
    sections.append(scenario_section(result.scenario, result.costs))
    return page(f"Capacity for {result.trace}", _lead(result), _cards(result), sections, result.notes)


def _lead(result: CapacityPlan) -> str:
    server = f"{result.scenario.tensor_parallel_size} x {result.scenario.gpu} with {result.scenario.model}"
    parts = []
    for answer in result.answers.values():
        parts.append(f"{TITLES[answer.kind].lower()}: {_value(answer)}{_interval(answer)}")
        if answer.binding is not None and answer.binding.limit != NOTHING:
            parts[-1] += f", bound by {answer.binding.limit}"
    if result.replicas is not None:
        parts.append(result.replicas.sentence)
    if result.cost is not None:
        parts.append(result.cost.sentence)
    return f"{server}, while {result.slo.text} holds: {'; '.join(parts)}. {result.rejects}".strip()


def _cards(result: CapacityPlan) -> list[SummaryCard]:
    cards = [
        SummaryCard(TITLES[answer.kind], _value(answer), _interval(answer).strip(" ()") or answer.sentence)
        for answer in result.answers.values()
    ]
    if result.replicas is not None:
        label = f"for {result.replicas.requests_per_s:.3g} requests/s"
        cards.append(SummaryCard("Replicas", f"{result.replicas.count:,}", label))
    bindings = [answer.binding for answer in result.answers.values() if answer.binding is not None]
    bound = [binding.limit for binding in bindings if binding.limit != NOTHING]
    if bound:
        cards.append(SummaryCard("What binds", bound[0], "must grow for more load"))
    envelope = result.envelope
    label = f"requests at once; {envelope.binding}"
    cards.append(SummaryCard("Static envelope", f"{envelope.concurrency:,}", label))
    return cards


def _value(answer: Answer) -> str:
    return "none" if answer.value is None else shown(answer.kind, answer.value)


def _interval(answer: Answer) -> str:
    if answer.low is None or answer.high is None:
        return ""
    low, high = shown(answer.kind, answer.low), shown(answer.kind, answer.high)
    return f" (90%, of {answer.draws} draws: {low.split()[0]} to {high.split()[0]})"


def _bounds(answer: Answer) -> tuple[float | None, float, float]:
    return answer.value, answer.low or answer.value or 0.0, answer.high or answer.value or 0.0


def _answer(answer: Answer) -> Section:
    """All loads tried of one kind, and the loads on both sides of the answer."""
    unit, bounds = UNITS[answer.kind], _bounds(answer)
    figures = [charts.terms_by_load(answer.tried, unit, *bounds)]
    if answer.kind != "rate":  # of a rate beyond what is served, tokens per second are asked for, not given
        figures.append(charts.throughput_by_load(answer.tried, unit, *bounds))
    why = [answer.sentence] if answer.sentence else []
    if answer.binding is not None:
        why.append(f"{answer.binding.sentence}.")
    return Section(TITLES[answer.kind], [*figures, _sides(answer, unit, " ".join(why))])


def _sides(answer: Answer, unit: str, why: str) -> HtmlTable:
    sides = [("at the answer", answer.at), ("just beyond", answer.beyond)]
    outcomes = [(name, outcome) for name, outcome in sides if outcome is not None]
    terms = list(dict.fromkeys(term.text for _, outcome in outcomes for term in outcome.terms))
    rows = [_row(name, outcome, terms) for name, outcome in outcomes]
    offered = "requests/s offered" if answer.kind == "rate" else unit
    header = ("", offered, *terms, "requests/s served", "output tokens/s", "preemptions per request")
    highlights = frozenset(at for at, (_, outcome) in enumerate(outcomes) if not outcome.holds)
    counts = [f"{name}: {outcome.counts.sentence}." for name, outcome in outcomes if outcome.counts.sentence]
    return HtmlTable("", header, rows, " ".join([why, *counts]).strip(), highlights)


def _row(name: str, outcome: LoadTrial, terms: list[str]) -> list[str]:
    values = {term.text: term.value for term in outcome.terms}
    return [
        name,
        f"{outcome.amount:,.4g}",
        *(figure("share" if term.startswith(_SHARES) else "time_s", values.get(term)) for term in terms),
        f"{outcome.requests_per_s:.3g}",
        *(
            (f"{outcome.output_tokens_per_s:,.0f}", f"{outcome.preemption_rate:.3g}")
            if outcome.requests
            else ("-", "-")
        ),
    ]


def _envelope(result: CapacityPlan) -> HtmlTable:
    envelope, blocks = result.envelope, result.envelope.blocks
    rows = [(name, f"{value:,}") for name, value in envelope.limits.items()]
    rows += [
        ("KV blocks, nothing shared", f"{envelope.hbm:,}"),
        ("KV blocks in the pool", f"{envelope.pool_blocks:,}"),
        ("blocks of a running request, mean", f"{blocks.mean:,.1f}"),
        ("blocks of the longest request", f"{blocks.most:,}"),
        ("prompt tokens that need not be computed", f"{envelope.reused_prompt:.0%}"),
        ("prompt blocks shared by running requests", f"{envelope.shared_prompt:.0%}"),
    ]
    caption = (
        "What each limit allows by itself, by arithmetic: blocks by the trace's own lengths at a random "
        f"moment of each request, overflowing with a chance of at most {envelope.overflow:.0%}."
    )
    return HtmlTable("", ("", "by arithmetic"), rows, caption)
