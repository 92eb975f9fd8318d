"""The largest step that holds: strides from a start, then interpolation or bisection, over whole numbers.

Steps are numbers of users, replicas, or powers of a factor. Larger ones tend to fail. A search asks as few as
it can, for each question is a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_FURTHEST = 6  # most strides that `settle` goes down at once, however low its guess is
_CHECKS = 3  # most restarts of a search, where a load above its answer holds after all
_BELOW = (1, 2, 4)  # steps below an answer, of which none may fail in a prudent search
Guess = Callable[[int, int], int | None]  # the likely answer between a step that holds and one that fails
Distance = Callable[[int], int]  # from a step to the likely answer


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step that holds, None if none does. `at_limit`: it holds at the end of the range too.

    A step is a number of users, or a power of `GRID`. `doubtful`: where a step fails below one that holds,
    the lowest that fails and the highest that holds; else None. `tried` counts the evaluations.
    """

    value: int | None
    at_limit: bool
    doubtful: tuple[int, int] | None
    tried: int


def largest(
    holds: Callable[[int], bool],
    bounds: tuple[int, int],
    *,
    start: int,
    step: int | Distance = 1,
    resolution: int = 1,
    verify: bool = True,
    prudent: bool = False,
    guess: Guess | None = None,
) -> LargestStep:
    """The largest step within `bounds` that holds, given that larger ones tend to fail.

    From `start` it goes in strides of `step` that double until a step that holds lies below one that fails,
    then halves the steps between to `resolution`, in turn with `guess` where there is one. A `step` that
    tells a distance is asked for each stride, which is at least `resolution`, and twice that the next time.
    With `verify` it also tries the steps on both sides of the answer. Where the one above holds, the search
    goes on from there: a single unlucky step does not decide. `prudent`: a single lucky one does not either:
    where a step shortly below the answer fails, the search goes on below all that failed.
    """
    low, high = bounds
    outcomes: dict[int, bool] = {}

    def ask(at: int) -> bool:
        if at not in outcomes:
            outcomes[at] = holds(at)
        return outcomes[at]

    stride = step if isinstance(step, int) else resolution
    distance = None if isinstance(step, int) else step
    good, bad = _bracket(ask, low, high, min(max(start, low), high), max(stride, 1), distance)
    if good is not None:
        for _ in range(_CHECKS + 1):
            good, bad = _bisect(ask, good, bad, resolution, guess)
            beyond = min(bad + resolution, high)
            if not verify or bad > high or beyond == bad or not ask(beyond):
                break
            good, bad = _bracket(ask, beyond, high, beyond, resolution)
            assert good is not None
        if verify and good - resolution >= low:
            ask(good - resolution)
        while prudent and good is not None:
            below = [max(good - times * resolution, low) for times in _BELOW]
            if all(map(ask, below)):
                break
            failing = min(at for at, ok in outcomes.items() if not ok)
            known = max((at for at in outcomes if at < failing), default=low)
            good, bad = _bracket(ask, low, failing - 1, min(known, failing - 1), resolution)
            if good is not None:
                good, bad = _bisect(ask, good, min(bad, failing), resolution)
    failing = min((at for at, ok in outcomes.items() if not ok), default=high + 1)
    holding = max((at for at, ok in outcomes.items() if ok), default=low - 1)
    doubtful = (failing, holding) if failing < holding else None
    return LargestStep(good, good is not None and bad > high, doubtful, len(outcomes))


def settle(
    holds: Callable[[int], bool],
    guess: Callable[[int], int],
    bounds: tuple[int, int],
    *,
    start: int,
    resolution: int = 1,
    stride_up: Callable[[int], int] | None = None,
) -> LargestStep:
    """The largest step within `bounds` that holds, with few tries, from a `start` near it.

    While a step fails, the next try is `guess` of it: at least one stride lower, at most `_FURTHEST` strides,
    and the stride doubles each time. A guess that holds is likely the answer, so the step above it is next.
    Where `start` holds, the search goes up as in `largest`, at first by `stride_up` of it. The rest is
    bisected.
    """
    low, high = bounds
    outcomes: dict[int, bool] = {}

    def ask(at: int) -> bool:
        if at not in outcomes:
            outcomes[at] = holds(at)
        return outcomes[at]

    at, bad, stride = min(max(start, low), high), high + 1, max(resolution, 1)
    while not ask(at):
        if at == low:
            return LargestStep(None, False, None, len(outcomes))
        bad = at
        at = max(low, at - min(max(at - guess(at), stride), _FURTHEST * stride))
        stride *= 2
    if bad > high:
        first = 1 if stride_up is None else stride_up(at)
        good, bad = _bracket(ask, at, high, at, max(resolution, first))
        assert good is not None
    else:
        good, near = at, min(at + resolution, bad)
        if at == guess(bad) and not ask(near):
            bad = near
    good, bad = _bisect(ask, good, bad, resolution)
    return LargestStep(good, bad > high, None, len(outcomes))


def _bracket(
    ask: Callable[[int], bool],
    low: int,
    high: int,
    start: int,
    step: int,
    distance: Distance | None = None,
) -> tuple[int | None, int]:
    """A step that holds and a larger one that fails; beyond `high` where none does, None where none holds."""

    def far(at: int) -> int:
        return step if distance is None else max(distance(at), step)

    if ask(start):
        good = start
        while good < high:
            stride = far(good)
            at = min(good + stride, high)
            if not ask(at):
                return good, at
            good = at
            if stride == step:
                step *= 2
        return good, high + 1
    bad = start
    while bad > low:
        at = max(bad - far(bad), low)
        if ask(at):
            return at, bad
        bad = at
        step *= 2  # always: what fails was stopped, so that its distance is told too short
    return None, bad


def _bisect(
    ask: Callable[[int], bool], good: int, bad: int, resolution: int, guess: Guess | None = None
) -> tuple[int, int]:
    """Narrows to `resolution`: at a guess and at the middle in turn; once more at a guess next to an end."""
    guesses = 0  # in a row
    while bad - good > resolution:
        at, near = (good + bad) // 2, guess(good, bad) if guess is not None else None
        least, most = good + resolution, max(bad - resolution, good + 1)
        if near is not None and (not guesses or (guesses == 1 and not least < near < most)):
            at, guesses = min(max(near, least), most), guesses + 1
        else:
            guesses = 0
        if ask(at):
            good = at
        else:
            bad = at
    return good, bad
