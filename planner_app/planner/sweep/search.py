"""Next points of a search: generations of fixed size from Optuna's multi-objective TPE.

A generation depends only on the study's seed, its own number, and the trials of the generations before it in
the order of their numbers. It does not depend on the number of workers, on their speed, or on interruptions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from pagecast.planner_app.planner.sweep.options import GENERATION
from pagecast.planner_app.planner.sweep.space import MOST_POINTS, Knob, KnobValue, Point, Space
from pagecast.sim.core.errors import CannotRunHere

_SEEDS = 1_000_003  # distance between the seeds of two studies, so that no two share a generation's seed
_TRIES = 5  # draws from Optuna for each new point; then points are drawn at random from those left
CANNOT_RUN = 1e6  # violation of the constraints by a scenario that cannot run
_WORST = 1e12


class Observation(NamedTuple):
    """A trial for the search: its point, its objectives, and how far it violates its constraints.

    A value of None counts as the worst; a constraint of at most 0 is met.
    """

    point: Point
    values: tuple[float | None, ...]
    constraints: tuple[float, ...]


def generation(
    space: Space,
    more_is_better: Sequence[bool],
    trials: Sequence[Observation],
    *,
    seed: int,
    number: int,
    size: int = GENERATION,
) -> list[Point]:
    """The points of generation `number`, none of them tried before; fewer where the space is used up.

    `more_is_better` tells the direction of each objective; `trials` are those of all generations before, in
    order. Errors: CannotRunHere without Optuna.
    """
    optuna = _optuna()
    study = _study(optuna, space, more_is_better, trials, seed * _SEEDS + number, size)
    known_points = {_key(trial.point) for trial in trials}
    points: list[Point] = []
    for _ in range(_TRIES * size):
        if len(points) == size or len(known_points) == space.size:
            break
        optuna_trial = study.ask()
        point = {knob.name: _suggest(optuna_trial, knob) for knob in space.knobs}
        if _key(point) in known_points:
            study.tell(optuna_trial, state=optuna.trial.TrialState.FAIL)
            continue
        known_points.add(_key(point))
        points.append(point)
    return points + _left(space, known_points, size - len(points), seed * _SEEDS + number)


def _left(
    space: Space, known_points: set[tuple[tuple[str, KnobValue], ...]], count: int, seed: int
) -> list[Point]:
    """Points not tried yet, for TPE comes back to the best ones of a small space again and again."""
    if not count or space.size is None or space.size > MOST_POINTS:
        return []
    points = [point for point in space.grid() if _key(point) not in known_points]
    Random(seed).shuffle(points)
    return points[:count]


def version() -> str:
    """Optuna's version: another one may draw other points."""
    return str(_optuna().__version__)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise CannotRunHere("--search needs Optuna: pip install 'pagecast[app]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _study(
    optuna: Any,
    space: Space,
    more_is_better: Sequence[bool],
    trials: Sequence[Observation],
    seed: int,
    startup: int,
) -> Any:
    """A study in memory that knows the trials so far."""
    distributions = {knob.name: _distribution(optuna, knob) for knob in space.knobs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # multivariate draws and constraints are called experimental
        sampler = optuna.samplers.TPESampler(
            seed=seed % 2**32,
            multivariate=True,
            constant_liar=True,
            n_startup_trials=startup,
            constraints_func=lambda trial: trial.system_attrs["constraints"],
        )
        directions = ["maximize" if more else "minimize" for more in more_is_better]
        study = optuna.create_study(sampler=sampler, directions=directions)
        for trial in trials:
            values = [
                (-_WORST if more else _WORST) if value is None or not math.isfinite(value) else value
                for value, more in zip(trial.values, more_is_better, strict=True)
            ]
            observation = optuna.trial.create_trial(
                values=values,
                params={knob.name: _inner(knob, trial.point[knob.name]) for knob in space.knobs},
                distributions=distributions,
                system_attrs={"constraints": list(trial.constraints)},
            )
            study.add_trial(observation)
    return study


def _distribution(optuna: Any, knob: Knob) -> Any:
    """Numbers are drawn by their place in the list, so that neighbours stay neighbours."""
    kinds = optuna.distributions
    if knob.values:
        if knob.ordered:
            return kinds.IntDistribution(0, len(knob.values) - 1)
        return kinds.CategoricalDistribution(tuple(range(len(knob.values))))
    if knob.whole:
        return kinds.IntDistribution(int(knob.low), int(knob.high))
    return kinds.FloatDistribution(knob.low, knob.high)


def _suggest(optuna_trial: Any, knob: Knob) -> KnobValue:
    if knob.values:
        last = len(knob.values) - 1
        place: int = (
            optuna_trial.suggest_int(knob.name, 0, last)
            if knob.ordered
            else optuna_trial.suggest_categorical(knob.name, tuple(range(last + 1)))
        )
        return knob.values[place]
    value: KnobValue = (
        optuna_trial.suggest_int(knob.name, int(knob.low), int(knob.high))
        if knob.whole
        else optuna_trial.suggest_float(knob.name, knob.low, knob.high)
    )
    return value


def _inner(knob: Knob, value: KnobValue) -> float:
    if knob.values:
        return knob.values.index(value)
    assert isinstance(value, int | float)
    return value


def _key(point: Point) -> tuple[tuple[str, KnobValue], ...]:
    return tuple(point.items())
