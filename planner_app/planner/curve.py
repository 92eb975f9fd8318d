"""Throughput against latency: one load at several concurrencies, as benchmarks are published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagecast.planner_app.planner.execution.executor import Serial
from pagecast.planner_app.planner.served import RequestCounts
from pagecast.planner_app.wording.quantities import seconds
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.replay import Kept, Result, replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

_TURNS = 5  # requests for each user: most are then served at the full concurrency
_CLOSE = 0.9  # of the most output
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
HEADER = (
    "concurrency",
    "requests/s",
    "tokens/s",
    "per GPU",
    "per user",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A replay at one concurrency: `requests_per_s`, `tokens_per_s` (generated), and latencies by name.

    `per_gpu` are generated tokens per second and GPU, `per_user` those that a user sees: 1 / TPOT in the
    median, None where no request has two tokens.
    """

    concurrency: int
    counts: RequestCounts
    gpus: int
    requests_per_s: float
    tokens_per_s: float
    all_tokens_per_s: float
    latencies: dict[str, dict[str, float | None]]

    @property
    def row(self) -> list[str]:
        """The point under the titles of `HEADER`."""
        ttft, tpot = self.latencies["ttft_s"], self.latencies["tpot_s"]
        times = (ttft["p50"], ttft["p99"], tpot["p50"])
        per_user = "-" if self.per_user is None else f"{self.per_user:,.4g}"
        return [
            f"{self.concurrency:,}",
            f"{self.requests_per_s:,.4g}",
            f"{self.tokens_per_s:,.0f}",
            f"{self.per_gpu:,.0f}",
            per_user,
            *(seconds(time) for time in times),
        ]

    @property
    def per_gpu(self) -> float:
        return self.tokens_per_s / self.gpus

    @property
    def per_user(self) -> float | None:
        tpot_s = self.latencies["tpot_s"]["p50"]
        return 1 / tpot_s if tpot_s else None

    def to_dict(self) -> dict[str, Any]:
        """As printed in JSON."""
        return {
            "concurrency": self.concurrency,
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.tokens_per_s,
            "total_tokens_per_s": self.all_tokens_per_s,
            "output_tokens_per_s_per_gpu": self.per_gpu,
            "output_tokens_per_s_per_user": self.per_user,
            **self.latencies,
            "counts": self.counts.to_dict(),
        }


@dataclass(frozen=True)
class Curve:
    """The points of a load, by concurrency, and the last replay, which has what all have in common.

    `complete` is False where an interrupt left points out.
    """

    points: tuple[CurvePoint, ...]
    result: Result
    complete: bool = True

    @property
    def answer(self) -> str:
        """The most output, and the least concurrency that comes close to it."""
        best = max(self.points, key=lambda point: point.tokens_per_s)
        close = next(point for point in self.points if point.tokens_per_s >= _CLOSE * best.tokens_per_s)
        text = f"most output: {best.tokens_per_s:,.0f} tokens/s at concurrency {best.concurrency:,}"
        if len(self.points) > 1 and best.concurrency == self._most:
            text += ", the highest tried"
        if close is best:
            return f"{text}, {_ttft(best)}"
        share = close.tokens_per_s / best.tokens_per_s
        return f"{text}, {_ttft(best)}; {close.concurrency:,} give {share:.0%} of it, {_ttft(close)}"

    @property
    def short_of(self) -> str:
        """A sentence on a concurrency that the load has too few requests for; empty where it has enough."""
        most, requests = self._most, self.points[-1].counts.requests
        if most <= requests:
            return ""
        return f"{requests:,} requests never reach a concurrency of {most:,}: take {_TURNS * most:,} or more"

    @property
    def _most(self) -> int:
        return max(point.concurrency for point in self.points)

    @property
    def about(self) -> str:
        """Where it was served, and how to read the tokens."""
        scenario, gpus = self.result.scenario, self.points[-1].gpus
        how = "tokens are generated ones, per user: 1 / TPOT p50"
        return f"on {gpus} x {scenario.gpu} with {scenario.model}; {how}"


def _ttft(point: CurvePoint) -> str:
    return f"TTFT p50 {seconds(point.latencies['ttft_s']['p50'])}"


def curve(
    work: Callable[[int], tuple[Trace, Scenario]],
    concurrencies: Sequence[int],
    fleet: FleetSettings | None = None,
    progress: Callable[[int], None] | None = None,
) -> Curve:
    """Replays `work` at each of the concurrencies, on one replica or a fleet, until an interrupt.

    Errors: BadInput.
    """
    points: list[CurvePoint] = []
    last: list[Result] = []

    def at(concurrency: int) -> Result:
        trace, scenario = work(concurrency)
        if fleet is None:
            return replay(trace, scenario, kept=Kept(steps=False, comparisons=False))
        return replay_fleet(trace, scenario, fleet, kept=Kept(steps=False))

    for number, result in Serial().until_interrupt(at, concurrencies):
        last = [result]
        points.append(_point(concurrencies[number], result))
        if progress is not None:
            progress(len(points))
    return Curve(tuple(points), last[0], len(points) == len(concurrencies))


def _point(concurrency: int, result: Result) -> CurvePoint:
    summary = result.summary
    makespan_s = summary["makespan_s"] or float("inf")
    gpus = summary["fleet"]["gpus"] if "fleet" in summary else result.scenario.tensor_parallel_size
    return CurvePoint(
        concurrency,
        RequestCounts.of(result.requests),
        gpus,
        summary["completed"] / makespan_s,
        summary["output_tokens_per_s"],
        (summary["input_tokens"] + summary["output_tokens"]) / makespan_s,
        {name: summary[name] for name in LATENCIES},
    )
