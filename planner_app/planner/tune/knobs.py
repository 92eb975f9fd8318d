"""Tuning of block size and HBM for KV: every value is replayed, one is recommended, with the reason.

    tuned = tune(trace, scenario, "block_size")
    print(tuned.table, tuned.recommended, tuned.reason)

Larger blocks have shorter tables and fewer lookups; smaller ones find more prefixes and waste less in a
sequence's last block. More HBM for KV holds more prefixes and more requests; less leaves room for others.
With an SLO the recommendation is that of `choice.py`, as on the dashboard: by the load that a setting admits,
then by latency, then by memory left. Without one, or without simulated users, it is the furthest setting in
the thrifty direction (larger blocks, less HBM) that costs nothing worth mention of hits and latency
(`CRITERIA`). Times and hits are of the requests that were served, and so are compared only among settings
that lose the fewest requests (`LOST`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd
from pagecast.planner_app.planner.execution.executor import Serial
from pagecast.planner_app.planner.execution.interface import Executor, Progress
from pagecast.planner_app.planner.slo import Slo
from pagecast.planner_app.planner.sweep.space import KnobValue, parse_space, shown
from pagecast.planner_app.planner.tune.choice import choose
from pagecast.planner_app.planner.tune.options import TuneOptions
from pagecast.planner_app.planner.tune.setting import Tuning
from pagecast.planner_app.planner.tune.worth import worth
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.planner_app.wording.quantities import counted, seconds
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay.notes import idle_note
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

USUAL = {  # values that are tried, by the knob
    "block_size": "8,16,32,64,128,256",
    "gpu_memory_utilization": "0.1:0.9:0.1,0.95",
    "free_gpu_memory_fraction": "0.05,0.1:0.9:0.1,0.95",
}
ALWAYS_SAME = (
    "Step costs don't depend on the block size here: pages of 16 to 256 tokens differ by 2% in decode and 7% "
    "in prefill (measured: tests/benchmarks/RESULTS.md). Lookup time goes by the prompt's tokens, as it "
    "was measured at the calibration's block size; the number of blocks looked up shows how it would change."
)


class Criterion(NamedTuple):
    """A figure that a recommended setting keeps within `tolerance` (a part) of the best setting's."""

    figure: str
    title: str
    more_is_better: bool
    tolerance: float


HITS = Criterion("reused_prefix_tokens", "hit tokens", True, 0.01)
TTFT = Criterion("ttft_mean_s", "mean TTFT", False, 0.05)
E2E = Criterion("e2e_mean_s", "mean E2E", False, 0.02)  # not TPOT: that is short where many wait and few run
ROOM = Criterion("static_concurrency", "room for requests at once", True, 0.01)
ADMITS = Criterion("admissible_concurrency", "users admitted", True, 0.04)  # twice what a search leaves open
LOST = ("rejected", "unserved")  # counts of which a recommended setting has no more than the best has
CRITERIA = (ADMITS, HITS, ROOM, TTFT, E2E)


@dataclass(frozen=True)
class TuneResult:
    """`table` has a row per value of `knob`, with the figures of `Tuning.run`; one value is recommended.

    Further columns are `meets`, `reason` (why the setting can't run), and, where it was asked for,
    `admissible_concurrency` and `admissible_at_limit`. `recommended` is None where `recommends` is False, and
    where it is the default (`none`).
    `costs` names the step costs of all settings, and `expected_error` says how far they may be off.
    `complete` is False where it was stopped.
    """

    trace: str
    scenario: Scenario
    knob: str
    slo: str
    table: pd.DataFrame
    recommended: KnobValue
    reason: str
    notes: tuple[str, ...]
    complete: bool = True
    costs: str = ""
    expected_error: str = ""

    @property
    def is_chosen(self) -> list[bool]:
        """Whether each row of the table is of the recommended value."""
        return [self.recommends and value == self.recommended for value in self.table[self.knob]]

    @property
    def recommends(self) -> bool:
        """Whether a value is recommended; if not, `reason` says why."""
        return len(_candidates(self.table)) > 0


def budget_knob(scenario: Scenario) -> str:
    """The field that sets a scenario's HBM budget. Errors: BadInput where blocks or tokens are fixed."""
    for name in ("num_gpu_blocks", "kv_tokens"):
        if getattr(scenario, name) is not None:
            raise BadInput(f"{name} fixes the KV cache: leave it out to tune the HBM budget")
    free = scenario.free_gpu_memory_fraction is not None
    return "free_gpu_memory_fraction" if free else "gpu_memory_utilization"


def values_of(scenario: Scenario, knob: str, ask: TuneOptions) -> list[KnobValue]:
    """The values to try. Errors: BadInput.

    Values ascend, in whatever order they were written; the default (`none`) comes last. The usual ones hold
    the one in force too.
    """
    values = ask.values or USUAL[knob]
    (space_knob,) = parse_space([f"{knob}={values}"], scenario).knobs
    if not space_knob.values:
        raise BadInput(f"--values {values}: a range needs a step, FROM:TO:STEP")
    own = () if ask.values else (getattr(scenario, knob),)
    tried = dict.fromkeys((*space_knob.values, *own))
    return sorted(tried, key=lambda value: float("inf" if value is None else value))


def tune(
    trace: Trace,
    scenario: Scenario,
    knob: str,
    ask: TuneOptions | None = None,
    run: Executor | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> TuneResult:
    """Serves the trace at each value of `block_size`, or of `budget_knob`'s, and recommends one.

    `run`: where replays run, by default in this process. `progress` is called with the number of values done.
    Errors: BadInput.
    """
    ask = ask or TuneOptions()
    level = Slo.optional(ask.slo)
    values = values_of(scenario, knob, ask)
    results: dict[int, dict[str, Any]] = {}
    tuning = Tuning(trace, scenario, knob, level, not ask.static)
    answers = (run or Serial()).until_interrupt(tuning.run, values)
    for index, figures in answers:
        results[index] = figures
        if progress is not None:
            progress(len(results))
        if stop is not None and stop():
            break
    answers.close()
    table = _table(knob, values, results)
    complete = len(results) == len(values)
    recommended, reason = recommend(table, knob)
    notes = (*trace.notes, *_notes(scenario, knob), *filter(None, [idle_note(trace, scenario)]))
    ran = [value for value in values if isinstance(value, int | float) and _ran(table, knob, value)]
    if complete and ran and level.terms and not ask.static and len(_candidates(table)):
        choice = choose(trace, scenario, knob, level.text, values=ran)
        recommended = next(value for value in ran if value == choice.best.value)
        reason = (
            f"{knob} {shown(recommended)}. {worth(choice, by_value=True)}{_at_top(recommended, values, ran)}"
        )
    elif recommended is not None:
        notes = (*notes, _tolerances(table))
    costs = scenario.step_costs()
    return TuneResult(
        trace.name,
        scenario,
        knob,
        level.text,
        table,
        recommended,
        reason,
        notes,
        complete,
        costs.name,
        sentence(costs.expected_error()),
    )


def _at_top(value: KnobValue, tried: Sequence[KnobValue], ran: Sequence[float]) -> str:
    """A sentence where the best is the largest of several values, beyond which nothing is known."""
    if len(ran) < 2 or value != ran[-1]:
        return ""
    last = [each for each in tried if each is not None][-1]
    return " It is the largest that " + ("was tried; --values tries others." if value == last else "starts.")


def _ran(table: pd.DataFrame, knob: str, value: KnobValue) -> bool:
    return bool((table[table[knob] == value]["reason"] == "").all())


def _notes(scenario: Scenario, knob: str) -> list[str]:
    """What all block sizes have in common."""
    if knob != "block_size":
        return []
    fixed = "num_gpu_blocks is fixed, so that larger blocks are given more memory."
    return [ALWAYS_SAME] if scenario.num_gpu_blocks is None else [ALWAYS_SAME, fixed]


def _tolerances(table: pd.DataFrame) -> str:
    """What it takes to keep up with the best of all values."""
    within = ", ".join(
        f"{each.title} within {each.tolerance:.0%}" for each in CRITERIA if each.figure in table
    )
    return f"A value keeps up with the best of all where it has {within}."


def _table(knob: str, values: Sequence[KnobValue], results: dict[int, dict[str, Any]]) -> pd.DataFrame:
    """One row per value that was tried."""
    rows = [{knob: value, **results[row]} for row, value in enumerate(values) if row in results]
    table = pd.DataFrame(rows)
    if any(value is None for value in values):  # the default, which is no number, stays what it is
        table[knob] = pd.Series([row[knob] for row in rows], dtype=object)
    return table


def recommend(table: pd.DataFrame, knob: str) -> tuple[KnobValue, str]:
    """The thriftiest value that is as good as any within the tolerances, and the reason in a sentence.

    Rows of `table` ascend by the knob.
    """
    if not len(table):
        return None, "nothing was tried"
    if (table["reason"] != "").all():
        return None, table["reason"].iloc[0]
    rows: list[dict[str, Any]] = _candidates(table).to_dict("records")  # type: ignore[assignment]
    if not rows:
        return None, "no request completes at any of these values"
    thrifty_is_more = knob == "block_size"
    criteria = [each for each in CRITERIA if each.figure in table]
    least = {name: min(row[name] for row in rows) for name in LOST}
    equal = [row for row in rows if not _lost(row, least)]
    best = {each: _best(each, equal) for each in criteria}
    some_meet = any(row["meets"] for row in rows)
    misses = [_lost(row, least) or _misses(row, best, some_meet) for row in rows]
    order = range(len(rows) - 1, -1, -1) if thrifty_is_more else range(len(rows))
    choice = next((at for at in order if not misses[at]), None)
    if choice is None:
        at = min(order, key=lambda at: max(miss.times for miss in misses[at]))
        reasons = "; ".join(miss.text for miss in misses[at])
        value = rows[at][knob]
        return value, f"{knob} {shown(value)}, a compromise, for no value is best in all: {reasons}."
    return rows[choice][knob], _reason(rows, misses, choice, knob, thrifty_is_more)


def _candidates(table: pd.DataFrame) -> pd.DataFrame:
    """The values at which some request completes: only these can be recommended."""
    ran = table[table["reason"] == ""] if len(table) else table
    return ran[ran["completed"] > 0] if len(ran) else ran


class _Miss(NamedTuple):
    """Why a setting is not as good as the best: in words, and in multiples of what is tolerated."""

    text: str
    times: float


def _best(criterion: Criterion, rows: Sequence[dict[str, Any]]) -> float | None:
    values = [row[criterion.figure] for row in rows if row[criterion.figure] == row[criterion.figure]]
    values = [value for value in values if value is not None]
    if not values:
        return None
    return float(max(values) if criterion.more_is_better else min(values))


def _lost(row: dict[str, Any], least: dict[str, int]) -> list[_Miss]:
    """Whether more requests are lost than at the best of all values. Its times and hits are of fewer then."""
    return [
        _Miss(f"{counted(int(row[name]), 'request')} {name}", 1e6 * (row[name] - count))
        for name, count in least.items()
        if row[name] > count
    ]


def _misses(row: dict[str, Any], best: dict[Criterion, float | None], some_meet: bool) -> list[_Miss]:
    """The figures in which a value that loses no more requests than others falls short of them."""
    misses = []
    if some_meet and not row["meets"]:
        misses.append(_Miss("the SLO is missed", 1e5))
    for criterion, top in best.items():
        value = row[criterion.figure]
        if top is None or value is None or value != value or not top:
            continue
        away = 1 - value / top if criterion.more_is_better else value / top - 1
        if away > criterion.tolerance:
            side = "fewer" if criterion in (HITS, ADMITS) else "less" if criterion is ROOM else "longer"
            misses.append(
                _Miss(f"{away:.1%} {side} {criterion.title} than the best", away / criterion.tolerance)
            )
    return misses


def _reason(
    rows: list[dict[str, Any]],
    misses: list[list[_Miss]],
    choice: int,
    knob: str,
    thrifty_is_more: bool,
) -> str:
    row, value = rows[choice], shown(rows[choice][knob])
    most = "largest" if thrifty_is_more else "smallest"
    admits, hits = row.get(ADMITS.figure), row[HITS.figure]
    targets = (
        ("" if admits is None or admits != admits else f"{counted(int(admits), 'user')} admitted, ")
        + ("" if hits is None or hits != hits else f"{hits:,.0f} hit tokens, ")
        + f"mean TTFT {seconds(row['ttft_mean_s'])}, room for "
        f"{row['static_concurrency']:,.0f} requests at once"
    )
    text = f"{knob} {value}, the {most} value as good as the best: {targets}."
    after = choice + (1 if thrifty_is_more else -1)
    if not 0 <= after < len(rows):
        text += f" Nothing {'larger' if thrifty_is_more else 'smaller'} that runs was tried."
    elif misses[after]:
        reasons = "; ".join(miss.text for miss in misses[after])
        text += f" {shown(rows[after][knob])} would mean {reasons}."
    return text
