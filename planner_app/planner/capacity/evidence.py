"""Answers of a plan and what stands beside them: the limit that binds, and draws for the interval.

Users are searched for first, here. All else is independent of each other, and runs wherever there is room:
the highest rate, from the rate at which those users were served; a search of each draw, from the answer; and
replays with twice and half of each limit. What a plan needs twice is done once:

    rates of draws      near the rate at which the most users are served, or where beyond the highest rate
                        only the queue grows, the server is full, and a draw takes as much more or less as it
                        serves its own most users faster or slower. Only other rates are searched anew in each
                        draw, by brief loads
    limits of a rate    those of users, where the server is full and the same terms break

An interrupt leaves what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from pagecast.planner_app.planner.capacity.admitted import rate_ask, users_ask
from pagecast.planner_app.planner.capacity.binding import (
    BEYOND,
    LITTLE,
    Binding,
    Pressure,
    beyond,
    bound,
    least_part,
    press,
)
from pagecast.planner_app.planner.capacity.bisection import (
    Ask,
    CapacityQuestion,
    LoadSearch,
    amount,
)
from pagecast.planner_app.planner.capacity.envelope import Envelope
from pagecast.planner_app.planner.capacity.options import LoadKind
from pagecast.planner_app.planner.capacity.users import Load
from pagecast.planner_app.planner.execution.interface import Executor

SEARCH = 4  # replays of a search, about
_FULL = 0.9  # least part of the rate at which the most users are served, at which a server is full
_PART = 12  # of an answer: the first stride and resolution of a draw's search, whose rest is interpolated
_STRIDE = 8  # the same for rates, in steps of 1%


@dataclass(frozen=True, slots=True)
class _Half:
    """A replay with half of a setting."""

    load: Load
    setting: str


@dataclass(frozen=True, slots=True)
class _Twice:
    """A replay with twice of a limit."""

    load: Load
    limit: str
    judged: frozenset[str]


Task = Ask | Load | _Twice | _Half  # a search, a replay as it is, or one with more or less of something
Found = LoadSearch | Pressure | int
Tell = Callable[[int], None]  # called with replays done, about


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of an answer: the limit that binds, and the answers of draws in the same unit."""

    binding: Binding | None = None
    draws: tuple[float, ...] = ()
    replays: int = 0


@dataclass
class Study:
    """Searches and replays of a question, each done once, and what they say together.

    `points` are the searches by kind of load; that of users without think time is always among them where a
    rate is wanted.
    """

    question: CapacityQuestion
    kinds: Sequence[LoadKind]
    fits: Envelope
    run: Executor
    tell: Tell
    points: dict[LoadKind, LoadSearch] = field(default_factory=dict)
    _found: dict[tuple[LoadKind, Task], Found] = field(default_factory=dict)
    _done: int = 0

    def search_users(self) -> None:
        """Finds the users, without think time also where a rate is wanted alone: it begins there."""
        wanted: list[LoadKind] = [kind for kind in self.kinds if kind != "rate"]
        if "rate" in self.kinds and "concurrency" not in wanted:
            wanted.insert(0, "concurrency")
        for kind in wanted:
            self.points[kind] = self.question.search(users_ask(self.question, kind, self.fits))
            self._count(SEARCH)

    def gather(self) -> None:
        """Finds the rate, and the evidence of all answers, in rounds of what does not wait for another."""
        wanted: list[tuple[LoadKind, Task]] = []
        if "rate" in self.kinds:
            ask = rate_ask(self.question, self.points["concurrency"].at)
            wanted.append(("rate", ask))
        for kind in self.kinds:
            if kind != "rate":
                wanted += [*self._pressed(kind), *self._draw_asks(kind)]
        self._do(wanted)
        if "rate" in self.kinds:
            found = self._found["rate", ask]
            assert isinstance(found, LoadSearch)
            self.points["rate"] = found
        wanted = []
        for kind in self.kinds:
            if kind == "rate" and not self._limits_are_those_of_users:
                wanted += self._pressed(kind)
            if kind == "rate":
                wanted += [("rate", self._brief(None))] if self._draws_rates else []
                wanted += self._draw_asks("concurrency") if self._draws_are_those_of_users else []
            wanted += self._presses(kind)
        self._do(wanted)
        wanted = self._draw_asks("rate") if self._draws_rates else []
        for kind in self.kinds:
            wanted += self._presses(kind)
        self._do(wanted)
        self._do(self._presses("rate"))

    def evidence(self, kind: LoadKind) -> Evidence:
        """Evidence found so far of the answer for a kind of load."""
        if not self._crosses(kind):
            return Evidence()
        answer = self.points[kind].at
        assert answer is not None
        of_users = kind == "rate" and self._draws_are_those_of_users
        draws = self._draws("concurrency" if of_users else kind)
        forecast = self._found.get(("rate", self._brief(None))) if kind == "rate" else self.points[kind]
        ratios: list[float] = []
        if of_users:
            served = self.points["concurrency"].at
            assert served is not None
            ratios = [
                0.0 if each.at is None else each.at.requests_per_s / served.requests_per_s for each in draws
            ]
        elif isinstance(forecast, LoadSearch) and forecast.crossing:
            ratios = [each.crossing / forecast.crossing for each in draws]
        bind = self._binding(kind)
        if kind == "rate" and self._limits_are_those_of_users:
            bind = self._binding("concurrency")
            bind = None if bind is None else replace(bind, amount=BEYOND * answer.amount)
        replays = sum(each.answer.tried for each in draws) if not of_users else 0
        replays += sum(not isinstance(task, Ask) for of, task in self._found if of == kind)
        return Evidence(bind, tuple(ratio * answer.amount for ratio in ratios), replays)

    def _crosses(self, kind: LoadKind) -> bool:
        """Whether an answer has a load beyond it that breaks the SLO."""
        point = self.points.get(kind)
        return (
            point is not None
            and point.value is not None
            and not point.answer.at_limit
            and point.beyond is not None
        )

    @property
    def _is_full(self) -> bool:
        """Whether the server is full at the highest rate: users are not served much faster."""
        users, rate = self.points.get("concurrency"), self.points.get("rate")
        if not self._crosses("concurrency") or not self._crosses("rate"):
            return False
        assert users is not None and rate is not None and users.at is not None and rate.at is not None
        return rate.at.amount >= _FULL * users.at.requests_per_s

    @property
    def _limits_are_those_of_users(self) -> bool:
        users, rate = self.points.get("concurrency"), self.points.get("rate")
        if "concurrency" not in self.kinds or not self._is_full:
            return False
        assert users is not None and rate is not None and users.beyond is not None and rate.beyond is not None
        of_users, of_rates = ({term.text for term in each.broken} for each in (users.beyond, rate.beyond))
        if of_rates - of_users:  # a queue that grows is one that users break by waiting, unless they preempt
            return all(map(_grows, of_rates - of_users)) and not any(map(_preempts, of_users))
        return True

    @property
    def _draws_are_those_of_users(self) -> bool:
        """Whether a draw's rate follows from its users: a queue has no time to grow in brief loads."""
        if self._is_full:
            return True
        if not self._crosses("concurrency") or not self._crosses("rate"):
            return False
        beyond = self.points["rate"].beyond
        assert beyond is not None
        return all(_grows(term.text) for term in beyond.broken)

    @property
    def _draws_rates(self) -> bool:
        wanted = bool(self.question.ask.replicates) and self._crosses("rate")
        return wanted and not self._draws_are_those_of_users

    def _load(self, kind: LoadKind, times: float) -> Load:
        """So many times the answer of a kind."""
        value = self.points[kind].value
        assert value is not None
        answer = Load(kind, amount(kind, value), self.question.think_s)
        return beyond(answer, 2 * self.question.most_users, times)

    def _pressed(self, kind: LoadKind) -> list[tuple[LoadKind, Task]]:
        """A quarter more load, where limits are wanted."""
        wanted = self.question.ask.explain and self._crosses(kind)
        return [(kind, self._load(kind, BEYOND))] if wanted else []

    def _presses(self, kind: LoadKind) -> list[tuple[LoadKind, Task]]:
        """The same load with twice of what was used up; a little more with half of what was half used.

        Where none of the first holds, all of them to their ends.
        """
        as_it_is = self._as_it_is(kind)
        if as_it_is is None:
            return []
        tasks: list[tuple[LoadKind, Task]] = [*self._twice(kind, as_it_is, as_it_is.judged)]
        found = [self._found.get(task) for task in tasks]
        if not any(
            each is None or (isinstance(each, Pressure) and each.holds(as_it_is.judged)) for each in found
        ):
            tasks = [*self._twice(kind, as_it_is, frozenset())]
        if kind != "rate":  # brief loads take more than long ones, with half of a setting or without
            little = self._load(kind, LITTLE)
            tasks += [(kind, _Half(little, setting)) for setting in as_it_is.half_used]
        return tasks

    def _twice(
        self, kind: LoadKind, as_it_is: Pressure, judged: frozenset[str]
    ) -> list[tuple[LoadKind, Task]]:
        load = self._load(kind, BEYOND)
        return [(kind, _Twice(load, limit, judged)) for limit in as_it_is.used_up]

    def _as_it_is(self, kind: LoadKind) -> Pressure | None:
        if not self._pressed(kind):
            return None
        found = self._found.get((kind, self._load(kind, BEYOND)))
        return found if isinstance(found, Pressure) else None

    def _binding(self, kind: LoadKind) -> Binding | None:
        """The limit that binds; None where a replay is missing."""
        as_it_is, wanted = self._as_it_is(kind), self._presses(kind)
        if as_it_is is None or any(task not in self._found for task in wanted):
            return None
        found = {task: self._found[of, task] for of, task in wanted}
        pressed = [each for each in found.values() if isinstance(each, Pressure)]
        parts = {
            task.setting: part
            for task, part in found.items()
            if isinstance(task, _Half) and isinstance(part, int) and part
        }
        return bound(self.question, self._load(kind, BEYOND), as_it_is, pressed, parts)

    def _draw_asks(self, kind: LoadKind) -> list[tuple[LoadKind, Task]]:
        """A search of each draw, from the answer."""
        at = self.points[kind].value
        if at is None or not self._crosses(kind):
            return []
        draws = range(self.question.ask.replicates)
        if kind == "rate":
            return [(kind, self._brief(draw)) for draw in draws]
        near = max(at // _PART, 1)
        return [(kind, Ask(kind, draw, at, near, near, verify=False)) for draw in draws]

    def _brief(self, draw: int | None) -> Ask:
        """A search for a rate by brief loads, to compare draws with the forecast by."""
        at = self.points["rate"].value if "rate" in self.points else None
        return Ask("rate", draw, at or 0, _STRIDE, _STRIDE, verify=False, brief=True)

    def _draws(self, kind: LoadKind) -> list[LoadSearch]:
        """The searches of all draws; none where one is missing."""
        found = [self._found.get(task) for task in self._draw_asks(kind)]
        searches = [each for each in found if isinstance(each, LoadSearch)]
        return searches if len(searches) == len(found) else []

    def _do(self, tasks: Sequence[tuple[LoadKind, Task]]) -> None:
        """Does what is not done yet, wherever there is room for it."""
        new = [task for task in dict.fromkeys(tasks) if task not in self._found]
        if not new:
            return
        for at, found in self.run.stream(partial(_do, self.question), [task for _, task in new]):
            self._found[new[at]] = found
            self._count(SEARCH if isinstance(found, LoadSearch) else 1)

    def _count(self, replays: int) -> None:
        self._done += replays
        self.tell(self._done)


def _grows(term: str) -> bool:
    return term.startswith("backlog_growth")


def _preempts(term: str) -> bool:
    return term.startswith("preemptions")


def _do(question: CapacityQuestion, task: Task) -> Found:
    if isinstance(task, Ask):
        return question.search(task)
    if isinstance(task, _Half):
        return least_part(question, task.load, task.setting)
    if isinstance(task, Load):
        return press(question, task)
    return press(question, task.load, task.limit, task.judged)
