"""Draws of step costs: one for each replicate of a forecast, for its intervals.

A draw of a calibration consists of the coefficients of one bootstrap copy, a level for the whole run, a level
for steps with prompts against pure decode steps, and noise on each step with prompts. The second level leaves
the total of a load like the fitted ones unchanged. Both levels are quasi-random: few draws cover their
distributions as evenly as many independent ones. Single decode steps get no noise, since a request's decode
averages over hundreds of them. A draw of measured operations has a level, one for steps with prompts against
pure decode steps, and one for the host of synchronous steps; a draw of the roofline has a level alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.file import Calibration
from pagecast.sim.costs.calibration.option_costs import OptionCosts
from pagecast.sim.costs.calibration.scaled import CorrectedCosts, ScaledCosts
from pagecast.sim.costs.measured.corrections import Corrections
from pagecast.sim.costs.measured.costs import MeasuredCosts
from pagecast.sim.costs.measured.spread import PROMPT_SHARE
from pagecast.sim.costs.roofline import UNCHECKED_PERCENT, Roofline, unchecked_percent
from pagecast.sim.costs.step_costs import StepCosts

CORRECTED_SD = 0.03  # sd of the level of corrected measured operations on another load, as assumed in the fit
UNFITTED_SD = 0.12  # sd of the level of roofline costs, whose stated error is 25%
_BLOCK = 1024
_MOST_ALIKE = 0.99
_OUTERMOST = 1e-3
_ANGLES = 20_001  # of a quarter turn
# Steps of the additive recurrence that fills the square most evenly: 1 / g and 1 / g**2, where g**3 = g + 1
# (M. Roberts, "The unreasonable effectiveness of quasirandom sequences", 2018).
_STEPS = (0.7548776662466927, 0.5698402909980532)
# The same in four dimensions, g**5 = g + 1: level, steps with prompts, host, client.
_FOUR_STEPS = (0.8566748838545029, 0.733891856627126, 0.6287067210378087, 0.5385972572236101)


class Drawn(CalibratedCosts):
    """The costs of draw number `index`; equal seeds and numbers give equal costs."""

    def __init__(
        self, calibration: Calibration, index: int, *, seed: int = 0, pipeline_depth: int = 0
    ) -> None:
        random = np.random.default_rng([seed, index])
        noise = calibration.noise
        of_total, of_kind = _levels(index, seed)
        total = _heavy(of_total, noise.freedom) * noise.total_sd
        apart = _heavy(of_kind, noise.kind_freedom) * noise.kind_sd
        # Steps with prompts take exp(apart) times as long. The level compensates for that in the total of a
        # load like the fitted ones.
        level = math.exp(total - noise.prompt_share * apart)
        copies = calibration.replicates or (_values(calibration),)
        values = tuple(value * level for value in copies[index % len(copies)])
        hosts = calibration.hosts or (calibration.host,)
        drawn = replace(calibration, host=hosts[index % len(hosts)])
        super().__init__(_host_scaled(drawn, level), values, pipeline_depth=pipeline_depth)
        self.lookup_level = _heavy(_levels(index, seed, _FOUR_STEPS)[3], math.inf)
        self._random = random
        self._apart = math.exp(apart)
        self._noise: list[float] = []
        self._state: float | None = None

    def device_ns(self, batch: Batch) -> int:
        """Device time of a step with prompt chunks, with noise of its own."""
        if not self._noise:
            self._noise = self._more_noise()
        return round(super().device_ns(batch) * self._noise.pop())

    def _more_noise(self) -> list[float]:
        """Factors of the next steps with prompts, in reverse order: lognormal and correlated."""
        noise = self.calibration.noise
        sd, like = noise.prompt_sd, min(max(noise.correlation, 0.0), _MOST_ALIKE)
        fresh = math.sqrt(1 - like**2)
        state, factors = self._state, []
        for value in self._random.standard_normal(_BLOCK).tolist():
            state = value if state is None else like * state + fresh * value
            factors.append(self._apart * math.exp(sd * state - sd**2 / 2))
        self._state = state
        return factors[::-1]

    def launch_ns(self, batch: Batch) -> int:
        """Time to launch a step with prompt chunks, scaled by the level of such steps in this draw."""
        return round(super().launch_ns(batch) * self._apart)


def with_lookup_drawn(costs: CalibratedCosts, options: OptionCosts) -> OptionCosts:
    """The host's time for n-grams in this draw, where the costs are one."""
    return options.with_lookup_level(costs.lookup_level) if isinstance(costs, Drawn) else options


def draw(costs: StepCosts, index: int, seed: int = 0) -> StepCosts:
    """Draw number `index` of any costs."""
    if isinstance(costs, CalibratedCosts):
        return Drawn(costs.calibration, index, seed=seed, pipeline_depth=costs.pipeline_depth)
    if isinstance(costs, MeasuredCosts) and costs.corrections is not None:
        return ScaledCosts(_redrawn(costs, costs.corrections, index, seed), _level(CORRECTED_SD, index, seed))
    if isinstance(costs, CorrectedCosts):
        variant = _as_likely(costs.corrections, index, seed)
        return ScaledCosts(costs.corrected(variant), _level(CORRECTED_SD, index, seed))
    if isinstance(costs, MeasuredCosts):
        return _drawn_measured(costs, index, seed)
    return ScaledCosts(costs, _level(_unfitted_sd(costs), index, seed))


@dataclass(frozen=True)
class Uncertainty:
    """Spread of costs in logarithms: of all steps, and of steps with prompts apart from decode steps.

    Each is a standard deviation and Student's degrees of freedom. `prompt_share`: the part of a usual load's
    time in steps with prompts, which the level of all steps makes up for.
    """

    level: tuple[float, float]
    apart: tuple[float, float]
    prompt_share: float


def uncertainty(costs: StepCosts) -> Uncertainty:
    """The distribution that `draw` draws from, without single coefficients and steps."""
    if isinstance(costs, CalibratedCosts):
        noise = costs.calibration.noise
        apart = noise.kind_sd, noise.kind_freedom
        return Uncertainty((noise.total_sd, noise.freedom), apart, noise.prompt_share)
    if isinstance(costs, MeasuredCosts) and costs.corrections is None:
        spread = costs.spread
        apart = spread.prompt_sd, spread.prompt_freedom
        return Uncertainty((spread.sd, spread.freedom), apart, PROMPT_SHARE)
    sd = CORRECTED_SD if isinstance(costs, MeasuredCosts | CorrectedCosts) else _unfitted_sd(costs)
    return Uncertainty((sd, math.inf), (sd, math.inf), PROMPT_SHARE)


def half_width_percent(costs: StepCosts) -> float:
    """Half the width of the 90% interval of step times, in percent: how far the draws' levels lie apart."""
    sd, freedom = uncertainty(costs).level
    return 100 * math.sinh(sd * _heavy_95(freedom))


def _heavy_95(freedom: float) -> float:
    """`_heavy(0.95, freedom)` without SciPy, which takes longer to import than a replay takes.

    With t = sqrt(freedom) tan(angle), Student's t has a density of cos(angle) ** (freedom - 1).
    """
    if math.isinf(freedom):
        return NormalDist().inv_cdf(0.95)
    angles = np.linspace(0.0, math.pi / 2, _ANGLES)
    heights = np.cos(angles) ** (freedom - 1)
    areas = np.concatenate(([0.0], np.cumsum(heights[1:] + heights[:-1])))
    angle = float(np.interp(0.9, areas / areas[-1], angles))  # 90% to both sides, 95% below
    return math.sqrt(freedom) * math.tan(angle)


def _unfitted_sd(costs: StepCosts) -> float:
    """As UNFITTED_SD, for a roofline of a model of which more must be allowed for."""
    if isinstance(costs, Roofline):
        return UNFITTED_SD * unchecked_percent(costs.model) / UNCHECKED_PERCENT
    return UNFITTED_SD


def _drawn_measured(costs: MeasuredCosts, index: int, seed: int) -> StepCosts:
    """A level for all steps, and steps with prompts apart from it.

    The level compensates for what steps with prompts take longer in the total of a usual load.
    """
    of_level, of_prompts, of_host, _ = _levels(index, seed, _FOUR_STEPS)
    spread = costs.spread
    host = costs.host_spread
    costs = costs.on_drawn_host(math.exp(host.mean + host.sd * _heavy(of_host, math.inf)))
    level = spread.sd * _heavy(of_level, spread.freedom)
    apart = spread.prompt_sd * _heavy(of_prompts, spread.prompt_freedom)
    decode = math.exp(level - PROMPT_SHARE * apart)
    return ScaledCosts(costs, decode, decode * math.exp(apart))


def client_level(sd: float, freedom: float, index: int, seed: int) -> float:
    """Logarithm of a client's share in draw number `index`."""
    return sd * _heavy(_levels(index, seed, _FOUR_STEPS)[3], freedom)


def _level(sd: float, index: int, seed: int, freedom: float = math.inf) -> float:
    return math.exp(sd * _heavy(_levels(index, seed)[0], freedom))


def _redrawn(costs: MeasuredCosts, corrections: Corrections, index: int, seed: int) -> MeasuredCosts:
    return costs.corrected(_as_likely(corrections, index, seed))


def _as_likely(corrections: Corrections, index: int, seed: int) -> Corrections:
    """Corrections as likely as the fitted ones, given the results that they were fitted to."""
    random = np.random.default_rng([seed, index, 1])
    step_ms, decode, prompt = random.multivariate_normal(np.zeros(3), np.array(corrections.covariance))
    return replace(
        corrections,
        step_s=corrections.step_s + step_ms / 1e3,
        decode=corrections.decode * math.exp(decode),
        prompt=corrections.prompt * math.exp(prompt),
    )


def scaled(costs: StepCosts, factor: float) -> StepCosts:
    """The costs with every step `factor` as long: a forecast's sensitivity is measured with them."""
    if not isinstance(costs, CalibratedCosts):
        return ScaledCosts(costs, factor)
    calibration = costs.calibration
    values = tuple(value * factor for value in _values(calibration))
    return CalibratedCosts(_host_scaled(calibration, factor), values, pipeline_depth=costs.pipeline_depth)


def _host_scaled(calibration: Calibration, factor: float) -> Calibration:
    """The calibration with the host's share of a step multiplied by `factor`, as its coefficients are."""
    host = calibration.host
    longer = replace(
        host,
        step_ns=host.step_ns * factor,
        request_ns=host.request_ns * factor,
        launch_ns=host.launch_ns * factor,
        single_ns=host.single_ns * factor,
    )
    return replace(calibration, host=longer)


def _levels(index: int, seed: int, steps: tuple[float, ...] = _STEPS) -> tuple[float, ...]:
    """Point number `index` of a sequence that fills a unit cube evenly; `steps` are those of its sides."""
    shifts = np.random.default_rng(seed).random(len(steps)).tolist()
    return tuple((shift + index * step) % 1.0 for shift, step in zip(shifts, steps, strict=True))


def _heavy(share: float, freedom: float) -> float:
    """The quantile of Student's t at `share`, which is cut to 0.1% and 99.9%: no 90% interval shows more."""
    from scipy.special import stdtrit  # slow to import, and wanted where there are draws alone

    return float(stdtrit(freedom, min(max(share, _OUTERMOST), 1 - _OUTERMOST)))


def _values(calibration: Calibration) -> tuple[float, ...]:
    return (*calibration.curve_ns, *calibration.terms_ns.values())
