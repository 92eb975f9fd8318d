"""Explanations of a difference between forecast and measurement, each tried in the simulator.

A measurement is the latencies of a benchmark's requests: TTFT, TPOT, E2E, and the longest time between two
tokens, which tells how large steps are. An explanation changes one thing of the set-up: host time of a step,
speed of kernels, planning ahead, tokens of a step, KV blocks, prompts that were cached before, or what the
client adds. Its size is the one that brings the replay closest to the measurement, request by request, where
the costs may differ by what they are uncertain by. The explanation that comes closest wins; others that come
nearly as close are told as well, for latencies may not tell them apart. What a log or metrics tell of the
server is no guess: those facts hold for all explanations, and come first where they take enough away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pagecast.sim.core.errors import BadInput, Unfinished
from pagecast.sim.costs.calibration.draw import uncertainty
from pagecast.sim.costs.measured.corrections import Corrections
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.fitting.from_bench import corrected
from pagecast.sim.replay.result import Result
from pagecast.sim.replay.simulation import replay
from pagecast.sim.replay.token_gaps import longest_gaps_s
from pagecast.sim.runs.bench_results import BenchResults
from pagecast.sim.runs.client_share import ClientShare
from pagecast.sim.scenario import Scenario
from pagecast.traces.arrays import Floats
from pagecast.traces.schema import Spans, Trace, starts, table

Progress = Callable[[int], None]

_LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
_MOST_REQUESTS = 2000  # of a measurement; a replay of more tells little more
_FARTHEST = math.log(8)  # a request further off counts as this far: what queues at saturation goes anywhere
ENOUGH = 0.2  # an explanation takes away this share of the difference, or there is none
ENOUGH_OF_FACTS = 0.1  # likewise of what is no guess
NEAR = 0.1  # of the difference: explanations that come as close as this can't be told apart
_SMALL = 0.03  # mean difference of logarithms that needs no explanation
WARM = "the prompts were in the cache before (a warm cache)"
_PAUSE_S = 600.0  # between prompts that fill the cache and those that find it full
_CLIENTS_MS = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
_HOST_MS = (-1.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_KERNELS = (0.7, 0.85, 1.15, 1.35, 1.6, 2.0)
_STEP_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_BLOCKS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # of those that the replay fills at most
_CLOSER = 1  # rounds that halve the steps around the closest size
# A difference is as sure as this many independent figures: requests that wait for each other are not.
_FIGURES = 30
_FINEST = 0.005  # differences below are noise of the measurement
_ROUNDS, _WORTH = 2, 0.9  # of moving costs; another is worth it where the last took a tenth away
_BEGINNINGS = np.array([-6.0, -3.0, 0.0, 3.0, 6.0])
# Of all steps, and of steps with prompts apart from them, for differences: what queues moves in leaps.
_NUDGES = np.array([0.04, 0.15])


@dataclass(frozen=True)
class Setup:
    """What a replay is made of: a scenario, its costs, the requests, and what a client adds."""

    scenario: Scenario
    costs: StepCosts
    results: BenchResults

    def replayed(self) -> Result:
        """What the client would have measured."""
        result = replay(self.results.trace, self.scenario, costs=self.costs)
        client = self.results.client
        return client.seen(result) if client else result


@dataclass(frozen=True)
class Fact:
    """A cause that a log or metrics tell of the server: its words, and `stated`, the set-up without it."""

    cause: str
    size: float
    words: str
    stated: Setup


@dataclass(frozen=True)
class Explanation:
    """A change of the set-up: its `cause`, its `size` in the unit of `words`, and how close it comes.

    `corrections`: what it is of step costs, where it is one of them. `distance`: mean difference of the
    logarithms of the latencies, of replay and measurement, more by what costs had to differ for it.
    """

    cause: str
    size: float
    words: str
    distance: float
    setup: Setup
    corrections: Corrections | None = None


@dataclass(frozen=True)
class Explained:
    """The difference before, and all explanations, the closest first.

    `facts`: what the server's files tell, each with the distance that is left with it, and `stated` the
    difference without any of them. `distance` is with all of them, and with costs as they may be. `begun`:
    distances are known.
    """

    distance: float
    tried: tuple[Explanation, ...]
    facts: tuple[Explanation, ...] = ()
    stated: float = 0.0
    begun: bool = True

    @property
    def told(self) -> Explanation | None:
        """The fact that takes most of the difference away, where it is enough."""
        told = min(self.facts, key=lambda one: one.distance, default=None)
        if told is None or self.stated < _SMALL or told.distance > (1 - ENOUGH_OF_FACTS) * self.stated:
            return None
        return told

    @property
    def best(self) -> Explanation | None:
        """The explanation, where one takes enough away of what costs leave that are as they may be."""
        best = self.tried[0] if self.tried else None
        return None if best is None or best.distance > (1 - ENOUGH) * self.distance else best

    @property
    def near(self) -> tuple[Explanation, ...]:
        """Others that come nearly as close."""
        best = self.best
        if best is None:
            return ()
        return tuple(one for one in self.tried[1:] if one.distance < best.distance + NEAR * self.distance)


def explain(
    results: BenchResults,
    scenario: Scenario,
    costs: StepCosts,
    progress: Progress | None = None,
    *,
    facts: Sequence[Fact] = (),
    known: Collection[str] = (),
) -> Explained:
    """Tries every explanation of `results`, measured in `scenario`, but for those `known` not to differ.

    `facts`: what of `scenario` and `results` was told by the server's files. `progress` is called with the
    number of replays done. Errors: BadInput; Unfinished with what was tried until an interrupt.
    """
    base = Setup(scenario, costs, _first(results))
    measure = _Measure(base.results, progress)
    start = measure(base)
    told, stated = _told(facts, base, start, measure)
    if start < _SMALL:
        return Explained(start, (), told, stated)
    tried: list[Explanation] = []
    nothing = start
    try:
        nothing, _ = _closest(_Cause("", (0.0,), lambda _: base, str), 0.0, base, measure)
        for cause in _causes(base):
            if cause.name not in known and (found := _explanation(cause, base, measure)) is not None:
                tried.append(found)
    except KeyboardInterrupt:
        raise Unfinished(Explained(nothing, _by_distance(tried), told, stated)) from None
    return Explained(nothing, _by_distance(tried), told, stated)


def _by_distance(tried: Sequence[Explanation]) -> tuple[Explanation, ...]:
    return tuple(sorted(tried, key=lambda one: one.distance))


def _explanation(cause: _Cause, base: Setup, measure: _Measure) -> Explanation | None:
    """The size of a cause that comes closest; None where no size can be replayed."""
    found = [(measure.of(cause, size), size) for size in cause.sizes]
    for _ in range(_CLOSER if cause.between is not None else 0):
        assert cause.between is not None
        closest = min(found)[1]
        around = sorted({*(size for _, size in found), cause.nothing})
        at = around.index(closest)
        beside = [around[i] for i in (at - 1, at + 1) if 0 <= i < len(around)]
        found += [(measure.of(cause, size), size) for size in (cause.between(closest, one) for one in beside)]
    found = [one for one in found if math.isfinite(one[0])]
    if not found:
        return None
    distance, size = _closest(cause, min(found)[1], base, measure)
    setup = cause.setup(size)
    changed = setup.costs if setup.costs is not base.costs else None
    corrections = getattr(changed, "corrections", None)
    if corrections == getattr(base.costs, "corrections", None):
        corrections = None
    return Explanation(cause.name, size, cause.words(size), distance, setup, corrections)


def _told(
    facts: Sequence[Fact], base: Setup, start: float, measure: _Measure
) -> tuple[tuple[Explanation, ...], float]:
    """The difference that each fact leaves, and the difference without any."""
    if not facts:
        return (), start
    alone = len(facts) == 1
    without = [_distance_of(fact.stated, measure) for fact in facts]
    # Where several facts are told, each is judged by what comes back without it.
    stated = max(without)
    left = [start if alone else max(stated - (one - start), 0.0) for one in without]
    pairs = zip(facts, left, strict=True)
    return tuple(Explanation(one.cause, one.size, one.words, at, base) for one, at in pairs), stated


def _distance_of(setup: Setup, measure: _Measure) -> float:
    """The distance of a set-up; the farthest where it can't serve the requests."""
    try:
        return min(measure(replace(setup, results=_first(setup.results))), _FARTHEST)
    except BadInput:
        return _FARTHEST


def _closest(cause: _Cause, size: float, base: Setup, measure: _Measure) -> tuple[float, float]:
    """How close a cause comes where costs differ by what they are uncertain by, and its size then.

    Logarithms of latencies are taken as linear in the size and in what costs may be; what comes of it is
    replayed.
    """
    prior = _Prior.of(base.costs)
    costs, best, here = np.zeros(2), size, measure.apart(cause.setup(size))
    distance = max(_mean(here), _FINEST)
    step = 0.0 if cause.between is None else 0.15 * (abs(size - cause.nothing) or 1.0)
    for _ in range(_ROUNDS):

        def at(change: float, move: Floats, size: float = best, costs: Floats = costs) -> Floats:
            return measure.apart(prior.moved(cause.setup(size + change), base.costs, costs + move))

        slopes = [(at(0.0, move) - here) / sum(move) for move in np.diag(_NUDGES)]
        slopes += [(at(step, np.zeros(2)) - here) / step] if step else []
        x = _fitted(here, np.stack(slopes, axis=-1), prior, costs)
        change = float(np.clip(x[2], -3 * step, 3 * step)) if step else 0.0
        try:
            there = at(change, x[:2])
        except BadInput:
            break
        # As likely as the differences make it, with what costs had to be for that.
        left = max(_mean(there), _FINEST) * math.exp(prior.unlikely(costs + x[:2]) / _FIGURES)
        if left >= distance:
            break
        closer = left < _WORTH * distance
        costs, best, here, distance = costs + x[:2], best + change, there, left
        if not closer:
            break
    return distance, best


@dataclass(frozen=True)
class _Prior:
    """Likely moves of costs: of all steps, and of those with prompts apart from the others (logarithms)."""

    sd: Floats
    freedom: Floats
    prompt_share: float

    @classmethod
    def of(cls, costs: StepCosts) -> _Prior:
        known = uncertainty(costs)
        both = np.array([known.level, known.apart])
        return cls(np.maximum(both[:, 0], 1e-3), both[:, 1], known.prompt_share)

    def moved(self, setup: Setup, costs: StepCosts, by: Floats) -> Setup:
        """The set-up with such costs, beside what was found of them."""
        found = getattr(setup.costs, "corrections", None) if setup.costs is not costs else None
        step_s, decode, prompt = (found.step_s, found.decode, found.prompt) if found else (0.0, 1.0, 1.0)
        decodes = float(by[0] - self.prompt_share * by[1])
        prompts = decodes + float(by[1])
        corrections = Corrections("", step_s, decode * math.exp(decodes), prompt * math.exp(prompts))
        return replace(setup, costs=corrected(costs, corrections))

    def weights(self, by: Floats) -> Floats:
        """The second derivative of `unlikely`, as if moves were normal: Student's t."""
        normal = np.isinf(self.freedom)
        freedom = np.where(normal, 1.0, self.freedom)
        ratio = (freedom + 1) / (freedom + np.square(by / self.sd))
        return np.asarray(np.where(normal, 1.0, ratio) / np.square(self.sd), np.float64)

    def unlikely(self, by: Floats) -> float:
        """Minus the logarithm of the moves' density, from its greatest."""
        square, normal = np.square(by / self.sd), np.isinf(self.freedom)
        freedom = np.where(normal, 1.0, self.freedom)
        heavy = (freedom + 1) / 2 * np.log1p(square / freedom)
        return float(np.where(normal, square / 2, heavy).sum())


def _fitted(here: Floats, slopes: Floats, prior: _Prior, costs: Floats) -> Floats:
    """The moves that bring differences closest to 0, by their absolute values, as far as they are likely.

    They are added to `costs`, the moves that costs have made.
    """
    known = np.isfinite(here) & np.isfinite(slopes).all(axis=-1)
    off, matrix = here[known], np.clip(slopes[known], -20, 20)
    shares = np.broadcast_to(1 / np.maximum(known.sum(axis=1, keepdims=True), 1), known.shape)[known]
    shares = shares / len(here)

    def far(x: Floats) -> float:
        return max(float((shares * np.abs(off + matrix @ x)).sum()), _FINEST)

    found = []
    for begin in _BEGINNINGS * prior.sd[1]:  # heavy tails have several optima
        x: Floats = np.zeros(matrix.shape[1])
        x[1] = begin
        moved = np.zeros(len(x))
        moved[:2] = costs
        ridge = np.full(len(x), 1e-9)
        for _ in range(20):
            weights = shares / np.maximum(np.abs(off + matrix @ x), 0.01) * _FIGURES / far(x)
            ridge[:2] = prior.weights(costs + x[:2])
            normal = matrix.T @ (matrix * weights[:, None]) + np.diag(ridge)
            wanted = -matrix.T @ (weights * off) - ridge * moved
            x = np.asarray(np.linalg.solve(normal, wanted), np.float64)
        found.append((_FIGURES * math.log(far(x)) + prior.unlikely(costs + x[:2]), x))
    return min(found, key=lambda one: one[0])[1]


def distance(setup: Setup) -> float:
    """Mean difference of the logarithms of latencies, of a replay and what was measured of its requests."""
    setup = replace(setup, results=_first(setup.results))
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
        self._real = [np.asarray(getattr(results, name), np.float64) for name in _LATENCIES]
        if results.longest_gap_s is not None:
            self._real.append(results.longest_gap_s)
        self._progress, self._done = progress, 0

    def __call__(self, setup: Setup) -> float:
        return _mean(self.apart(setup))

    def apart(self, setup: Setup) -> Floats:
        """Logarithms of replayed by measured latencies: a row for each latency, NaN where one is not known.

        Each row has the requests one by one, and then their distributions, which chance at saturation leaves.
        """
        self._done += 1
        if self._progress is not None:
            self._progress(self._done)
        result = setup.replayed()
        requests, count = result.requests, len(self._real[0])
        # Requests that only fill a cache stand in front of those that were measured.
        rows = requests["row"].to_numpy() - (len(setup.results.trace) - count)
        counted = (requests["state"] == "completed").to_numpy() & (rows >= 0)
        ours = [requests[name].to_numpy(np.float64) for name in _LATENCIES]
        if len(self._real) > len(ours):
            ours.append(longest_gaps_s(result))
        apart = np.full((len(self._real), count + len(_POINTS)), np.nan)
        for at, (values, real) in enumerate(zip(ours, self._real, strict=True)):
            own = np.full(count, np.nan)
            own[rows[counted]] = values[counted]
            known = np.isfinite(own) & np.isfinite(real) & (own > 0) & (real > 0)
            if known.any():
                logs = np.log(own[known]), np.log(real[known])
                apart[at, :count][known] = np.clip(logs[0] - logs[1], -_FARTHEST, _FARTHEST)
                apart[at, count:] = np.quantile(logs[0], _POINTS) - np.quantile(logs[1], _POINTS)
        return apart

    def of(self, cause: _Cause, size: float) -> float:
        """The distance with an explanation of one size; infinite where the set-up can't be."""
        try:
            return self(cause.setup(size))
        except BadInput:
            return math.inf


_POINTS = np.linspace(0.02, 0.98, 25)


def _mean(apart: Floats) -> float:
    """The mean over latencies; requests one by one and their distributions count alike."""
    count = len(_POINTS)
    halves = []
    for row in apart:
        if np.isfinite(row).any():
            each, shape = row[:-count], row[-count:]
            halves.append((float(np.nanmean(np.abs(each))) + float(np.abs(shape).mean())) / 2)
    return float(np.mean(halves)) if halves else math.inf


def _first(results: BenchResults) -> BenchResults:
    """The first requests of results that have very many. Errors: BadInput for as many behind a warm cache."""
    count = len(results.trace)
    filling = count - len(np.flatnonzero(np.isfinite(results.ttft_s) | np.isfinite(results.e2e_s)))
    if count - filling <= _MOST_REQUESTS:
        return results
    if 2 * filling >= count:
        raise BadInput(
            f"{results.name}: {count - filling:,} requests are too many for a warm cache; match "
            f"{_MOST_REQUESTS:,} of them"
        )
    from pagecast.traces.operations import slice as cut

    trace = cut(results.trace, rows=(0, _MOST_REQUESTS))
    gaps = None if results.longest_gap_s is None else results.longest_gap_s[:_MOST_REQUESTS]
    ttft, e2e = results.ttft_s[:_MOST_REQUESTS], results.e2e_s[:_MOST_REQUESTS]
    return replace(results, trace=trace, ttft_s=ttft, e2e_s=e2e, longest_gap_s=gaps)


def _causes(base: Setup) -> Iterator[_Cause]:
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
    if (other := _planned_otherwise(base)) is not None:
        words = "ahead" if other.scenario.pipelined else "one at a time"
        option = "--async-scheduling" if other.scenario.pipelined else "--no-async-scheduling"
        yield _Cause("ahead", (1.0,), lambda _: other, lambda _: f"steps are planned {words} ({option})")
    own = scenario.max_num_batched_tokens
    yield _Cause(
        "chunk",
        tuple(float(size) for size in _STEP_TOKENS if size != own and size >= scenario.max_num_seqs),
        lambda size: replace(base, scenario=scenario.changed(max_num_batched_tokens=int(size))),
        lambda size: f"steps of {size:,.0f} tokens (--max-num-batched-tokens), not {own:,}",
    )
    blocks = scenario.limits().num_blocks
    filled = float(base.replayed().summary["peak_kv_usage"]) * blocks
    yield _Cause(
        "blocks",
        tuple(max(share * filled, 1.0) for share in _BLOCKS),
        lambda size: replace(base, scenario=scenario.changed(num_gpu_blocks=max(int(size), 1))),
        lambda size: f"{size:,.0f} KV blocks, not {blocks:,}",
        filled,
        lambda a, b: math.sqrt(a * b),
    )
    if scenario.enable_prefix_caching and not (results.trace.integers("after") >= 0).any():
        warm = replace(base, results=warmed(results))
        yield _Cause("warm", (1.0,), lambda _: warm, lambda _: WARM)
    client = results.client
    yield _Cause(
        "client",
        _CLIENTS_MS,
        lambda size: replace(base, results=replace(results, client=_slower(client, size))),
        lambda size: f"the client, or the way to it, adds {size:.0f} ms",
        between=lambda a, b: (a + b) / 2,
    )


def _planned_otherwise(base: Setup) -> Setup | None:
    """The same with steps planned ahead, or not; None where the engine or its options rule that out."""
    try:
        scenario = base.scenario.changed(async_scheduling=not base.scenario.pipelined)
        return replace(base, scenario=scenario, costs=scenario.step_costs())
    except BadInput:
        return None


def _slower(client: ClientShare | None, ms: float) -> ClientShare:
    share = client or ClientShare(0.0, 0.0, 0.0, math.inf)
    return replace(share, fixed_s=share.fixed_s + ms / 1e3)


def warmed(results: BenchResults) -> BenchResults:
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
    gaps = None if results.longest_gap_s is None else np.concatenate([unknown, results.longest_gap_s])
    return replace(results, trace=doubled, ttft_s=ttft, e2e_s=e2e, longest_gap_s=gaps)
