"""Corrections of step costs from times of single batches (`runs.timed_steps`).

Device times of exact batches tell the factors of decode steps and of steps with prompts, and nothing of the
host; times of whole iterations tell the host too. Logarithms are fitted by least squares, with priors as wide
as costs were off elsewhere, and batches that no line comes near count less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.calibration.scaled import CorrectedCosts
from pagecast.sim.costs.measured.corrections import Corrections
from pagecast.sim.costs.measured.costs import MeasuredCosts
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.fitting.from_bench import corrected, prior_of
from pagecast.sim.runs.timed_steps import TimedSteps
from pagecast.sim.scenario import Scenario
from pagecast.traces.arrays import Flags, Floats

_MISFIT = 0.02  # what three numbers can't say of single steps, at the least
_FAR = 3.0  # standard deviations, beyond which a batch counts less
_ROUNDS = 30


def fit_steps(measured: Sequence[TimedSteps], scenario: Scenario, name: str) -> Corrections:
    """Corrections of the scenario's costs that make batches take as long as measured. Errors: BadInput."""
    base = scenario.step_costs()
    if isinstance(base, MeasuredCosts | CorrectedCosts):
        base = base.corrected(Corrections(name, 0.0, 1.0, 1.0))
    host = any(one.with_host for one in measured)
    if host and not all(one.with_host for one in measured):
        raise BadInput(
            "times with the host and without it can't be fitted together; calibrate by one of them"
        )
    batches = [batch for one in measured for batch in one.batches]
    took = np.array([second for one in measured for second in one.seconds])
    ours = np.array([device_s(base, batch) for batch in batches])
    prompt = np.array([bool(batch.prefill) for batch in batches])
    prior_sd = prior_of(scenario.step_costs())
    x, covariance = _fitted(ours, took, prompt, prior_sd, host)
    sources = tuple(_source(one, base, corrected(base, _corrections(x, name))) for one in measured)
    fitted = replace(
        _corrections(x, name),
        covariance=tuple(tuple(map(float, row)) for row in covariance),
        prior_sd=prior_sd,
        made_for=scenario.target().identity,
        sources=sources,
    )
    if isinstance(base, MeasuredCosts):
        return fitted
    return replace(fitted, base=base.corrected_name if isinstance(base, CorrectedCosts) else base.name)


def device_s(costs: StepCosts, batch: Batch) -> float:
    """The device time of a batch, in seconds."""
    if batch.prefill:
        return costs.device_ns(batch) / 1e9
    return costs.decode_line(batch.decode_n).ns(batch.decode_ctx, batch.decode_max) / 1e9


def _corrections(x: Floats, name: str) -> Corrections:
    return Corrections(name, float(x[0]) / 1e3, math.exp(x[1]), math.exp(x[2]))


def _fitted(
    ours: Floats, took: Floats, prompt: Flags, prior_sd: Sequence[float], host: bool
) -> tuple[Floats, Floats]:
    """Host milliseconds and logarithms of the two factors, with their covariance."""
    precision = np.diag(1 / np.square(np.array(prior_sd)))
    if not host:
        precision[0, 0] = 1e12  # it stays as it is
    kind = np.where(prompt, 2, 1)
    x: Floats = np.zeros(3)
    matrix = precision
    for _ in range(_ROUNDS):
        device = ours * np.exp(x[kind])
        model = np.maximum(device + x[0] / 1e3, 1e-7)
        off = np.log(took / model)
        jacobian = np.zeros((len(ours), 3))
        jacobian[:, 0] = 1e-3 / model if host else 0.0
        jacobian[np.arange(len(ours)), kind] = device / model
        sd = max(_MISFIT, 1.5 * float(np.median(np.abs(off - np.median(off)))))
        weights = np.minimum(1.0, _FAR * sd / np.maximum(np.abs(off), 1e-12)) / sd**2
        matrix = jacobian.T @ (jacobian * weights[:, None]) + precision
        x = x + np.linalg.solve(matrix, jacobian.T @ (weights * off) - precision @ x)
    covariance = np.asarray(np.linalg.inv(matrix), np.float64)
    if not host:
        covariance[0, 0] = prior_sd[0] ** 2
    return x, covariance


def _source(measured: TimedSteps, before: StepCosts, after: StepCosts) -> dict[str, float | int | str]:
    """Median errors of decode steps and of steps with prompts, in percent."""
    row: dict[str, float | int | str] = {"name": measured.name, "requests": len(measured.batches)}
    for key in ("decode", "prompt"):
        of = [at for at, batch in enumerate(measured.batches) if bool(batch.prefill) == (key == "prompt")]
        for when, costs in (("before", before), ("after", after)):
            ratios = [device_s(costs, measured.batches[at]) / measured.seconds[at] for at in of]
            if ratios:
                row[f"{key}_percent_{when}"] = 100 * (float(np.median(ratios)) - 1)
    return row
