"""Sweep of a space of scenarios: the cheapest replica, the Pareto front, and the effect of each knob.

    question = SweepQuestion(trace, scenario, SweepOptions(settings=["block_size=16,32"], slo="ttft_p99<2s"))
    result = sweep(question, out=Path("study"))

After an interruption, `sweep` of the same question with the same folder goes on where it stopped. Each trial
is stored as it ends; only the others are replayed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pagecast.planner_app.planner.directions import more_is_better
from pagecast.planner_app.planner.execution.executor import Serial
from pagecast.planner_app.planner.execution.interface import Executor, Progress
from pagecast.planner_app.planner.sweep.pareto import front, sensitivity
from pagecast.planner_app.planner.sweep.question import SweepQuestion
from pagecast.planner_app.planner.sweep.sharing import Sharing
from pagecast.planner_app.planner.sweep.space import Point
from pagecast.planner_app.planner.sweep.store import Store, Trial
from pagecast.planner_app.planner.sweep.trial import COUNTS, FIGURES, at
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

MATTERS = 0.005  # a smaller part of a figure is no difference

Confirm = Callable[[Trace, Scenario, str], bool]  # whether a server keeps an SLO when a trace goes on
Stop = Callable[[], bool]  # asked after each trial whether to leave the rest


@dataclass(frozen=True)
class SweepResult:
    """Result of a sweep. `replayed` counts the trials of this run; the others were in the folder already.

    `replays`: those that were made for them, fewer where one serves several trials (`sharing.py`).

    `table` has a row per trial in the order of their numbers: `number`, the knobs, `meets` (rejects no
    request and keeps the SLO), `lasts` (False where the SLO broke when the load went on), `margin` (how far
    the tightest term is from its bound, as a part of it), `on_front`, what it costs, figures (seconds,
    counts, shares), the terms of the SLO by their text, `step_costs` (by name, those that it was served
    with), and `reason` where the scenario can't run.
    `complete` is False where the sweep was stopped. `rejections` has the number of rejected requests by
    reason, for the numbers of those trials that rejected any.
    """

    question: SweepQuestion
    table: pd.DataFrame
    complete: bool
    replayed: int
    rejections: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    replays: int = 0

    @property
    def knobs(self) -> list[str]:
        """The names of what was varied."""
        return [knob.name for knob in self.question.space.knobs]

    @property
    def cost(self) -> str:
        """The column that `cheapest` goes by: USD per hour, or where no price is known the number of GPUs.

        A fleet over time goes by GPU hours instead.
        """
        if self.question.prices:
            return "usd_per_hour"
        fleet = self.question.fleet
        return "gpu_hours" if fleet is not None and fleet.varies else "gpus"

    @cached_property
    def cheapest(self) -> dict[str, Any] | None:
        """The row of the cheapest replica that meets the SLO; None where no trial does.

        Of equals one on the front; of these the one with most margin, or without an SLO the one of the lowest
        p99 TTFT. Where the load varies, the one of most output tokens per second. Of those that come within
        half a percent of it, the one of the lowest p99 TTFT.
        """
        meets = self.table[self.table["meets"]]
        if not len(meets):
            return None
        by = "margin" if self.question.slo else "ttft_p99_s"
        by = by if self.question.loads is None else "output_tokens_per_s"
        off_front = ~meets["on_front"].astype(bool)
        first = meets[self.cost].eq(meets[self.cost].min())
        first &= off_front.eq(off_front[first].min())
        alike = meets[first]
        if by != "ttft_p99_s":
            most = alike[by].max()
            alike = alike[alike[by] >= most - MATTERS * abs(most)]
        return record(alike.sort_values(["ttft_p99_s", "number"], kind="stable").head(1))

    @property
    def front(self) -> pd.DataFrame:
        """The undominated trials, by the first objective: of those that meet the SLO, if any do."""
        first = self.question.objectives[0]
        rows = self.table[self.table["on_front"]]
        return rows.sort_values([first, "number"], ascending=[not more_is_better(first), True])

    @cached_property
    def sensitivity(self) -> pd.DataFrame:
        """How much each knob moves each objective and term, as `pareto.sensitivity` tells."""
        ran = self.table[self.table["reason"] == ""]
        return sensitivity(ran, self.knobs, list(dict.fromkeys(self.question.objectives)))


def sweep(
    question: SweepQuestion,
    run: Executor | None = None,
    *,
    out: Path | None = None,
    progress: Progress | None = None,
    stop: Stop | None = None,
    confirm: Confirm | None = None,
) -> SweepResult:
    """Runs every trial of the question that `out`, a study's folder, does not have yet.

    `run`: where the trials run, by default in this process; the table is the same anywhere. `confirm` is
    asked about the cheapest: where it says no, that one no longer counts as meeting the SLO, and the next is
    asked about. It is not asked without an SLO, about fleets, and where the load varies. Errors: BadInput for
    a folder that holds another study, or where no scenario of the space can run at all.
    """
    store = Store(out, question.about())
    try:
        walk = _Walk(question, store, run or Serial(), progress, stop)
        if question.ask.search is None:
            walk.grid()
        else:
            walk.search(question.ask.search)
        trials = list(walk.trials.values())
        rejections = {trial.number: trial.outcome.rejections for trial in trials if trial.outcome.rejections}
        result = SweepResult(
            question, table_of(question, trials), not walk.stopped, walk.replayed, rejections, walk.replays
        )
        while result.complete and (best := result.cheapest):
            if _lasts(question, walk.trials[best["number"]], confirm):
                break
            table = result.table.copy()
            table.loc[table["number"] == best["number"], ["meets", "lasts"]] = False
            table["on_front"] = _on_front(question, table)
            result = replace(result, table=table)
        store.save_table(result.table)
    finally:
        store.close()
    if trials and all(trial.outcome.reason for trial in trials):
        raise BadInput(f"no scenario of the space can run: {trials[0].outcome.reason}")
    return result


def _lasts(question: SweepQuestion, trial: Trial, confirm: Confirm | None) -> bool:
    if (
        confirm is None
        or not question.level.terms
        or question.fleet is not None
        or question.loads is not None
    ):
        return True
    return confirm(question.trace, at(question.scenario, trial.point), question.slo)


class _Walk:
    """The trials of a sweep, stored and missing, and the order in which the missing ones run."""

    def __init__(
        self,
        question: SweepQuestion,
        store: Store,
        run: Executor,
        progress: Progress | None,
        stop: Stop | None,
    ) -> None:
        self.question, self.store, self.run = question, store, run
        self.progress, self.stop = progress, stop
        self.trials: dict[int, Trial] = store.trials()
        self.work = question.work()
        self.replayed = self.replays = 0
        self.stopped = False
        self._sharing = Sharing(question.scenario, question.space.knobs if self.work.shares else ())

    def grid(self) -> None:
        self._serve(dict(enumerate(self.question.space.grid())))

    def search(self, count: int) -> None:
        """Generation after generation; the search is not asked for one that is whole in the store.

        A generation follows from the trials before it, so one that was interrupted gets the same points
        again, and only its missing trials run. Trials from `count` on, of a longer search, are left out.
        """
        size = self.question.ask.generation
        for first in range(0, count, size):
            numbers = range(first, min(first + size, count))
            if any(number not in self.trials for number in numbers) and not self.stopped:
                before = [self.trials[number] for number in range(first)]
                points = self.question.next_points(before, first // size)
                self._serve(dict(zip(numbers, points, strict=False)))
                if len(points) < len(numbers):
                    break
        self.trials = {number: trial for number, trial in self.trials.items() if number < count}

    def _serve(self, points: dict[int, Point]) -> None:
        """Runs the trials that are not done yet, and keeps each as it ends, with those that it answers."""
        self._report()
        self._sharing.begin()
        missing = {number: point for number, point in points.items() if number not in self.trials}
        self._share(missing)
        while missing and not self._asked_to_stop():
            numbers = self._sharing.next(missing)
            answers = self.run.until_interrupt(self.work.run, [missing[number] for number in numbers])
            for index, outcome in answers:
                number = numbers[index]
                self._sharing.note(missing[number], outcome)
                self.replays += 1
                self._keep(Trial(number, missing[number], outcome))
                if self._asked_to_stop():
                    answers.close()
                    break
            stopped = any(number not in self.trials for number in numbers)
            missing = {number: point for number, point in missing.items() if number not in self.trials}
            if stopped:
                break
            self._share(missing)
        self.stopped = self.stopped or any(number not in self.trials for number in points)
        self.trials = dict(sorted(self.trials.items()))

    def _share(self, missing: dict[int, Point]) -> None:
        """Takes from `missing` the trials whose replay another one is."""
        for number, point in list(missing.items()):
            outcome = self._sharing.answer(point)
            if outcome is not None:
                self._keep(Trial(number, point, outcome))
                del missing[number]

    def _keep(self, trial: Trial) -> None:
        self.store.add(trial)
        self.trials[trial.number] = trial
        self.replayed += 1
        self._report()

    def _asked_to_stop(self) -> bool:
        return self.stop is not None and self.stop()

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(len(self.trials))


def table_of(question: SweepQuestion, trials: Sequence[Trial]) -> pd.DataFrame:
    """The table of `SweepResult`, of trials in the order of their numbers."""
    terms = [term.text for term in question.level.terms]
    rows = [_row(question, trial) for trial in trials]
    hours = ["gpu_hours"] if question.fleet is not None else []
    costs = ["gpus", *hours, *(["usd_per_hour", "usd_per_million_output_tokens"] if question.prices else [])]
    knobs = [knob.name for knob in question.space.knobs]
    names = ["number", *knobs, "meets", "margin", *costs, *FIGURES, *terms, "step_costs", "reason"]
    table = pd.DataFrame(rows, columns=list(dict.fromkeys(names)))
    for name in table.columns.difference([*knobs, "meets", "step_costs", "reason"]):
        table[name] = pd.to_numeric(table[name]).astype("Int64" if name in COUNTS else "float64")
    table.insert(list(table).index("margin") + 1, "on_front", _on_front(question, table))
    table["lasts"] = True
    return table


def record(row: pd.DataFrame) -> dict[str, Any]:
    """The first row of a table as plain Python; None for what is missing."""
    values = row.astype(object).where(row.notna(), None).iloc[0].items()
    return {str(name): value.item() if isinstance(value, np.generic) else value for name, value in values}


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """All rows of a table as plain Python."""
    return [record(table.iloc[[row]]) for row in range(len(table))]


def _row(question: SweepQuestion, trial: Trial) -> dict[str, Any]:
    outcome = trial.outcome
    return {
        "number": trial.number,
        **question.figures(trial),
        **trial.point,
        "meets": outcome.meets,
        "margin": outcome.margin,
        **{term.text: term.value for term in outcome.terms},
        "step_costs": outcome.costs,
        "reason": outcome.reason,
    }


def _on_front(question: SweepQuestion, table: pd.DataFrame) -> np.ndarray:
    """Undominated among the trials that meet the SLO, or, where none does, among those that run."""
    candidates = table["meets"].to_numpy(bool)
    if not candidates.any():
        candidates = (table["reason"] == "").to_numpy(bool)
    signs = [-1.0 if more_is_better(name) else 1.0 for name in question.objectives]
    costs = table.loc[candidates, list(question.objectives)].to_numpy(np.float64) * signs
    mask = np.zeros(len(table), dtype=bool)
    mask[candidates] = front(costs)
    return mask
