"""Trials that need no replay: those that differ from another by limits which that one never met.

Points are alike that differ by limits alone (`sim.replay.room`). Of these the one with the largest batch, the
largest token budget and the least memory is replayed first, for it says most about the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pagecast.planner_app.planner.sweep.space import Knob, KnobValue, Point
from pagecast.planner_app.planner.sweep.trial import TrialResult, at, check_memory
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay.room import LIMITS, Room
from pagecast.sim.scenario import Scenario
from pagecast.sim.scenario.scenario import MEMORY_LIMITS

_MEMORY = (*MEMORY_LIMITS, "num_gpu_blocks")
_Key = tuple[tuple[str, KnobValue], ...]


class Sharing:
    """Trials replayed so far with what they left of their limits, by the values of all other knobs."""

    def __init__(self, scenario: Scenario, knobs: Sequence[Knob]) -> None:
        self._scenario = scenario
        self._varied = any(knob.name in LIMITS for knob in knobs)
        self._known: dict[_Key, list[tuple[Room, TrialResult]]] = defaultdict(list)
        self._round = 0

    def note(self, point: Point, outcome: TrialResult) -> None:
        """Takes note of a replay."""
        if outcome.room is not None:
            self._known[_others(point)].append((outcome.room, outcome))

    def answer(self, point: Point) -> TrialResult | None:
        """The result at a point where a replay that is known goes the same way."""
        known = self._known.get(_others(point))
        if not known:
            return None
        try:
            scenario = at(self._scenario, point)
            check_memory(scenario)
        except BadInput:  # which its own trial tells
            return None
        for room, outcome in known:
            if room.holds(scenario):
                return _with_pool(outcome, room, scenario)
        return None

    def next(self, points: Mapping[int, Point]) -> list[int]:
        """The numbers of those points that are to be replayed next.

        All where no limit varies. Else a few of those that are alike, each time twice as many, so that in the
        end few replays tell what others would have, and few wait for others.
        """
        if not self._varied:
            return list(points)
        count = 1 << self._round
        self._round += 1
        alike: dict[_Key, list[int]] = defaultdict(list)
        for number, point in points.items():
            alike[_others(point)].append(number)
        return [number for group in alike.values() for number in _in_order(points, group)[:count]]

    def begin(self) -> None:
        """Begins with few again."""
        self._round = 0


def _others(point: Point) -> _Key:
    return tuple((name, value) for name, value in point.items() if name not in LIMITS)


def _in_order(points: Mapping[int, Point], numbers: Sequence[int]) -> list[int]:
    """Numbers by memory, the least first, among batches and budgets of which the largest come first."""
    classes: dict[tuple[float, ...], list[tuple[tuple[float, ...], int]]] = defaultdict(list)
    for number in numbers:
        point = points[number]
        batch = tuple(-_amount(point[name]) for name in LIMITS if name in point and name not in _MEMORY)
        memory = tuple(_amount(point[name]) for name in _MEMORY if name in point)
        classes[batch].append((memory, number))
    ranked = [
        (rank, batch, number)
        for batch, group in classes.items()
        for rank, (_, number) in enumerate(sorted(group))
    ]
    return [number for _, _, number in sorted(ranked)]


def _amount(value: KnobValue) -> float:
    """A limit as a number; an engine's own, which is none, first."""
    return float(value) if isinstance(value, int | float) else float("-inf")


def _with_pool(outcome: TrialResult, room: Room, scenario: Scenario) -> TrialResult:
    """A result with the figures that a pool of another size has."""
    blocks = scenario.limits().num_blocks
    figures = {
        "num_gpu_blocks": scenario.blocks(),
        "peak_kv_usage": room.blocks / blocks,
        "evicted_blocks": room.evicted_in(blocks),
    }
    return replace(outcome, figures={**outcome.figures, **figures})
