"""The physical terms of a step's time as columns: one row per recorded step, one column per term."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from pagecast.sim.core.plan import DECODE_TOKENS
from pagecast.sim.costs.calibration import attention_work
from pagecast.sim.costs.calibration.shape import TileShape
from pagecast.sim.costs.calibration.terms import COOLING, padded
from pagecast.sim.runs.busy_steps import busy_steps
from pagecast.sim.runs.recorded import RecordedRun, Steps
from pagecast.sim.runs.validate import DecisionReplay

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Host time that neither hides device time nor is hidden by it where steps are not planned ahead.
HOST_TERMS = ("request", "prompt_chunk", "arrival", "arriving_token")
# What only engines whose decode attention splits work evenly have terms for.
OF_EVEN_SPLITS = (
    "first_kv_token",
    "shared_token",
    "short_shared_token",
    "light_prompt_tile",
    "prompt_kv_token",
)
# What launches stand for in steps with prompts that run without CUDA graphs.
OF_GRAPHS = ("ungraphed_step", "longest_prompt_tile")
LAUNCH = "launch_floor"
# Terms that are given up first where the data can't tell them from the others.
EXPENDABLE = (
    "prompt_kv_token",
    "light_prompt_tile",
    "short_shared_token",
    "first_kv_token",
    "decode_after_prompts",
    "longest_prompt_tile",
    "request_beside_prompt",
    "token_after_prompts",
    "ungraphed_step",
    "prompt_chunk",
    "arriving_token",
    "prompt_step",
    "arrival",
    "request",
    "prompt_tile",
)

_KNOTS = (
    1,
    2,
    4,
    8,
    16,
    32,
    48,
    64,
    80,
    96,
    128,
    160,
    192,
    224,
    256,
    320,
    384,
    448,
    512,
    640,
    768,
    1024,
    1280,
    1536,
    2048,
    3072,
    4096,
    6144,
    8192,
    12288,
    16384,
    24576,
    32768,
    49152,
    65536,
)


_TEXTS = ("run", "segments")  # of a `StepTable`, which otherwise holds columns


@dataclass(frozen=True)
class StepTable:
    """Steps ready to be fitted: their time from start to start, and what they computed.

    `ns` is the time to the next start; only steps after which there was work left are here. `index`
    numbers them within the run. `arrivals` and `arrived_tokens` came in that time.
    """

    run: str
    segments: tuple[str, ...]  # a sweep's, or the run itself
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
    after: Ints  # tokens of the step before, if it had prompt chunks
    prompt_tiles: Floats  # of one KV head
    prompt_span: Floats  # key blocks of the busiest SM in our own kernel; 0 for other engines
    prompt_ctx: Floats  # context tokens of all chunks
    longest_prompt: Floats  # keys of the longest chunk
    largest_chunk: Ints
    warm: Floats  # root of the tokens of the last step with prompts, fading with `COOLING`; 0 beside prompts
    shared: Floats  # context tokens of decoding requests that stand in another one's blocks too
    arrivals: Floats
    arrived_tokens: Floats

    def __len__(self) -> int:
        return len(self.ns)

    @property
    def mixed(self) -> npt.NDArray[np.bool_]:
        """Which steps compute prompt chunks."""
        return self.chunks > 0

    def take(self, rows: Ints) -> StepTable:
        """The table of the given rows, in that order; rows may repeat."""
        columns = {key: value[rows] for key, value in vars(self).items() if key not in _TEXTS}
        return StepTable(run=self.run, segments=self.segments, **columns)

    def parts(self) -> list[StepTable]:
        """Its segments, each as a table."""
        return [self.take(np.flatnonzero(self.segment == number)) for number in np.unique(self.segment)]

    @staticmethod
    def joined(parts: list[StepTable]) -> StepTable:
        """The opposite of `parts`: tables of one run as one."""
        first = parts[0]
        names = [name for name in vars(first) if name not in _TEXTS]
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return StepTable(run=first.run, segments=first.segments, **columns)


def step_table(run: RecordedRun, shape: TileShape, upto: float = 1.0) -> StepTable:
    """The steps of a run that had work after them, of its first part `upto` (a share of the steps)."""
    steps = run.steps if shape.prompt_graphs else single_tokens_decoding(run.steps)
    size, context = steps.prefill_tokens.astype(np.float64), steps.prefill_ctx.astype(np.float64)
    start = steps.start_ns
    keep, following, arrivals, arrived = busy_steps(run, upto)
    tokens = steps.decode_n + _per_step(steps, size).astype(np.int64)
    swept = "sweep" in run.meta
    columns: dict[str, npt.NDArray[Any]] = {
        "segment": steps.section if swept else np.zeros(len(steps), np.int64),
        "index": np.arange(len(steps)),
        "ns": (following - start).astype(np.float64),
        "sched_ns": steps.sched_ns.astype(np.float64),
        "gap_ns": (following - steps.end_ns).astype(np.float64),
        "n": steps.decode_n.astype(np.float64),
        "ctx": steps.decode_ctx.astype(np.float64),
        "longest": steps.decode_max.astype(np.float64),
        "chunks": np.diff(steps.prefill_start).astype(np.float64),
        "tokens": tokens,
        "after": _after(steps, tokens),
        "prompt_tiles": _per_step(steps, attention_work.chunk_tiles(shape, size, context)),
        "prompt_span": _spans(steps, shape),
        "prompt_ctx": _per_step(steps, context),
        "longest_prompt": _largest(steps, steps.prefill_tokens + steps.prefill_ctx).astype(np.float64),
        "largest_chunk": _largest(steps, steps.prefill_tokens),
        "warm": _warmth(steps, tokens, shape),
        "shared": _shared(run, shape),
        "arrivals": arrivals,
        "arrived_tokens": arrived,
    }
    kept = {key: value[keep] for key, value in columns.items()}
    return StepTable(run=run.name, segments=steps.sections if swept else (run.name,), **kept)


def _warmth(steps: Steps, tokens: Ints, shape: TileShape) -> Floats:
    """See `StepTable.warm`; 0 for engines whose calibrations knew no such term."""
    number = np.arange(len(steps))
    mixed = np.diff(steps.prefill_start) > 0
    last = np.maximum.accumulate(np.where(mixed, number, -1))
    known = (last >= 0) & ~mixed & (not shape.prompt_graphs)
    known &= steps.section[last] == steps.section
    return np.where(known, np.sqrt(tokens[last]) * COOLING ** (number - last - 1.0), 0.0)


def _shared(run: RecordedRun, shape: TileShape) -> Floats:
    """See `StepTable.shared`: the run's decisions replayed; 0 for every step where it has no requests, and
    for engines whose sequences wait for one another in attention's schedule."""
    if run.parts:
        return np.concatenate([_shared(part, shape) for part in run.parts])
    found = np.zeros(len(run.steps))
    if shape.tile_schedule or not len(run.requests) or run.spans is None:
        return found
    replay = DecisionReplay(run)
    memory = replay.scheduler.memory
    for number in range(len(run.steps)):
        replay.step(number)
        found[number] = memory.shared_tokens()
    return np.minimum(found, run.steps.decode_ctx)


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


def _spans(steps: Steps, shape: TileShape) -> Floats:
    """See `StepTable.prompt_span`."""
    found = np.zeros(len(steps))
    if shape.prompt_graphs or shape.tile_schedule:
        return found
    chunks = list(zip(steps.prefill_tokens.tolist(), steps.prefill_ctx.tolist(), strict=True))
    for i in np.flatnonzero(np.diff(steps.prefill_start)):
        begin, end = steps.prefill_start[i : i + 2]
        found[i] = attention_work.prompt_span(shape, chunks[begin:end])
    return found


def _after(steps: Steps, tokens: Ints) -> Ints:
    """Tokens of the step before each, if it had prompt chunks and was of the same section."""
    mixed = np.diff(steps.prefill_start) > 0
    follows = np.append(False, (steps.section[1:] == steps.section[:-1]) & mixed[:-1])
    return np.where(follows, np.append(0, tokens[:-1]), 0)


def _per_step(steps: Steps, values: Floats) -> Floats:
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(total[steps.prefill_start[1:]] - total[steps.prefill_start[:-1]], np.float64)


def _largest(steps: Steps, values: Ints) -> Ints:
    largest = np.zeros(len(steps), np.int64)
    owner = np.repeat(np.arange(len(steps)), np.diff(steps.prefill_start))
    np.maximum.at(largest, owner, values)
    return largest


def computed_rows(table: StepTable, shape: TileShape) -> Floats:
    """Tokens as each step computes them: up to the next CUDA graph size where a graph is used."""
    decode = padded(table.tokens, shape.graph_sizes)
    return np.where(table.mixed, padded(table.tokens, shape.padded_prompts), decode)


def launched_singly(table: StepTable, shape: TileShape) -> npt.NDArray[np.bool_]:
    """Which steps' kernels are launched one by one, so that a step lasts as long as that takes at least."""
    most = shape.prompt_sizes[-1] if shape.prompt_sizes else 0
    return table.mixed & (not shape.prompt_graphs) & (table.tokens > most)


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


def term_columns(table: StepTable, shape: TileShape) -> dict[str, Floats]:
    """One column for each of `TERMS`, in the unit its name says."""
    columns = _all_columns(table, shape)
    if shape.tile_schedule:
        columns |= {name: np.zeros(len(table)) for name in OF_EVEN_SPLITS}
    if not shape.prompt_graphs:
        columns["request"] = np.where(launched_singly(table, shape), 0.0, columns["request"])
        columns |= {name: np.zeros(len(table)) for name in OF_GRAPHS}
    return columns


def _all_columns(table: StepTable, shape: TileShape) -> dict[str, Floats]:
    mixed = table.mixed
    kv = table.ctx + attention_work.BLOCK / 2 * table.n
    if shape.tile_schedule:
        kv = kv + np.where(mixed, attention_work.spread_tokens(shape, table.n, table.ctx, table.longest), 0.0)
        kv = np.where(mixed, kv, decode_kv_tokens(table, shape))
    share = shape.kv_heads / shape.sms
    prompt = table.prompt_tiles * share
    if shape.tile_schedule:
        prompt = prompt + _outlasting(table, shape, prompt)
    elif not shape.prompt_graphs:
        prompt = table.prompt_span
    tokens = table.tokens.astype(np.float64)
    light = prompt * (0 if shape.prompt_graphs else attention_work.light_share(tokens))
    most = shape.graph_sizes[-1] if shape.graph_sizes and shape.prompt_graphs else 0
    return {
        "request": table.n + table.chunks,
        "prompt_step": (mixed & ~launched_singly(table, shape)).astype(np.float64),
        "ungraphed_step": ((table.tokens > most) & mixed & (most > 0)).astype(np.float64),
        "prompt_chunk": table.chunks,
        "request_beside_prompt": np.where(mixed, table.n, 0.0),
        "token_after_prompts": np.where(mixed, np.minimum(table.tokens, table.after), 0).astype(np.float64),
        "kv_token": kv,
        "decode_after_prompts": table.warm,
        "first_kv_token": np.minimum(table.ctx, attention_work.first_tokens(shape)),
        "shared_token": -table.shared,
        "short_shared_token": -table.shared * attention_work.short_share(shape, table.shared, table.n),
        "prompt_tile": prompt - light,
        "light_prompt_tile": light,
        "prompt_kv_token": table.prompt_ctx * (not shape.prompt_graphs),
        "longest_prompt_tile": table.longest_prompt / attention_work.BLOCK,
        LAUNCH: launched_singly(table, shape).astype(np.float64),
        "arrival": table.arrivals,
        "arriving_token": table.arrived_tokens,
    }


def decode_kv_tokens(table: StepTable, shape: TileShape) -> Floats:
    """Context tokens that decode attention reads in pure decode steps, idle SMs counted as reading."""
    n = np.maximum(table.n, 1.0)
    spread = table.ctx + attention_work.BLOCK / 2 * n
    spread = spread + attention_work.spread_tokens(shape, n, table.ctx, table.longest)
    even = table.longest - table.ctx / n < attention_work.EVEN_TOKENS
    blocks = np.ceil((table.longest + 1) / attention_work.BLOCK)
    waves = {size: attention_work.even_waves(shape, int(size)) for size in np.unique(n)}
    factor = np.array([waves[size] for size in n])
    return np.where(even, n * blocks * attention_work.BLOCK * factor, spread)


def _outlasting(table: StepTable, shape: TileShape, prompt: Floats) -> Floats:
    """Key blocks by which the longest tile outlasts all others' work, where it isn't split."""
    share = shape.kv_heads / shape.sms
    work = prompt + (table.ctx / attention_work.BLOCK + table.n / 2) * share
    longest = np.maximum(table.longest, table.longest_prompt) / attention_work.BLOCK
    whole = ~attention_work.splits_beside(shape, table.largest_chunk)
    return np.where(table.mixed & whole, np.maximum(0.0, longest - work), 0.0)
