"""Advice beside plans in 20 scenarios: `python tests/benchmarks/advice.py [FIRST LAST] [--full]`.

For each scenario the block size and the HBM budget that the cards, `tune` and a sweep advise are compared
with every other value that was tried, in the terms of `pagecast plan`: users who keep the SLO, and requests
per second. A value beats an advice where it takes more of one load, beyond the search's step, and not less of
the other. The Load page's rates and What-if's users are set beside those of `plan`.

What-if, Load and `tune` are asked in every fourth scenario, for they are slow and call the same searches.
Loads are of 300 requests, in all of them, and of 4,000 as by default with `--full`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from pagecast.planner_app.dashboard.load.highest import rates_job
from pagecast.planner_app.dashboard.what_if.admissible import concurrency_job
from pagecast.planner_app.planner.capacity.admitted import question_of
from pagecast.planner_app.planner.capacity.bisection import GRID, CapacityQuestion
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.planning import plan
from pagecast.planner_app.planner.capacity.users import Load, requests_per_s
from pagecast.planner_app.planner.sweep.trial import at
from pagecast.planner_app.planner.tune.choice import BLOCK_SIZE, HBM, choose
from pagecast.planner_app.planner.tune.knobs import tune
from pagecast.planner_app.planner.tune.options import TuneOptions
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pagecast.traces.schema import Trace

SHORT = 300  # requests of a load
_USERS = 1 / 32 + 1 / 50  # more users that count as no more: what another value must admit, and the search
_PAGES = 4  # one scenario in so many is asked on all pages
_RATE = GRID**6 - 1  # and of a rate: what another value must take, and two steps of the search
SLO = "ttft_p95<2s,tpot_p95<50ms"
TIGHT, LOOSE = "ttft_p90<500ms,tpot_p90<30ms", "ttft_p90<5s,tpot_p90<100ms"
QWEN8 = {"model": "Qwen/Qwen3-8B"}
SCENARIOS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("chat", SLO, {**QWEN8, "gpu": "H200"}),
    ("chat", SLO, {**QWEN8, "gpu": "H200", "gpu_memory_utilization": 0.39}),
    ("chat", TIGHT, {**QWEN8, "gpu": "H100 SXM"}),
    ("chat", SLO, {**QWEN8, "gpu": "A100 80GB", "block_size": 128}),
    ("chat", LOOSE, {"model": "Qwen/Qwen3-4B", "gpu": "L4", "max_num_seqs": 32}),
    ("chat", SLO, {"model": "Qwen/Qwen3-0.6B", "gpu": "H200", "gpu_memory_utilization": 0.9}),
    ("chat", SLO, {**QWEN8, "gpu": "L40S", "max_num_seqs": 64}),
    ("chat", SLO, {**QWEN8, "gpu": "H200", "engine": "sglang"}),
    ("chat", SLO, {**QWEN8, "gpu": "H100 SXM", "kv_offloading_size": 64.0}),
    ("chat", SLO, {**QWEN8, "gpu": "H200", "kv_cache_dtype": "fp8", "max_num_seqs": 512}),
    ("chat", LOOSE, {"model": "Qwen/Qwen3-32B", "gpu": "H200"}),
    ("code", SLO, {**QWEN8, "gpu": "H200"}),
    ("code", LOOSE, {**QWEN8, "gpu": "H100 SXM", "gpu_memory_utilization": 0.5}),
    ("code", LOOSE, {**QWEN8, "gpu": "A100 80GB"}),
    ("code", SLO, {"model": "Qwen/Qwen3-4B", "gpu": "B200"}),
    ("rag", SLO, {**QWEN8, "gpu": "H200"}),
    ("rag", LOOSE, {**QWEN8, "gpu": "L40S"}),
    ("rag", LOOSE, {"model": "Qwen/Qwen3-4B", "gpu": "RTX 4090", "max_model_len": 16384}),
    ("rag", SLO, {**QWEN8, "gpu": "H100 SXM", "block_size": 64, "enable_prefix_caching": False}),
    ("rag", SLO, {"model": "Qwen/Qwen3-0.6B", "gpu": "L4", "max_model_len": 16384}),
)


class Took(NamedTuple):
    """What a server takes by `plan`: users, and requests per second."""

    users: float
    rate: float


class Case:
    """One scenario, with `plan`'s answer for each value that was asked for."""

    def __init__(self, number: int) -> None:
        trace, self.slo, fields = SCENARIOS[number]
        self.trace, self.scenario = traced(trace), Scenario.make(fields, "scenario")
        self._planned: dict[tuple[str, float], Took] = {}

    def question(self, knob: str, value: float) -> CapacityQuestion:
        """The question of a value."""
        made = question_of(self.trace, at(self.scenario, {knob: value}), PlanOptions(slo=self.slo))
        return replace(made, rate=requests_per_s(made.trace))

    def planned(self, knob: str, value: float) -> Took:
        """`plan`'s answer with a value."""
        if (knob, value) not in self._planned:
            ask = PlanOptions(slo=self.slo, replicates=0, explain=False)
            found = plan(self.trace, at(self.scenario, {knob: value}), ask).answers
            self._planned[knob, value] = Took(*(found[kind].value or 0 for kind in ("concurrency", "rate")))
        return self._planned[knob, value]

    def holds(self, knob: str, value: float, users: float, rate: float) -> tuple[bool, bool]:
        """Whether a value keeps the SLO with so many users, and at a rate by a long load."""
        question = self.question(knob, value)
        load = Load("concurrency", max(int(users), 1))
        holds = question.judge(load, question.serve(load)).holds
        return holds, bool(rate) and question.serve_long(Load("rate", rate / question.rate)).holds

    def better(self, knob: str, best: float, tried: tuple[float, ...]) -> Iterator[str]:
        """The values that beat the best, with what both take."""
        own = self.planned(knob, best)
        for value in tried:
            if value == best:
                continue
            more = self.holds(knob, value, own.users * (1 + _USERS) + 1, own.rate * (1 + _RATE))
            if any(more):
                other = self.planned(knob, value)
                users, rate = other.users / max(own.users, 1) - 1, other.rate / (own.rate or 1e-9) - 1
                gains = (users > _USERS and rate > -_RATE) or (rate > _RATE and users > -_USERS)
                if gains and other.users - own.users > -2:
                    yield f"{value:g} takes {users:+.1%} users, {rate:+.1%} requests/s"


@lru_cache
def traced(name: str) -> Trace:
    """The first requests of a bundled trace."""
    return read(name, limit=500)


def shorten(most_requests: int) -> None:
    """Makes loads of all plans, pages and searches shorter."""
    PlanOptions.model_fields["most_requests"].default = most_requests
    PlanOptions.model_rebuild(force=True)


def faults(number: int, say: Any = print) -> list[str]:
    """Everything in which a scenario's advice is beaten, or two pages differ. `say` gets its row."""
    begun, case, found = time.process_time(), Case(number), []
    own = case.planned(BLOCK_SIZE, case.scenario.block_size)
    pages = number % _PAGES == 0
    if pages:
        found += pages_differ(case, own)
    words = []
    for knob in (BLOCK_SIZE, HBM):
        try:
            card = choose(case.trace, case.scenario, knob, case.slo)
        except BadInput as error:
            words.append(f"{knob}: {error}")
            continue
        best = card.best.value
        if pages and card.load:
            ask = TuneOptions(values=",".join(f"{value:g}" for value in card.tried), slo=case.slo)
            tuned = tune(case.trace, case.scenario, knob, ask).recommended
            found += [f"{knob}: the card says {best:g}, tune {tuned}"] if tuned != best else []
        beaten = list(case.better(knob, best, card.tried))
        found += [f"{knob} {best:g}: {text}" for text in beaten]
        now, then = case.planned(knob, card.now.value), case.planned(knob, best)
        words.append(
            f"{knob} {card.now.value:g} ({now.users:.0f}, {now.rate:.3g}/s) -> {best:g} "
            f"({then.users:.0f}, {then.rate:.3g}/s)"
        )
    trace, _, fields = SCENARIOS[number]
    say(
        f"{number:2} {trace} {' '.join(map(str, fields.values()))}: {'; '.join(words)}; "
        f"{len(found)} faults {found or ''} [{time.process_time() - begun:.0f} s]"
    )
    return found


def pages_differ(case: Case, own: Took) -> list[str]:
    """What-if's users and Load's rate where they are not those of `plan`."""
    users = concurrency_job(case.trace, case.scenario, case.slo, False, progress=lambda done: None).users
    gpu = case.scenario.gpu
    rate = rates_job(case.trace, case.scenario, [gpu], case.slo, progress=lambda done: None)[gpu] or 0.0
    return [] if Took(users, rate) == own else [f"What-if and Load say {users} and {rate:.3g}/s, plan {own}"]


def main() -> int:
    """Prints a row for each scenario, and how many advices are beaten."""
    numbers = [int(text) for text in sys.argv[1:] if text.isdigit()] or [0, len(SCENARIOS) - 1]
    if "--full" not in sys.argv:
        shorten(SHORT)

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    found = [fault for number in range(numbers[0], numbers[1] + 1) for fault in faults(number, say)]
    say(f"{len(found)} faults in {numbers[1] + 1 - numbers[0]} scenarios")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
