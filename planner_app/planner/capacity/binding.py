"""The limit that binds: the one that must grow so that the server takes 25% more load.

A load a quarter above the answer is replayed as it is, and with twice of each limit in turn: KV blocks,
running requests (batch size), tokens per step (token budget), speed (compute). The terms that break as it is
are judged, which may be others than just above the answer. The limit whose doubling lets them hold binds. If
none does alone, it is the one that helps most. Doubling may be too much of it, and break a term that held
(a batch twice as large takes longer steps): that is said. How full batch, budget and KV cache were is
reported with it. Rates are tried by brief loads. Twice of what was never used up is not replayed: nothing
would differ (of KV blocks also where evicted content never came again, `sim.replay.room`). Replays with twice
of a limit stop as soon as a term that is judged is lost; where all do, they are made again to their ends, to
see which helps most.

Less of a setting may admit more: a smaller batch or token budget takes shorter steps. Half of each is tried
with 5% more load than the answer, where more than half was used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pandas as pd
from pagecast.planner_app.planner.capacity.bisection import CapacityQuestion
from pagecast.planner_app.planner.capacity.envelope import KV_BLOCKS, binds
from pagecast.planner_app.planner.capacity.users import Load, LoadReplay
from pagecast.planner_app.planner.execution.interface import Executor
from pagecast.planner_app.planner.served import ENDLESS
from pagecast.planner_app.planner.slo import TermVerdict, excess
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.draw import scaled
from pagecast.sim.scenario import Scenario

BEYOND = 1.25  # times the answer: the load that is replayed
LITTLE = 1.05  # times the answer: the load that is tried with half of a setting
LIMITS = (KV_BLOCKS, "batch size", "token budget", "compute")
NOTHING = "nothing"
TWICE = {
    KV_BLOCKS: "twice the KV blocks",
    "batch size": "twice max_num_seqs",
    "token budget": "twice max_num_batched_tokens",
    "compute": "steps twice as fast",
}
SETTINGS = {"batch size": "max_num_seqs", "token budget": "max_num_batched_tokens"}
_HELPS = 0.9  # doubling a limit helps where the worst excess falls below this share of the excess without
_LESS = {2: "half", 4: "half or a quarter of"}  # parts of a setting that are tried, in turn


@dataclass(frozen=True, slots=True)
class LimitTest:
    """A replay with twice of one limit (empty: none): whether the terms judged hold, and the worst of them.

    `excess` is that term's value in multiples of its bound. `breaks` is the worst term that breaks though it
    holds without help (empty: none), and `breaks_excess` its value in multiples of its bound. `unserved` is
    the share of the requests that were not served. `stopped`: when a term was lost, so that the figures are
    of the first requests.
    """

    limit: str
    holds: bool
    term: str
    excess: float
    breaks: str = ""
    breaks_excess: float = 0.0
    unserved: float = 0.0
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Binding:
    """The limit that binds, the load that was replayed, and the replays with and without twice of each limit.

    `limit` is "nothing" where the terms hold at that load too.
    `full` has shares of the settled time: `batch`: `max_num_seqs` requests ran; `budget`: a step used its
    whole token budget; `kv`: requests waited for neither of these, so for KV blocks. `kv_used` is the mean
    share of KV blocks in use. `parts`: settings of which less would take 5% more load than the answer, and by
    what the least that does is divided, 2 or 4.
    """

    limit: str
    amount: float
    without: LimitTest
    helped: tuple[LimitTest, ...]
    full: dict[str, float]
    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """One sentence: how far the SLO is missed at 25% more load, and what would help."""
        if self.without.holds:
            return f"at 25% more load {_far(self.without.term, self.without.excess)}, within it"
        cure = next(pressed for pressed in self.helped if pressed.limit == self.limit)
        others = [pressed for pressed in self.helped if pressed is not cure]
        text = f"at 25% more load {_far(self.without.term, self.without.excess)}"
        if self.without.excess == inf and self.without.unserved:
            text += f", and {self.without.unserved:.1%} of the requests are not served"
        enough, short = (_list([h for h in others if h.holds is holds]) for holds in (True, False))
        if cure.holds:
            text += f"; {TWICE[cure.limit]} would be enough ({_times(cure)})"
            text += f", and so would {enough}" if enough else ""
            text += f", but not {short}" if short else ""
            return text + _overdone(cure)
        nearest = min(self.helped, key=_severity)
        if cure is not nearest:
            return f"{text}; more room alone does not help: {_list(list(self.helped))}"
        return f"{text}; {TWICE[cure.limit]} would help most ({_times(cure)}), not {short}{_overdone(cure)}"

    @property
    def sentence(self) -> str:
        """The limit and the reason, in one sentence."""
        if self.without.holds:
            return f"nothing binds there: {self.why}"
        return f"{binds(self.limit)}: {self.why}{self.less}"

    @property
    def less(self) -> str:
        """A clause on settings of which less is better; empty where none is."""
        less = " or ".join(f"{_LESS[part]} {name}" for name, part in self.parts.items())
        return f"; {less} takes 5% more than now" if less else ""

    def to_dict(self) -> dict[str, Any]:
        """As printed in JSON."""
        helped = {
            h.limit: {"holds": h.holds, "excess": h.excess, "breaks": h.breaks or None} for h in self.helped
        }
        return {
            "limit": self.limit,
            "amount": self.amount,
            "term": self.without.term,
            "excess": self.without.excess,
            "with_twice": helped,
            "full": self.full,
            "half_takes_more": list(self.parts),
            "quarter_takes_more": [name for name, part in self.parts.items() if part == max(_LESS)],
            "why": self.why,
        }


def binding(question: CapacityQuestion, load: Load, run: Executor) -> Binding:
    """Which limit binds at a load that is a quarter beyond the answer, by the terms that break there."""
    as_it_is = press(question, load)
    pressed = run.map(partial(press, question, load, judged=as_it_is.judged), as_it_is.used_up)
    if not any(each.holds(as_it_is.judged) for each in pressed):
        pressed = run.map(partial(press, question, load), as_it_is.used_up)
    return bound(question, load, as_it_is, pressed)


@dataclass(frozen=True, slots=True)
class Pressure:
    """A replay with twice of `limit` (empty: as it is), whose `full` and `used_up` come where it is empty.

    `used_up` are the limits that some step met, `half_used` the settings of which some step used over half.
    """

    limit: str
    terms: tuple[TermVerdict, ...]
    full: dict[str, float] = field(default_factory=dict)
    used_up: tuple[str, ...] = ()
    half_used: tuple[str, ...] = ()
    stopped: bool = False

    @property
    def judged(self) -> frozenset[str]:
        """The terms that twice of a limit is judged by: those that break, or all."""
        broken = frozenset(term.text for term in self.terms if not term.holds)
        return broken or frozenset(term.text for term in self.terms)

    def holds(self, judged: frozenset[str]) -> bool:
        """Whether terms hold; one that does not occur does (a share served, where all were)."""
        return all(term.holds for term in self.terms if term.text in judged)


def press(
    question: CapacityQuestion, load: Load, limit: str = "", judged: frozenset[str] = frozenset()
) -> Pressure:
    """Replays the load with twice of `limit`, until one of the terms `judged` is lost, if there are any."""
    pressed, brief = _with_twice(question, limit), load.kind == "rate"
    served = pressed.judged_by(judged) if judged else replace(pressed, rooms=not limit)
    # A term of long loads (`backlog_growth`) does not occur here: `kept_up` stands for it in a short load.
    replay = served.serve(load, brief=brief, whole=not judged)
    terms = (served if replay.lost else pressed).judge(load, replay).terms
    if limit:
        return Pressure(limit, terms, stopped=bool(replay.lost))
    scenario = question.scenario
    return Pressure(
        "", terms, _fullness(replay, scenario), _used_up(replay, scenario), _half_used(replay, scenario)
    )


def least_part(question: CapacityQuestion, load: Load, setting: str) -> int:
    """By what a setting can be divided so that the SLO holds: 2, or 4 as well; 0 where half is too little.

    A part with which the engine does not start is too little.
    """
    least, own = 0, question.scenario
    for part in _LESS:
        try:
            scenario = own.changed(num_gpu_blocks=own.blocks(), **{setting: getattr(own, setting) // part})
            lower = replace(question, scenario=scenario)
            if not lower.judge(load, lower.serve(load)).holds:
                break
        except BadInput:
            break
        least = part
    return least


def bound(
    question: CapacityQuestion,
    load: Load,
    as_it_is: Pressure,
    pressed: Sequence[Pressure],
    parts: Mapping[str, int] | None = None,
) -> Binding:
    """The limit that binds, from a replay as it is and those with twice of what was used up."""
    judged = as_it_is.judged
    by_limit = {each.limit: each for each in pressed}
    without = _test(as_it_is, judged)
    helped = tuple(_test(by_limit.get(limit, replace(as_it_is, limit=limit)), judged) for limit in LIMITS)
    amount = load.amount * question.rate if load.kind == "rate" else load.amount
    return Binding(_choose(without, helped), amount, without, helped, as_it_is.full, parts or {})


def beyond(load: Load, most_users: int, times: float = BEYOND) -> Load:
    """So many times a load, and at least one user more."""
    more = load.amount * times
    if load.kind != "rate":
        more = float(min(max(np.ceil(more), load.amount + 1), most_users))
    return replace(load, amount=more)


def _choose(without: LimitTest, helped: tuple[LimitTest, ...]) -> str:
    """The limit that binds, `NOTHING` where the terms hold without help.

    Compute helps every term, so it is chosen only where no other limit is enough.
    """
    if without.holds:
        return NOTHING
    *rooms, speed = helped
    enough = [room for room in rooms if room.holds]
    if enough:
        return min(enough, key=lambda room: room.excess).limit
    if speed.holds:
        return speed.limit
    best = min(helped, key=_severity)
    helps = best.excess < _HELPS * without.excess
    if best.excess == without.excess == inf:
        helps = best.unserved < _HELPS * without.unserved
    return best.limit if helps else speed.limit


def _severity(pressed: LimitTest) -> tuple[float, float]:
    """What replays are compared by; the share that is not served tells infinite latencies apart."""
    return pressed.excess, pressed.unserved


def _test(pressed: Pressure, judged: frozenset[str]) -> LimitTest:
    """The outcome of a replay by the terms `judged`, and which of the others breaks."""
    terms = pressed.terms
    ours = [term for term in terms if term.text in judged]
    others = [term for term in terms if term.text not in judged and not term.holds]
    worst = max(ours, key=excess, default=TermVerdict(min(judged), None, 0.0, True))
    broken = max(others, key=excess, default=None)
    served = next((term.value for term in terms if term.text.startswith("served")), None)
    return LimitTest(
        pressed.limit,
        pressed.holds(judged),
        worst.text,
        excess(worst),
        "" if broken is None else broken.text,
        0.0 if broken is None else excess(broken),
        0.0 if served is None else 1 - served,
        pressed.stopped,
    )


def _with_twice(question: CapacityQuestion, limit: str) -> CapacityQuestion:
    scenario, draws = question.scenario, question.draws
    seqs, tokens = scenario.max_num_seqs, scenario.max_num_batched_tokens
    more: dict[str, int] = {"num_gpu_blocks": scenario.blocks()}
    if limit == KV_BLOCKS:
        more["num_gpu_blocks"] *= 2
    elif limit == "batch size":
        more |= {"max_num_seqs": 2 * seqs, "max_num_batched_tokens": max(tokens, 2 * seqs)}
    elif limit == "token budget":
        more["max_num_batched_tokens"] = 2 * tokens
    elif limit == "compute":
        draws = replace(draws, costs=scaled(question.costs_of(None), 0.5))
    return replace(question, scenario=scenario.changed(**more), draws=draws)


def _used_up(replay: LoadReplay, scenario: Scenario) -> tuple[str, ...]:
    """The limits that bounded some step, compute always among them; all where that can't be told."""
    steps, counted = replay.result.steps, replay.result.summary
    if scenario.speculation is not None or not len(steps):
        return LIMITS
    tokens = steps["decode_n"].to_numpy() + steps["prefill_tokens"].to_numpy()
    room = replay.result.room
    # Without room: evictions, preemptions, allocations that failed.
    short = any(counted.values()) if room is None else not room.enough_blocks
    used = {
        KV_BLOCKS: short,
        "batch size": steps["running"].max() >= scenario.max_num_seqs,
        "token budget": tokens.max() >= scenario.max_num_batched_tokens,
    }
    return tuple(limit for limit in LIMITS if used.get(limit, True))


def _half_used(replay: LoadReplay, scenario: Scenario) -> tuple[str, ...]:
    """The settings of which some step used more than half."""
    steps = replay.result.steps
    if not len(steps):
        return ()
    tokens = (steps["decode_n"].to_numpy() + steps["prefill_tokens"].to_numpy()).max()
    most = {"batch size": steps["running"].max(), "token budget": tokens}
    return tuple(name for limit, name in SETTINGS.items() if 2 * most[limit] > getattr(scenario, name))


def _fullness(replay: LoadReplay, scenario: Scenario) -> dict[str, float]:
    steps: pd.DataFrame = replay.result.steps
    start, end = (steps[name].to_numpy(np.float64) * 1e-9 for name in ("start_ns", "end_ns"))
    seconds = np.clip(np.minimum(end, replay.to_s) - np.maximum(start, replay.from_s), 0.0, None)
    if not seconds.any():
        seconds = end - start
    batch = steps["running"].to_numpy() >= scenario.max_num_seqs
    tokens = steps["decode_n"].to_numpy() + steps["prefill_tokens"].to_numpy()
    budget = tokens >= scenario.max_num_batched_tokens
    kv = (steps["waiting"].to_numpy() > 0) & ~batch & ~budget
    used = steps["used_blocks"].to_numpy(np.float64) / max(replay.result.pool_blocks, 1)
    columns = {"batch": batch, "budget": budget, "kv": kv, "kv_used": used}
    return {name: float(np.average(values, weights=seconds)) for name, values in columns.items()}


def _what(term: str) -> str:
    """The subject of a sentence on how far beyond its bound a term is."""
    if term.startswith("goodput"):
        return f"the share of requests that miss {term.rpartition(')')[0]}) is"
    name = re.split("[<>]", term)[0]
    if name == "kept_up":
        return "the share of offered requests that do not end in time is"
    if name == "served":
        return "the share of offered requests that are not served is"
    return f"{name} are" if name == "preemptions" else f"{name} is"


def _overdone(cure: LimitTest) -> str:
    """What a cure breaks that held without it."""
    if not cure.breaks:
        return ""
    return f"; with {TWICE[cure.limit]} {_far(cure.breaks, cure.breaks_excess)}"


def _far(term: str, excess: float) -> str:
    """How far beyond its bound a term is."""
    if excess == inf:
        return f"{_what(term)} {'infinite' if term.startswith(ENDLESS) else 'beyond the bound'}"
    return f"{_what(term)} {_multiple(excess)} the bound"


def _times(pressed: LimitTest) -> str:
    if pressed.stopped:
        return "beyond it"
    if pressed.excess == inf:
        return f"{pressed.unserved:.1%} not served" if pressed.unserved else "beyond it"
    return _multiple(pressed.excess)


def _multiple(excess: float) -> str:
    return f"{excess:,.0f} x" if excess >= 10 else f"{excess:.2g} x"


def _list(pressed: Sequence[LimitTest]) -> str:
    parts = [f"{TWICE[each.limit]} ({_times(each)})" for each in pressed]
    return " or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
