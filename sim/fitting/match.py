"""A measurement beside its forecast, what explains the difference, and the calibration that takes it away."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pagecast.sim.core.errors import Unfinished
from pagecast.sim.costs.measured.corrections import Corrections
from pagecast.sim.fitting.explain import Explained, Fact, Setup, distance, explain
from pagecast.sim.fitting.from_bench import REPLAYS, corrected, fit_corrections
from pagecast.sim.replay.result import Result
from pagecast.sim.runs.bench_results import BenchResults
from pagecast.sim.scenario import Scenario

Progress = Callable[[int], None]
_LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
_STATISTICS: dict[str, Callable[[np.ndarray], float]] = {
    "mean": lambda values: float(values.mean()),
    "p50": lambda values: float(np.quantile(values, 0.5)),
    "p99": lambda values: float(np.quantile(values, 0.99)),
}
EXPLAINING = 100  # replays that explanations take, at most


@dataclass(frozen=True)
class MatchRow:
    """One figure: measured, as forecast, and as forecast with what was found (None where not known)."""

    name: str
    measured: float
    forecast: float | None
    matched: float | None

    @property
    def errors_percent(self) -> tuple[float | None, float | None]:
        """Of the forecast and of the matched one, signed."""
        return _percent(self.forecast, self.measured), _percent(self.matched, self.measured)


@dataclass(frozen=True)
class Match:
    """What came of it: `explained` tells causes, `corrections` the calibration, `setup` what it is for."""

    name: str
    rows: tuple[MatchRow, ...]
    explained: Explained
    corrections: Corrections
    setup: Setup
    notes: tuple[str, ...]


def match(
    results: BenchResults,
    scenario: Scenario,
    name: str,
    *,
    measured: dict[str, float] | None = None,
    facts: Sequence[Fact] = (),
    known: Collection[str] = (),
    progress: Progress | None = None,
) -> Match:
    """Matches `results` with a forecast in `scenario`, and fits a calibration called `name`.

    `measured`: more of the server, as its hit rate or KV blocks, by the names of rows. `facts`, `known`: as
    for `explain`; the forecast is without the facts. `progress` is called with the number of replays done.
    Errors: BadInput; Unfinished with the forecast and the explanations tried until an interrupt.
    """
    base = Setup(scenario, scenario.step_costs(), results)
    before = _stated(base, facts).replayed()
    real = {**_measured(results), **(measured or {})}
    forecast = _figures(before, _stated(base, facts).results)
    notes = tuple(note for note in before.notes if isinstance(note, str))
    explained = Explained(0.0, (), begun=False)
    try:
        explained = explain(results, scenario, base.costs, progress, facts=facts, known=known)
        corrections, after = _corrected(base, explained, name, progress)
    except KeyboardInterrupt as stopped:
        if isinstance(stopped, Unfinished) and isinstance(stopped.answer, Explained):
            explained = stopped.answer
        rows = tuple(MatchRow(key, value, forecast.get(key), None) for key, value in real.items())
        nothing = Corrections(name, 0.0, 1.0, 1.0)
        raise Unfinished(Match(results.name, rows, explained, nothing, base, notes)) from None
    matched = _figures(after.replayed(), after.results)
    rows = tuple(MatchRow(key, value, forecast.get(key), matched.get(key)) for key, value in real.items())
    return Match(results.name, rows, explained, corrections, after, notes)


def _corrected(
    base: Setup, explained: Explained, name: str, progress: Progress | None
) -> tuple[Corrections, Setup]:
    """The corrections that the best explanation leaves to be fitted, and the set-up with both."""
    best = explained.best
    # Costs are what the corrections tell; any other cause is a set-up in which they are fitted.
    of_costs = best is not None and best.corrections is not None
    fitted = base if best is None or of_costs else _whole(best.setup, base)
    corrections = fit_corrections(
        [fitted.results],
        fitted.scenario,
        name,
        None if progress is None else lambda done: progress(EXPLAINING + done),
        base=base.costs,
        around=best.corrections if best is not None else None,
    )
    after = replace(fitted, costs=corrected(base.costs, corrections))
    if not of_costs and distance(after) > distance(fitted):  # what is there is as close as corrections come
        corrections = replace(corrections, step_s=0.0, decode=1.0, prompt=1.0)
        after = replace(fitted, costs=corrected(base.costs, corrections))
    return corrections, after


MATCHING = EXPLAINING + REPLAYS


def _stated(base: Setup, facts: Sequence[Fact]) -> Setup:
    """The set-up without what the server's files tell."""
    for fact in facts:
        if fact.cause == "warm":
            base = replace(base, results=fact.stated.results)
        else:
            field = {"blocks": "num_gpu_blocks", "chunk": "max_num_batched_tokens"}[fact.cause]
            value = getattr(fact.stated.scenario, field)
            base = replace(base, scenario=base.scenario.changed(**{field: value}))
    return base


def _whole(found: Setup, base: Setup) -> Setup:
    """The explanation's set-up with all requests, where it was tried with the first of them."""
    if len(found.results.trace) >= len(base.results.trace):
        return found
    return replace(found, results=replace(base.results, client=found.results.client))


def _measured(results: BenchResults) -> dict[str, float]:
    columns = {name: getattr(results, name) for name in _LATENCIES}
    tokens = results.trace.integers("output_tokens")
    came = results.trace.seconds("arrival_s")
    # Unlike nanmax these say nothing of ends that are all unknown, which fits refuse in a sentence.
    last = float(np.fmax.reduce(came + results.e2e_s))
    return _summary(columns, tokens, float(np.fmin.reduce(came)), last)


def _figures(result: Result, results: BenchResults) -> dict[str, float]:
    """The figures of a replay that are compared, of the requests that were measured."""
    requests = results.compared(result.requests)
    requests = requests[requests["state"] == "completed"]
    if not len(requests):
        return {}
    columns = {name: requests[name].to_numpy(np.float64) for name in _LATENCIES}
    begin, arrival = float(requests["arrival_s"].min()), requests["arrival_s"].to_numpy(np.float64)
    end = float((arrival + columns["e2e_s"]).max())
    figures = _summary(columns, requests["output_tokens"].to_numpy(), begin, end)
    inputs = float(requests["input_tokens"].sum())
    return {
        **figures,
        "hit_rate": float(requests["cached_tokens"].clip(lower=0).sum()) / inputs,
        "num_gpu_blocks": float(result.summary["num_gpu_blocks"]),
        "preemptions": float(result.summary["preemptions"]),
    }


def _summary(
    columns: dict[str, np.ndarray], tokens: np.ndarray, begin_s: float, end_s: float
) -> dict[str, float]:
    figures = {"output_tokens_per_s": float(tokens.sum()) / max(end_s - begin_s, 1e-9)}
    for name, values in columns.items():
        known = values[np.isfinite(values)]
        if len(known):
            figures |= {f"{name}.{key}": of(known) for key, of in _STATISTICS.items()}
    return figures


def _percent(ours: float | None, real: float) -> float | None:
    if ours is None or not math.isfinite(ours):
        return None
    if not real:
        return 0.0 if not ours else math.inf
    return 100 * (ours / real - 1)
