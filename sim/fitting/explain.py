"""Explanations of a difference between forecast and measurement, each tried in the simulator.

A measurement is the latencies of a benchmark's requests. An explanation changes one thing of the set-up: host
time of a step, speed of kernels, tokens of a step, KV blocks, prompts that were cached before, or what the
client adds. Its size is the one that brings the replay closest to the measurement, request by request. The
explanation that comes closest wins; others that come nearly as close are told as well, for latencies may not
tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.measured.corrections import Corrections
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.fitting.from_bench import corrected
from pagecast.sim.replay.result import Result
from pagecast.sim.replay.simulation import replay
from pagecast.sim.runs.bench_results import BenchResults
from pagecast.sim.runs.client_share import ClientShare
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Spans, Trace, starts, table

Floats = npt.NDArray[np.float64]
Progress = Callable[[int], None]

_LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
_MOST_REQUESTS = 2000  # of a measurement; a replay of more tells little more
_FARTHEST = math.log(8)  # a request further off counts as this far: what queues at saturation goes anywhere
ENOUGH = 0.2  # an explanation takes away this share of the difference, or there is none
NEAR = 0.1  # of the difference: explanations that come as close as this can't be told apart
_SMALL = 0.03  # mean difference of logarithms that needs no explanation
_PAUSE_S = 600.0  # between prompts that fill the cache and those that find it full
_CLIENTS_MS = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
_HOST_MS = (-1.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_KERNELS = (0.7, 0.85, 1.15, 1.35, 1.6, 2.0)
_STEP_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_BLOCKS = (0.7, 0.5, 0.35, 0.25, 0.15, 0.08, 0.04)
_NUDGES = (0.965, 1.035)  # of kernels, within which costs are uncertain whatever the cause
_CLOSER = 2  # rounds that halve the steps around the closest size


@dataclass(frozen=True)
class Setup:
    """What a replay is made of: a scenario, its costs, the requests, and what a client adds."""

    scenario: Scenario
    costs: StepCosts
    results: BenchResults

    def replayed(self) -> Result:
        """What the client would have measured."""
        result = replay(self.results.trace, self.scenario, costs=self.costs, keep_steps=False)
        client = self.results.client
        return client.seen(result) if client else result


@dataclass(frozen=True)
class Explanation:
    """A change of the set-up: its `cause`, its `size` in the unit of `words`, and how close it comes.

    `corrections`: what it is of step costs, where it is one of them. `distance`: mean difference of the
    logarithms of the latencies, of replay and measurement.
    """

    cause: str
    size: float
    words: str
    distance: float
    setup: Setup
    corrections: Corrections | None = None


@dataclass(frozen=True)
class Explained:
    """The difference before, and all explanations, the closest first."""

    distance: float
    tried: tuple[Explanation, ...]

    @property
    def best(self) -> Explanation | None:
        """The explanation, where the difference needs one and one takes enough of it away."""
        best = self.tried[0] if self.tried else None
        if best is None or self.distance < _SMALL or best.distance > (1 - ENOUGH) * self.distance:
            return None
        return best

    @property
    def near(self) -> tuple[Explanation, ...]:
        """Others that come nearly as close."""
        best = self.best
        if best is None:
            return ()
        return tuple(one for one in self.tried[1:] if one.distance < best.distance + NEAR * self.distance)


def explain(
    results: BenchResults, scenario: Scenario, costs: StepCosts, progress: Progress | None = None
) -> Explained:
    """Tries every explanation of `results`, measured in what is thought to be `scenario`.

    `progress` is called with the number of replays done. Errors: BadInput.
    """
    base = Setup(scenario, costs, _first(results))
    measure = _Measure(base.results, progress)
    start = measure(base)
    tried: list[Explanation] = []
    if start < _SMALL:
        return Explained(start, ())
    for cause in _causes(base, measure):
        sizes = list(cause.sizes)
        found = [(measure.of(cause, size), size) for size in sizes]
        for _ in range(_CLOSER if cause.between is not None else 0):
            assert cause.between is not None
            closest = min(found)[1]
            around = sorted({*(size for _, size in found), cause.nothing})
            at = around.index(closest)
            beside = [around[i] for i in (at - 1, at + 1) if 0 <= i < len(around)]
            found += [
                (measure.of(cause, size), size) for size in (cause.between(closest, one) for one in beside)
            ]
        found = [one for one in found if math.isfinite(one[0])]
        if found:
            distance, size = min(found)
            setup = cause.setup(size)
            changed = setup.costs if setup.costs is not base.costs else None
            words, corrections = cause.words(size), getattr(changed, "corrections", None)
            if cause.name != "kernels":
                nudges = (_nudged(setup, base.costs, corrections, factor) for factor in _NUDGES)
                distance = min(distance, *map(measure, nudges))
            tried.append(Explanation(cause.name, size, words, distance, setup, corrections))
    return Explained(start, tuple(sorted(tried, key=lambda one: one.distance)))


def _nudged(setup: Setup, costs: StepCosts, found: Corrections | None, factor: float) -> Setup:
    """The set-up with kernels that take `factor` times as long, beside what was found of its costs."""
    step_s, kernels = (found.step_s, found.decode) if found is not None else (0.0, 1.0)
    return replace(setup, costs=corrected(costs, Corrections("", step_s, kernels * factor, kernels * factor)))


def distance(setup: Setup) -> float:
    """Mean difference of the logarithms of latencies, of a replay and what was measured of its requests."""
    return _Measure(setup.results, None)(setup)


@dataclass(frozen=True)
class _Cause:
    """A kind of explanation: the sizes that are tried, what each makes of the set-up, and its words.

    `between` two sizes lies one that is tried as well; `nothing` is the size that changes nothing.
    """

    name: str
    sizes: tuple[float, ...]
    setup: Callable[[float], Setup]
    words: Callable[[float], str]
    nothing: float = 0.0
    between: Callable[[float, float], float] | None = None


class _Measure:
    """How far replays are from a measurement, request by request; counts them."""

    def __init__(self, results: BenchResults, progress: Progress | None) -> None:
        self._real = {name: getattr(results, name) for name in _LATENCIES}
        self._progress, self._done = progress, 0

    def __call__(self, setup: Setup) -> float:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done)
        requests = setup.replayed().requests
        # Requests that only fill a cache stand in front of those that were measured.
        rows = requests["row"].to_numpy() - (len(setup.results.trace) - len(self._real["ttft_s"]))
        counted = (requests["state"] == "completed").to_numpy() & (rows >= 0)
        if not counted.any():
            return math.inf
        ours = requests[counted]
        distances = [
            self._distance(ours[name].to_numpy(np.float64), self._real[name][rows[counted]])
            for name in _LATENCIES
        ]
        return float(np.mean(distances))

    def of(self, cause: _Cause, size: float) -> float:
        """The distance with an explanation of one size; infinite where the set-up can't be."""
        try:
            return self(cause.setup(size))
        except BadInput:
            return math.inf

    @staticmethod
    def _distance(ours: Floats, real: Floats) -> float:
        """Of one latency: requests one by one, and their distribution, which chance at saturation leaves."""
        known = np.isfinite(ours) & np.isfinite(real) & (ours > 0) & (real > 0)
        if not known.any():
            return 0.0
        ours, real = np.log(ours[known]), np.log(real[known])
        each = np.minimum(np.abs(ours - real), _FARTHEST).mean()
        points = np.linspace(0.02, 0.98, 25)
        shape = np.abs(np.quantile(ours, points) - np.quantile(real, points)).mean()
        return float(each + shape) / 2


def _first(results: BenchResults) -> BenchResults:
    """The first requests of results that have very many."""
    if len(results.trace) <= _MOST_REQUESTS:
        return results
    from pagecast.traces.operations import slice as cut

    trace = cut(results.trace, rows=(0, _MOST_REQUESTS))
    return replace(
        results, trace=trace, ttft_s=results.ttft_s[:_MOST_REQUESTS], e2e_s=results.e2e_s[:_MOST_REQUESTS]
    )


def _causes(base: Setup, measure: _Measure) -> Iterator[_Cause]:
    scenario, costs, results = base.scenario, base.costs, base.results

    def corrected_by(step_ms: float = 0.0, kernels: float = 1.0) -> Setup:
        return replace(base, costs=corrected(costs, Corrections("", step_ms / 1e3, kernels, kernels)))

    yield _Cause(
        "host",
        _HOST_MS,
        lambda size: corrected_by(step_ms=size),
        lambda size: f"each step takes {abs(size):.2f} ms {'more' if size > 0 else 'less'} (the host)",
        between=lambda a, b: (a + b) / 2,
    )
    yield _Cause(
        "kernels",
        _KERNELS,
        lambda size: corrected_by(kernels=size),
        lambda size: f"kernels take {size:.2f} times as long",
        1.0,
        lambda a, b: math.sqrt(a * b),
    )
    own = scenario.max_num_batched_tokens
    yield _Cause(
        "chunk",
        tuple(float(size) for size in _STEP_TOKENS if size != own and size >= scenario.max_num_seqs),
        lambda size: replace(base, scenario=scenario.changed(max_num_batched_tokens=int(size))),
        lambda size: f"steps of {size:,.0f} tokens (--max-num-batched-tokens), not {own:,}",
    )
    blocks = scenario.limits().num_blocks
    yield _Cause(
        "blocks",
        _BLOCKS,
        lambda size: replace(base, scenario=scenario.changed(num_gpu_blocks=max(int(size * blocks), 1))),
        lambda size: f"{size * blocks:,.0f} KV blocks, not {blocks:,}",
        1.0,
        lambda a, b: math.sqrt(a * b),
    )
    if scenario.enable_prefix_caching and not (results.trace.integers("after") >= 0).any():
        warm = None

        def warmed(_: float) -> Setup:
            nonlocal warm
            warm = replace(base, results=_warm(results)) if warm is None else warm
            return warm

        yield _Cause("warm", (1.0,), warmed, lambda _: "the prompts were in the cache before (a warm cache)")
    client = results.client
    yield _Cause(
        "client",
        _CLIENTS_MS,
        lambda size: replace(base, results=replace(results, client=_slower(client, size))),
        lambda size: f"the client, or the way to it, adds {size:.0f} ms",
        between=lambda a, b: (a + b) / 2,
    )


def _slower(client: ClientShare | None, ms: float) -> ClientShare:
    share = client or ClientShare(0.0, 0.0, 0.0, math.inf)
    return replace(share, fixed_s=share.fixed_s + ms / 1e3)


def _warm(results: BenchResults) -> BenchResults:
    """The same requests, after all of their prompts were served once."""
    trace, count = results.trace, len(results.trace)
    spans = trace.spans
    if spans is None and trace.token_ids is None:
        numbers = np.arange(count, dtype=np.int64)
        none = np.zeros(count, dtype=np.int64)
        spans = Spans(starts(np.ones(count, np.int64)), numbers, none, trace.integers("input_tokens"))
    arrival = trace.seconds("arrival_s")
    again = arrival + arrival.max() + _PAUSE_S
    columns = {
        name: np.concatenate([trace.column(name).to_numpy()] * 2)
        for name in map(str, trace.requests)
        if name not in ("arrival_s", "output_content", "output_offset")
    }
    twice = None
    if spans is not None:
        counts = np.diff(spans.start)
        flat = (np.concatenate([part, part]) for part in (spans.content, spans.offset, spans.length))
        twice = Spans(starts(np.concatenate([counts, counts])), *flat)
    ids = None if trace.token_ids is None else [*trace.token_ids, *trace.token_ids]
    doubled = Trace(
        trace.name, table({**columns, "arrival_s": np.concatenate([arrival, again])}), twice, ids, trace.notes
    )
    unknown = np.full(count, math.nan)
    ttft, e2e = (np.concatenate([unknown, each]) for each in (results.ttft_s, results.e2e_s))
    return replace(results, trace=doubled, ttft_s=ttft, e2e_s=e2e)
