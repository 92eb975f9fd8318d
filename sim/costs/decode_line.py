"""Decode line: device time of decode steps, linear in their context and summed in closed form.

That is what lets a replay advance thousands of tokens as one event and still end on the same nanosecond.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

FEMTO = 1_000_000  # femtoseconds in a nanosecond


class DecodeLine(NamedTuple):
    """Device time of a pure decode step of `n` requests, linear in its context.

    One step takes `base + per_ctx * decode_ctx + per_max * decode_max` femtoseconds. Rounding to
    nanoseconds is by differences of one potential, so durations of consecutive steps add up exactly:
    `ns(ctx, mx, 3) == ns(ctx, mx, 1) + ns(ctx + n, mx + 1, 1) + ns(ctx + 2 * n, mx + 2, 1)`.
    """

    n: int
    base: int
    per_ctx: int
    per_max: int

    def ns(self, ctx: int, mx: int, steps: int = 1) -> int:
        """Nanoseconds of `steps` consecutive decode steps, the first at context `ctx` (longest `mx`)."""
        # P(ctx + n, mx + 1) - P(ctx, mx) is one step's time, before rounding; doubled to stay integer.
        n, base, per_ctx, per_max = self
        base += base
        per_max *= n
        unit = 2 * n * FEMTO
        before = (base * ctx + per_ctx * ctx * (ctx - n) + per_max * mx * (mx - 1)) // unit
        ctx += steps * n
        mx += steps
        return (base * ctx + per_ctx * ctx * (ctx - n) + per_max * mx * (mx - 1)) // unit - before

    def scaled(self, factor: float) -> DecodeLine:
        """Every time `factor` as long."""
        return DecodeLine(self.n, *(round(value * factor) for value in self[1:]))

    def longer(self, femtoseconds: int) -> DecodeLine:
        """Every step longer by the same time, but never of negative length at no context."""
        return self._replace(base=max(self.base + femtoseconds, 0))

    def steps_begun(self, ctx: int, mx: int, within_ns: int, most: int, extra_ns: int = 0) -> int:
        """How many of `most` steps begin before `within_ns` has passed; at least one.

        Each step takes `extra_ns` more than its device time. A step that would begin exactly at
        `within_ns` does not count: what happens at that time comes before it.
        """
        if within_ns <= 0 or most <= 1:
            return 1 if most >= 1 else 0
        # The time before step k + 1 is a quadratic in k, rounded as in `ns`.
        n, base, per_ctx, per_max = self
        square = per_ctx * n + per_max
        linear = 2 * base + per_ctx * (2 * ctx - n) + per_max * (2 * mx - 1)
        start = 2 * base * ctx + per_ctx * ctx * (ctx - n) + per_max * n * mx * (mx - 1)
        unit = 2 * n * FEMTO
        begun = start % unit
        last = most - 1
        if begun + n * last * (square * last + linear) < (within_ns - extra_ns * last) * unit:
            return most
        # Solve it for a first guess of the steps before, then settle it exactly.
        first = linear - square + 2 * extra_ns * FEMTO
        target = within_ns * FEMTO
        if square > 0:
            b = first + square
            guess = (isqrt(b * b + 8 * square * target) - b) // (2 * square)
        else:
            guess = 2 * target // max(first, 1)
        # It is nearly always the answer, and hardly ever more than one step off; otherwise bisect.
        # Invariant: step `low` begins in time, step `high` does not (steps counted from 1).
        low = 1
        high = most
        for probe in (guess + 1, guess + 2, guess):
            if low < probe < high:
                k = probe - 1
                if begun + n * k * (square * k + linear) < (within_ns - extra_ns * k) * unit:
                    low = probe
                else:
                    high = probe
        while high - low > 1:
            middle = (low + high) // 2
            k = middle - 1
            if begun + n * k * (square * k + linear) < (within_ns - extra_ns * k) * unit:
                low = middle
            else:
                high = middle
        return low
