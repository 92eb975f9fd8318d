"""A sweep in words and rows of text: for the terminal, the report and the dashboard alike."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import pandas as pd
from pagecast.planner_app.planner.slo import Goodput, Latency, TermVerdict, excess
from pagecast.planner_app.planner.sweep.space import shown
from pagecast.planner_app.planner.sweep.study import MATTERS, SweepResult, record
from pagecast.planner_app.planner.sweep.trial import COUNTS
from pagecast.planner_app.wording.quantities import seconds

_YES_OR_NO = ("meets", "on_front")
_SHARES = ("token_hit_rate", "peak_kv_usage")
_SHED = "predicted TTFT"
_CURES = {  # what serves more requests, by how the reason of their rejection begins
    _SHED: "Less load (--rate), more GPUs or a longer --shed-ttft-s",
    "its replica was lost": "More retries of the fleet (`retries.most`)",
    "no replica was left": "More replicas, or fewer incidents,",
}


def text(name: str, value: Any) -> str:
    """A figure, a knob or a term of the SLO as people read it."""
    if value is None or (isinstance(value, float) and value != value):
        return "-"
    if name in _YES_OR_NO:
        return "yes" if value else "no"
    if isinstance(value, bool | str):
        return shown(value)
    if name.startswith("usd"):
        return f"${value:,.2f}"
    if name.endswith("_s") and not name.endswith("_per_s"):
        return seconds(value)
    if name in _SHARES or name.startswith("goodput"):
        return f"{value:.1%}"
    if "<" in name:
        return seconds(value)
    if name in COUNTS or isinstance(value, int):
        return f"{value:,}" if name not in ("number",) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def title(name: str) -> str:
    """A column's name as a heading that can be broken into lines."""
    short = {
        "usd_per_hour": "$ per hour",
        "usd_per_million_output_tokens": "$ per M output tokens at this load",
    }
    plain = name.removesuffix("_s") if not name.endswith("_per_s") else name
    for word in ("ttft", "tpot", "e2e", "kv", "gpu"):
        plain = plain.replace(f"{word}_", f"{word.upper()}_")
    return short.get(name, plain.replace("_", " "))


def setting(result: SweepResult, row: Mapping[str, Any]) -> str:
    """A trial's knobs as `name=value`."""
    return " ".join(f"{name}={shown(row[name])}" for name in result.knobs)


def answer(result: SweepResult, *, short: bool = False) -> str:
    """One to three sentences: the cheapest replica, or why there is none. `short`: without its reasons."""
    question, table = result.question, result.table
    stopped = "" if result.complete else " The sweep was stopped before its end."
    best = result.cheapest
    ran = table[table["reason"] == ""]
    if best is None:
        return _none(result, ran) + stopped
    cost = f"at ${best['usd_per_hour']:,.2f} per hour" if question.prices else f"on {_gpus(best['gpus'])}"
    each = best.get("usd_per_million_output_tokens")
    tokens = f", ${each:,.2f} per million output tokens at this load" if each else ""
    level = f" that meets {question.slo}" if question.slo else ""
    others = int((table["meets"] & (table[result.cost] == best[result.cost])).sum()) - 1
    reason = "the tightest term of the SLO has most room" if question.slo else "p99 TTFT is lowest"
    reason = reason if question.loads is None else "output tokens per second are most"
    choice = "Pareto-optimal one" if best["on_front"] else "one"
    unit = "GPU hours" if result.cost == "gpu_hours" else "GPUs"
    same = "cost the same" if question.prices else f"take as many {unit}"
    equal = f" Of {others + 1} that {same} it is the {choice} where {reason}." if others else ""
    if not best["on_front"]:
        equal += " It is not among the Pareto-optimal ones below, whose objectives leave the cost out."
    names = (*(_terms(result) or ("ttft_p99_s", "tpot_p95_s")), "output_tokens_per_s")
    figures = ", ".join(f"{title(_measure(name))} {text(name, best[name])}" for name in names)
    if question.fleet is not None:
        cost = f"{cost}, {best['gpu_hours']:,.2f} GPU hours"
    costs = f" Its step costs are {best['step_costs']}, others' are not." if differ(result) else ""
    cheapest = f"{best_word(result)} {subject(result)}{level}: {setting(result, best)}"
    rest = f"All {others + 1} trials" if others + 1 == len(table) else f"{others} more"
    meet = " meet it and" if question.slo else ""
    alike = f" {rest}{meet} {same}; in this one {reason}." if others else ""
    return f"{cheapest}, {cost}{tokens}: {figures}.{alike if short else equal + costs}{stopped}"


def nothing_differs(result: SweepResult) -> str:
    """A sentence where no value of any knob makes a difference; empty where one does."""
    ran = result.table[result.table["reason"] == ""]
    if len(ran) < 2 or len(ran) < len(result.table):
        return ""
    names = list(dict.fromkeys([*result.question.objectives, *_terms(result), result.cost]))
    for name in names:
        values = pd.to_numeric(ran[name], errors="coerce")
        if values.isna().any() and not values.isna().all():
            return ""
        if values.max() - values.min() > MATTERS * abs(values.max()):
            return ""
    figures = ", ".join(f"{title(_measure(name))} {text(name, ran[name].iloc[0])}" for name in names)
    return (
        f"it makes no difference: all {len(ran):,} trials have the same figures within {MATTERS:.1%}, so "
        f"keep {', '.join(result.knobs)} as it is ({figures})"
    )


def _terms(result: SweepResult) -> list[str]:
    """The texts of the SLO's terms, which are columns of the table."""
    return [term.text for term in result.question.level.terms]


def _measure(name: str) -> str:
    """The figure that a term bounds: `ttft_p99` of `ttft_p99<2s`; another column's name stays."""
    return "goodput" if name.startswith("goodput") else name.partition("<")[0]


def best_word(result: SweepResult) -> str:
    """What the best is called: without a price nothing is known of what it costs."""
    return "cheapest" if result.question.prices else "best"


def subject(result: SweepResult) -> str:
    """The subject of a trial: "replica" or "fleet"."""
    return "replica" if result.question.fleet is None else "fleet"


def differ(result: SweepResult) -> bool:
    """Whether trials that ran were served with different step costs."""
    ran = result.table[result.table["reason"] == ""]
    return ran["step_costs"].nunique() > 1


def _none(result: SweepResult, ran: pd.DataFrame) -> str:
    """Why no trial meets the SLO, and which comes closest."""
    serving = ran[ran["rejected"] == 0]
    if not len(serving):
        fitting = ran[ran["rejected_at_any_load"] == 0]
        if not len(fitting):
            return "no scenario of the space serves every request: more HBM or a longer max_model_len would."
        fewest = record(fitting.sort_values(["rejected", "number"]).head(1))
        most = f"{setting(result, fewest)} rejects the fewest, {fewest['rejected']:,}"
        return f"no scenario of the space serves every request: {_advice(result, fewest['number'], most)}"
    closest = record(serving.sort_values(["margin", "number"], ascending=[False, True]).head(1))
    terms = [term.text for term in result.question.level.terms]
    figures = ", ".join(f"{name}: {text(name, closest[name])}" for name in terms)
    figures += f"; {closest['unserved']:,} requests are not served" if closest["unserved"] else ""
    figures += "" if closest["lasts"] else "; it breaks when the load goes on, as it does in a plan"
    return (
        f"no scenario of the space meets {result.question.slo}; the closest is {setting(result, closest)} "
        f"({figures}). `pagecast plan` tells what one replica takes, and how many it would need."
    )


def _advice(result: SweepResult, number: int, most: str) -> str:
    """Why a trial rejects requests, what it rejects (`most`), and what would serve more of them."""
    reasons = result.rejections.get(number, {})
    if not reasons:  # a study of an earlier version
        return f"{most}. A `pagecast replay` of it tells the reasons."
    cures = [cure for start, cure in _CURES.items() if any(reason.startswith(start) for reason in reasons)]
    if all(reason.startswith(_SHED) for reason in reasons):
        most = f"the load is too high, and {most}"
    counts = ", ".join(f'{count:,} as "{reason}"' for reason, count in reasons.items())
    return " ".join([f"{most} ({counts}).", *(f"{cure} would serve more." for cure in cures)])


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def front(result: SweepResult) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the Pareto-optimal trials; those that are equal in all objectives are one row.

    The terms of the SLO that are no objectives have columns too.
    """
    objectives = list(result.question.objectives)
    rows = result.front
    costs = ("usd_per_hour", "usd_per_million_output_tokens")
    extra = [name for name in costs if name in rows] or ["gpus"]
    terms = [name for name in _terms(result) if f"{_measure(name)}_s" not in objectives]
    columns = ["step_costs"] if differ(result) else []
    names = list(dict.fromkeys([*result.knobs, *objectives, *terms, *extra, *columns]))
    header = ["trial", *map(title, names), "equal to it"]
    body = []
    for _, group in rows.groupby(objectives, sort=False, dropna=False):
        first = record(group.head(1))
        more = f"{len(group) - 1:,} more" if len(group) > 1 else ""
        body.append([str(first["number"]), *(text(name, first[name]) for name in names), more])
    return header, body


def all_trials(result: SweepResult) -> tuple[list[str], list[list[str]]]:
    """Header and rows of all trials: those that meet the SLO by their cost, then those that miss it by how
    far, then those that can't run, each with the reason.
    """
    table, terms = result.table, _terms(result)
    if "margin" not in table or "ttft_p99_s" not in table:  # none can run
        table = table.assign(margin=None, ttft_p99_s=None, tpot_p95_s=None)
    keys = table.assign(
        _runs=table["reason"] != "",
        _misses=~table["meets"].astype(bool),
        _far=-pd.to_numeric(table["margin"]).fillna(0.0),
    )
    order = keys.sort_values(["_runs", "_misses", result.cost, "_far", "number"], kind="stable")
    names = [*result.knobs, result.cost, *(terms or ("ttft_p99_s", "tpot_p95_s"))]
    names = [name for name in names if name in table]
    body = []
    for index in order.index:
        row = record(table.loc[[index]])
        body.append([str(row["number"]), *(text(name, row[name]) for name in names), _verdict(result, row)])
    if nothing_differs(result):  # nor is one the cheapest
        body = [["" if cell == best_word(result) else cell for cell in line] for line in body]
    return ["trial", *map(title, names), ""], body


def _verdict(result: SweepResult, row: Mapping[str, Any]) -> str:
    """Whether a trial meets the SLO, and if not, what it misses and by how much."""
    if row["reason"]:
        return str(row["reason"]).partition(";")[0].partition(":")[0]
    if row["meets"]:
        return best_word(result) if result.cheapest and result.cheapest["number"] == row["number"] else ""
    if row["rejected"]:
        return f"rejects {row['rejected']:,} requests"
    if not row["lasts"]:
        return "breaks the SLO when the load goes on"
    beyond = []
    for term in result.question.level.terms:
        value = row.get(term.text)
        if value is None or value != value:
            continue
        far = excess(TermVerdict(term.text, value, _bound(term), False))
        if far >= 1:
            beyond.append(f"{_measure(term.text)} by {far - 1:.0%}" if far < inf else _measure(term.text))
    return f"misses {', '.join(beyond)}" if beyond else f"{row['unserved']:,} requests not served"


def _bound(term: Latency | Goodput) -> float:
    return term.bound_s if isinstance(term, Latency) else term.bound


def effects(result: SweepResult) -> tuple[list[str], list[list[str]]]:
    """Header and rows of what each knob moves: the share it explains, and the mean at its best and worst."""
    header = ["knob", "figure", "share", "least mean", "at", "greatest mean", "at"]
    body = [
        [
            row["knob"],
            title(row["figure"]),
            f"{row['share']:.0%}",
            text(row["figure"], row["low"]),
            shown(row["at_low"]),
            text(row["figure"], row["high"]),
            shown(row["at_high"]),
        ]
        for row in result.sensitivity.to_dict("records")
        if abs(row["high"] - row["low"]) > MATTERS * abs(row["high"])
    ]
    return header, body
