"""Costs of n-grams and of a host tier, fitted to recorded runs that had them.

Steps of such runs took longer than the calibration of plain runs says. What is left is explained by least
squares: with n-grams by a time per request of a step and one per step with prompts, with a host tier by a
time per step and one per block whose transfer was submitted in it. Rates of links are those of the recorded
copies themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.file import Calibration
from pagecast.sim.costs.calibration.option_costs import OptionCosts
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.runs.busy_steps import fitted_steps
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.transfers import LOAD, STORE, RecordedTransfer
from pagecast.sim.runs.validate import DecisionReplay
from pagecast.traces.arrays import Flags, Floats
from scipy.optimize import nnls

SPECULATIVE, OFFLOADING = "speculative_config", "kv_offloading"
_LEAST_STEPS = 20
_STRETCH, _RESAMPLES = 100, 200


def has_options(run: RecordedRun) -> bool:
    """Whether requests of a run speculated, or its KV was offloaded: its steps took more than plain ones."""
    config = run.meta.get("config", {})
    return bool(config.get(SPECULATIVE) or config.get(OFFLOADING))


def option_costs_of(calibration: Calibration, runs: Iterable[RecordedRun]) -> OptionCosts:
    """What the runs with options take beyond the calibration of plain ones.

    Host times come from synchronous runs with one of the two options, rates of links from all. Errors:
    BadInput for a run that both speculates and offloads: neither could be told from the other.
    """
    costs = CalibratedCosts(calibration)
    speculating, offloading = list[RecordedRun](), list[RecordedRun]()
    for run in runs:
        config = run.meta["config"]
        if config.get(SPECULATIVE) and config.get(OFFLOADING):
            raise BadInput(
                f"{run.folder}: has both n-grams and a host tier, whose costs can't be told apart: record "
                "one run with each"
            )
        (speculating if config.get(SPECULATIVE) else offloading).append(run)
    plain = [run for run in offloading if not run.pipeline_depth]
    step_ns, block_ns = offloading_ns(plain, costs)
    lookup_ns, prompt_ns, sd = lookup_ns_of(speculating, costs)
    return OptionCosts(
        lookup_ns=lookup_ns,
        lookup_prompt_ns=prompt_ns,
        lookup_sd=sd,
        load_bytes_per_s=bytes_per_s(offloading, LOAD),
        store_bytes_per_s=bytes_per_s(offloading, STORE),
        offloading_step_ns=step_ns,
        offloading_block_ns=block_ns,
    )


def lookup_ns_of(
    runs: Iterable[RecordedRun], costs: StepCosts, upto: float = 1.0
) -> tuple[float | None, float | None, float | None]:
    """Nanoseconds per request of a step, more per step with prompts, and how certain they are.

    The last is the standard deviation of the natural logarithm of all of that time together, over resampled
    stretches of steps. None without steps enough. `upto`: a share of each run's steps.
    """
    parts = [np.array(rows, np.float64) for run in runs if (rows := _lookup_rows(run, costs, upto))]
    if sum(map(len, parts)) < _LEAST_STEPS:
        return None, None, None
    every = np.concatenate(parts)
    units, more = every[:, :2], every[:, 2]
    fitted = _not_negative(units, more)
    random = np.random.default_rng(0)
    totals = []
    for _ in range(_RESAMPLES):
        some = np.concatenate([_stretches(part, random) for part in parts])
        again = _not_negative(some[:, :2], some[:, 2])
        totals.append(float((units @ again).sum()))
    mean = max(float(np.mean(totals)), 1.0)
    sd = min(float(np.std(totals)) / mean, 1.0)
    return float(fitted[0]), float(fitted[1]), sd


def _lookup_rows(run: RecordedRun, costs: StepCosts, upto: float) -> list[tuple[float, float, float]]:
    """For each step: requests that may verify, whether it has prompts, nanoseconds beyond its costs."""
    drafts = int(run.meta["config"][SPECULATIVE]["num_speculative_tokens"])
    rows = list[tuple[float, float, float]]()
    for number, took in _steps(run, upto):
        batch = run.steps.batch(number)
        verifying = sum(tokens <= 1 + drafts for tokens, _ in batch.prefill)
        prompts = len(batch.prefill) > verifying
        rows.append((batch.decode_n + verifying, float(prompts), excess_ns(run, costs, number, took)))
    return rows


def _not_negative(units: Floats, more: Floats) -> Floats:
    """Least squares of two costs, neither below zero."""
    used = units if units[:, 1].any() else units[:, :1]
    values, _ = nnls(used, more)
    return np.asarray([*values, 0.0][:2], np.float64)


def _stretches(rows: Floats, random: np.random.Generator) -> Floats:
    """As many rows as before, in stretches of neighbours drawn with replacement."""
    long = min(_STRETCH, len(rows))
    starts = random.integers(0, len(rows) - long + 1, size=-(-len(rows) // long))
    return np.asarray(rows[(starts[:, None] + np.arange(long)).ravel()[: len(rows)]], np.float64)


def offloading_ns(
    runs: Iterable[RecordedRun], costs: StepCosts, upto: float = 1.0
) -> tuple[float | None, float | None]:
    """Nanoseconds per step, and per block submitted with it; None without steps enough."""
    rows = [row for run in runs for row in offloading_rows(run, costs, upto)]
    if len(rows) < _LEAST_STEPS:
        return None, None
    blocks, more, _ = np.array(rows, np.float64).T
    table = np.stack([np.ones(len(blocks)), blocks], axis=1)
    step_ns, block_ns = _not_negative(table, more)
    return float(step_ns), float(block_ns)


def offloading_rows(
    run: RecordedRun, costs: StepCosts, upto: float = 1.0
) -> list[tuple[float, float, float]]:
    """For each step: the blocks submitted with it, nanoseconds beyond its costs, and those that it took.

    Left out are steps that submitted nothing while a copy of an earlier step went on: what they lost is the
    copy's.
    """
    blocks = submitted_blocks(run)
    beside = _beside_copies(run)
    return [
        (blocks[number], excess_ns(run, costs, number, took), took)
        for number, took in _steps(run, upto)
        if blocks[number] or not beside[number]
    ]


def _beside_copies(run: RecordedRun) -> Flags:
    """For each step whether a recorded copy went on during it."""
    steps = run.steps
    beside = np.zeros(len(steps), bool)
    for copy in _copies(run):
        beside |= (steps.start_ns < copy.end_ns) & (steps.end_ns > copy.start_ns)
    return beside


def _copies(run: RecordedRun) -> list[RecordedTransfer]:
    """The recorded copies between device and host; those to a disk are none of them."""
    return [transfer for transfer in run.transfers if transfer.kind in (LOAD, STORE)]


def submitted_blocks(run: RecordedRun) -> list[int]:
    """Blocks whose transfers were submitted with each step: its loads, and the stores of the step before.

    Where the run does not say when transfers were queued, this follows from its decisions.
    """
    last = len(run.steps) - 1
    copies = _copies(run)
    if copies:
        at = [copy.queued_ns for copy in copies]
        steps = np.maximum(np.searchsorted(run.steps.start_ns, at, side="right") - 1, 0)
        # A store is queued with the step that computes its blocks, and copied beside the next one.
        steps += [copy.kind == STORE for copy in copies]
        blocks = [copy.blocks for copy in copies]
        counts = np.bincount(np.minimum(steps, last), weights=blocks, minlength=len(run.steps))
        return [int(count) for count in counts]
    replay = DecisionReplay(run)
    submitted = []
    stored = 0
    for number in range(len(run.steps)):
        plan = replay.step(number)
        assert plan is not None
        submitted.append(stored + sum(len(job.blocks) for job in plan.loads))
        stored = sum(len(job.blocks) for job in plan.stores)
    return submitted


def excess_ns(run: RecordedRun, costs: StepCosts, number: int, took: float) -> float:
    """Nanoseconds that a step of a synchronous run took beyond its costs."""
    batch = run.steps.batch(number)
    if batch.prefill:
        return took - costs.device_ns(batch) - costs.host_ns(batch.decode_n + len(batch.prefill))
    line = costs.decode_line(batch.decode_n)
    return took - line.ns(batch.decode_ctx, batch.decode_max) - costs.host_ns(batch.decode_n)


def bytes_per_s(runs: Iterable[RecordedRun], kind: str) -> float | None:
    """The rate of all copies of one kind together; None where none was recorded."""
    moved = [transfer for run in runs for transfer in run.transfers if transfer.kind == kind]
    whole = [transfer for transfer in moved if not transfer.lost and transfer.end_ns > transfer.start_ns]
    if not whole:
        return None
    seconds = sum(transfer.end_ns - transfer.start_ns for transfer in whole) / 1e9
    return sum(transfer.bytes for transfer in whole) / seconds


def _steps(run: RecordedRun, upto: float) -> list[tuple[int, float]]:
    """Numbers of the steps that had work after them, and the nanoseconds that each took."""
    numbers, took = fitted_steps(run, upto)
    return list(zip(numbers.tolist(), took.tolist(), strict=True))
