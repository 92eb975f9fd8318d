"""A recorded run as rows and columns: one row per step, one column per term of its kernel family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from pagecast.sim.core.plan import DECODE_TOKENS
from pagecast.sim.costs.calibration.curve import padded
from pagecast.sim.costs.families.registry import family
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.costs.families.term import ComputedStep, Place
from pagecast.sim.runs.busy_steps import busy_steps
from pagecast.sim.runs.recorded import RecordedRun, Steps
from pagecast.sim.runs.validate import DecisionReplay
from pagecast.traces.arrays import Flags, Floats, Ints

_KNOTS = (
    *(1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768),
    *(1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536),
)


_TEXTS = ("run", "segments", "terms")  # of a `StepTable`, which otherwise holds columns


@dataclass(frozen=True)
class StepTable:
    """Steps ready to be fitted: their time from start to start, and what they computed.

    `ns` is the time to the next start; only steps after which there was work left are here. `index`
    numbers them within the run. `arrivals` and `arrived_tokens` came in that time. `units` has a column for
    each of `terms`.
    """

    run: str
    segments: tuple[str, ...]  # a sweep's, or the run itself
    terms: tuple[str, ...]
    segment: Ints  # numbers `segments`
    index: Ints
    ns: Floats
    sched_ns: Floats
    gap_ns: Floats
    n: Floats
    ctx: Floats
    longest: Floats
    chunks: Floats
    tokens: Ints
    longest_prompt: Floats  # keys of the longest chunk
    arrivals: Floats
    arrived_tokens: Floats
    units: Floats

    def __len__(self) -> int:
        return len(self.ns)

    @property
    def mixed(self) -> Flags:
        """Which steps compute prompt chunks."""
        return self.chunks > 0

    def column(self, term: str) -> Floats:
        """The units of one term."""
        return np.asarray(self.units[:, self.terms.index(term)], np.float64)

    def take(self, rows: Ints) -> StepTable:
        """The table of the given rows, in that order; rows may repeat."""
        columns = {key: value[rows] for key, value in vars(self).items() if key not in _TEXTS}
        return StepTable(run=self.run, segments=self.segments, terms=self.terms, **columns)

    def parts(self) -> list[StepTable]:
        """Its segments, each as a table."""
        return [self.take(np.flatnonzero(self.segment == number)) for number in np.unique(self.segment)]

    @staticmethod
    def joined(parts: list[StepTable]) -> StepTable:
        """The opposite of `parts`: tables of one run as one."""
        first = parts[0]
        names = [name for name in vars(first) if name not in _TEXTS]
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return StepTable(run=first.run, segments=first.segments, terms=first.terms, **columns)


def step_table(run: RecordedRun, shape: TileShape, upto: float = 1.0) -> StepTable:
    """The steps of a run that had work after them, of its first part `upto` (a share of the steps)."""
    kernels = family(shape.family)
    steps = single_tokens_decoding(run.steps) if kernels.single_tokens_decode else run.steps
    keep, following, arrivals, arrived = busy_steps(run, upto)
    tokens = steps.decode_n + _per_step(steps, steps.prefill_tokens)
    swept = "sweep" in run.meta
    described = _described(run, steps, tokens, keep, shape, arrivals, arrived)
    counts = [[units(step) for step in described] for units in (term.bind(shape) for term in kernels.terms)]
    matrix = np.array(counts, np.float64).reshape(len(kernels.terms), len(keep)).T
    columns: dict[str, npt.NDArray[Any]] = {
        "segment": steps.section if swept else np.zeros(len(steps), np.int64),
        "index": np.arange(len(steps)),
        "ns": (following - steps.start_ns).astype(np.float64),
        "sched_ns": steps.sched_ns.astype(np.float64),
        "gap_ns": (following - steps.end_ns).astype(np.float64),
        "n": steps.decode_n.astype(np.float64),
        "ctx": steps.decode_ctx.astype(np.float64),
        "longest": steps.decode_max.astype(np.float64),
        "chunks": np.diff(steps.prefill_start).astype(np.float64),
        "tokens": tokens,
        "longest_prompt": _largest(steps, steps.prefill_tokens + steps.prefill_ctx).astype(np.float64),
        "arrivals": arrivals,
        "arrived_tokens": arrived,
    }
    rows = {key: value[keep] for key, value in columns.items()}
    return StepTable(
        run=run.name,
        segments=steps.sections if swept else (run.name,),
        terms=kernels.names,
        units=matrix,
        **rows,
    )


def _described(
    run: RecordedRun,
    steps: Steps,
    tokens: Ints,
    keep: Ints,
    shape: TileShape,
    arrivals: Floats,
    arrived: Floats,
) -> list[ComputedStep]:
    """The steps of `keep` as terms see them."""
    since, last = _after_prompts(steps, tokens)
    after = _after(steps, tokens)
    shared = _shared(run, shape)
    begin, chunks = (
        steps.prefill_start,
        list(zip(steps.prefill_tokens.tolist(), steps.prefill_ctx.tolist(), strict=True)),
    )
    computed_steps = []
    for i in keep.tolist():
        prefill = tuple(chunks[begin[i] : begin[i + 1]])
        computed_steps.append(
            ComputedStep(
                n=int(steps.decode_n[i]),
                ctx=int(steps.decode_ctx[i]),
                longest=int(steps.decode_max[i]),
                prefill=prefill,
                after=int(after[i]),
                tokens=int(tokens[i]),
                ungraphed=bool(prefill) and int(tokens[i]) > shape.largest_graph,
                since=int(since[i]),
                last=int(last[i]),
                shared=float(shared[i]),
                arrivals=float(arrivals[i]),
                arrived_tokens=float(arrived[i]),
            )
        )
    return computed_steps


def _after_prompts(steps: Steps, tokens: Ints) -> tuple[Ints, Ints]:
    """Of each decode step, the steps since the last one with prompts of its section (0: none), and the tokens
    of that one."""
    number = np.arange(len(steps))
    mixed = np.diff(steps.prefill_start) > 0
    last = np.maximum.accumulate(np.where(mixed, number, -1))
    follows = (last >= 0) & ~mixed
    follows &= steps.section[last] == steps.section
    return np.where(follows, number - last, 0), np.where(follows, tokens[last], 0)


def _shared(run: RecordedRun, shape: TileShape) -> Floats:
    """Context tokens of decoding requests that stand in another one's blocks too, by replaying the run's
    decisions; 0 where it has no requests, or the family no term for them."""
    if run.parts:
        return np.concatenate([_shared(part, shape) for part in run.parts])
    shared = np.zeros(len(run.steps))
    if not family(shape.family).named(Place.SHARING) or not len(run.requests) or run.spans is None:
        return shared
    replay = DecisionReplay(run)
    memory = replay.scheduler.memory
    for number in range(len(run.steps)):
        replay.step(number)
        shared[number] = memory.shared_tokens()
    return np.minimum(shared, run.steps.decode_ctx)


def single_tokens_decoding(steps: Steps) -> Steps:
    """The steps with each prompt chunk of one token as the decode that it is to a GPU."""
    single = steps.prefill_tokens == DECODE_TOKENS
    if not single.any():
        return steps
    owner = np.repeat(np.arange(len(steps)), np.diff(steps.prefill_start))
    count, size = np.bincount(owner[single], minlength=len(steps)), len(steps)
    context = np.bincount(owner[single], weights=steps.prefill_ctx[single], minlength=size)
    longest = steps.decode_max.copy()
    np.maximum.at(longest, owner[single], steps.prefill_ctx[single])
    return replace(
        steps,
        decode_n=steps.decode_n + count,
        decode_ctx=steps.decode_ctx + context.astype(np.int64),
        decode_max=longest,
        prefill_start=steps.prefill_start - np.append(0, np.cumsum(count)),
        prefill_tokens=steps.prefill_tokens[~single],
        prefill_ctx=steps.prefill_ctx[~single],
    )


def _after(steps: Steps, tokens: Ints) -> Ints:
    """Tokens of the step before each, if it had prompt chunks and was of the same section."""
    mixed = np.diff(steps.prefill_start) > 0
    follows = np.append(False, (steps.section[1:] == steps.section[:-1]) & mixed[:-1])
    return np.where(follows, np.append(0, tokens[:-1]), 0)


def _per_step(steps: Steps, values: Ints) -> Ints:
    total = np.concatenate([[0], np.cumsum(values)])
    return np.asarray(total[steps.prefill_start[1:]] - total[steps.prefill_start[:-1]], np.int64)


def _largest(steps: Steps, values: Ints) -> Ints:
    largest = np.zeros(len(steps), np.int64)
    owner = np.repeat(np.arange(len(steps)), np.diff(steps.prefill_start))
    np.maximum.at(largest, owner, values)
    return largest


def computed_rows(table: StepTable, shape: TileShape) -> Floats:
    """Tokens as each step computes them: up to the next CUDA graph size where a graph is used."""
    decode = padded(table.tokens, shape.graph_sizes)
    return np.where(table.mixed, padded(table.tokens, shape.prompt_sizes), decode)


def launched_singly(table: StepTable, shape: TileShape) -> Flags:
    """Which steps' kernels are launched one by one, so that a step lasts as long as that takes at least."""
    launches = bool(family(shape.family).named(Place.LAUNCH))
    return table.mixed & launches & (table.tokens > shape.largest_graph)


def choose_knots(tokens: Floats, sizes: tuple[int, ...] = (), least: int = 4) -> tuple[int, ...]:
    """Knots of the curve that the data can place: each with `least` steps nearer to it than to the next.

    `sizes` are token counts where the curve may jump, as between CUDA graphs: knots too.
    """
    low, high = int(tokens.min()), int(tokens.max())
    inside = sorted({k for k in (*_KNOTS, *sizes) if low < k < high})
    knots = [low, *inside, high] if high > low else [low]
    while len(knots) > 2:
        middles = np.sqrt(np.array(knots[:-1], float) * np.array(knots[1:], float))
        counts = np.bincount(np.searchsorted(middles, tokens), minlength=len(knots))
        thin = [i for i in range(1, len(knots) - 1) if counts[i] < least]
        if not thin:
            break
        knots.pop(min(thin, key=lambda i: counts[i]))
    return tuple(knots)
