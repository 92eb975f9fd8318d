"""The cards of the what-if, from what is known by now: point figures always, the rest as its jobs end."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagecast.planner_app.dashboard.shell.cards import Card, LaterCard, Words
from pagecast.planner_app.dashboard.shell.replays import result_for, trace_for
from pagecast.planner_app.dashboard.shell.starting import start_problem
from pagecast.planner_app.dashboard.shell.state import Session
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.dashboard.what_if.admissible import (
    INTERVAL,
    POINT,
    Admissible,
    envelope_of,
    known_of,
)
from pagecast.planner_app.dashboard.what_if.advice import advice_on, advice_on_cost, advice_on_load
from pagecast.planner_app.planner.capacity.envelope import binds
from pagecast.planner_app.planner.prices import usd_per_million_tokens
from pagecast.planner_app.planner.slo import Slo
from pagecast.planner_app.wording.quantities import seconds
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.replay import Result
from pagecast.sim.replay.replicates import Spread, summary_figures
from pagecast.traces.schema import Trace

Verdicts = dict[str, tuple[tuple[str, bool], ...]]
_CONCURRENCY = "Admissible concurrency"
WITH_CARDS = ("ttft", "tpot")  # latencies whose terms stand on a card; others stand below


@dataclass(frozen=True, slots=True)
class ViewResults:
    """The results of one view so far; `waiting` has a text on the progress of each job.

    `lost_hits`: share of block references that the cache misses and an endless one would find; None where
    that is not known.
    """

    view: PageView
    trace: Trace
    result: Result
    verdicts: Verdicts
    spread: Spread | None
    admissible: Admissible | None
    waiting: dict[str, str]
    lost_hits: float | None = None


def cards_of(own: Session, results: ViewResults) -> list[Card | LaterCard]:
    """The five cards."""
    figures, base = summary_figures(results.result), _Base(own, results.view)
    around = results.spread.around(figures) if results.spread else Spread()

    def card(name: str, title: str, words: Words, help: str, **more: Any) -> Card:
        unknown = name == "token_hit_rate" and name not in figures
        value = figures.get(name)
        return Card(
            title,
            None if value is None or math.isnan(value) else value,
            words,
            help,
            around.low.get(name),
            around.high.get(name),
            results.waiting["spread"],
            baseline=base.figures.get(name),
            verdicts=results.verdicts.get(name.split("_")[0], ()),
            advice=advice_on(
                name, results.result, results.verdicts.get(name.split("_")[0], ()), results.lost_hits
            ),
            note="the trace has no contents: reuse unknown" if unknown else "",
            **more,
        )

    return [
        LaterCard(_CONCURRENCY, partial(_concurrency, results, base)),
        card("ttft_s.p99", "TTFT, p99", seconds, "99% of requests have their first token within this time"),
        card("tpot_s.p99", "TPOT, p99", seconds, "time per output token after the first, 99th percentile"),
        card(
            "token_hit_rate",
            "Prefix reuse",
            "{:.1%}".format,
            "prompt tokens found in the cache, of those that whole blocks could have held",
            better=1,
            share=True,
        ),
        _cost(results),
    ]


def _cost(results: ViewResults) -> Card:
    """Cost of the tokens that this traffic takes, at the user's price of the GPU."""
    scenario = results.result.scenario
    price = results.view.prices().get(find_gpu(scenario.gpu).name)
    tokens_per_s = results.result.summary["output_tokens_per_s"]
    hourly = None if price is None else price * scenario.tensor_parallel_size
    return Card(
        "Cost",
        None if hourly is None else usd_per_million_tokens(hourly, tokens_per_s),
        "${:.2f}".format,
        "USD per million output tokens: the price of the replica's GPUs over the replay's output tokens",
        note="" if hourly is None else f"per million output tokens, at ${hourly:.2f} per hour and replica",
        advice=advice_on_cost(hourly is not None, results.result),
    )


def baseline_of(own: Session, view: PageView) -> PageView | None:
    """The pinned view to measure against; None without one, and where `view` is it."""
    pinned = own.pins.get(own.baseline)
    return None if pinned is None or pinned.key() == view.key() else pinned


class _Base:
    """The baseline's figures, where there is one and it is another view."""

    def __init__(self, own: Session, view: PageView) -> None:
        self.figures: dict[str, float] = {}
        self.admissible: Admissible | None = None
        pinned = baseline_of(own, view)
        if pinned is None:
            return
        try:
            trace = trace_for(own, pinned)
            result = None if trace is None else result_for(own, pinned, trace, "baseline")
            if trace is None or result is None:
                return
            self.figures = summary_figures(result)
            self.admissible = known_of(pinned)
        except BadInput:
            return


def _concurrency(results: ViewResults, base: _Base) -> Card:
    """The simulated answer with its interval, or greyed the static envelope until that is in."""
    room, answer = envelope_of(results.view, results.trace), results.admissible
    against = base.admissible
    starts = not start_problem(results.view)
    text = "" if room is None else f"static envelope {room.concurrency:,}: {binds(room.binding)}"
    if answer and answer.sentence:
        text = f"{answer.sentence}; {text}"
    value = float(answer.users) if answer else None if room is None else float(room.concurrency)
    terms = [term for terms in results.verdicts.values() for term in terms]
    return Card(
        _CONCURRENCY,
        value,
        "{:,.0f}".format,
        "the most users who each send their next request when the last is answered, at which the SLO holds "
        "and preemptions stay rare; grey: what fits by arithmetic, until the simulation has answered",
        answer.low if answer else None,
        answer.high if answer else None,
        results.waiting[INTERVAL if answer else POINT],
        pending=answer is None,
        baseline=against.users if answer and against else None,
        better=1,
        verdicts=(("the SLO at this load", all(holds for _, holds in terms)),) if terms and starts else (),
        note=text,
        advice=advice_on_load(room.binding if room else "", answer.users if answer else None)
        if starts
        else "Lower the HBM budget: the engine does not start.",
    )


def verdicts_of(view: PageView, result: Result) -> Verdicts:
    """Terms of the SLO and whether they hold, by the latency they bound (`goodput` for shares).

    Errors: BadInput for an SLO that can't be read.
    """
    if not view["slo"].strip():
        return {}
    verdicts: dict[str, list[tuple[str, bool]]] = {}
    for term in Slo.parse(view["slo"]).verdict(result).terms:
        what = re.split(r"[_(>]", term.text)[0]
        verdicts.setdefault(what, []).append((term.text, term.holds))
    return {what: tuple(terms) for what, terms in verdicts.items()}
