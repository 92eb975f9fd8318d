"""What a step costs: one interface for every cost model, in integer nanoseconds.

A step has CPU work on the host (scheduling, launching, handing out tokens) and work on the device.
Without pipelining a step takes their sum; at pipeline depth 1 they overlap. A pure decode step's
device time is linear in its context, so that k steps are summed exactly in closed form: that is what
lets a replay advance thousands of tokens as one event and still end on the same nanosecond.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple, Protocol

FEMTO = 1_000_000  # femtoseconds in a nanosecond


class Batch(NamedTuple):
    """The shape of one step, all that a cost may depend on.

    `decode_ctx` sums the context tokens of the decoding requests, without the token being computed;
    `decode_max` is the longest of them; `prefill` holds `(tokens computed, tokens already there)`
    for each prompt chunk, in no meaningful order. `after` is the number of tokens of the step before this
    one if that had prompt chunks, else 0: a GPU that has just done much arithmetic runs at lower clocks.
    """

    decode_n: int
    decode_ctx: int
    decode_max: int
    prefill: tuple[tuple[int, int], ...]
    after: int = 0


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

    def _potential(self, ctx: int, mx: int) -> int:
        # P(ctx + n, mx + 1) - P(ctx, mx) is one step's time, before rounding; doubled to stay integer.
        n = self.n
        twice = 2 * self.base * ctx + self.per_ctx * ctx * (ctx - n) + self.per_max * n * mx * (mx - 1)
        return twice // (2 * n * FEMTO)

    def ns(self, ctx: int, mx: int, steps: int = 1) -> int:
        """Nanoseconds of `steps` consecutive decode steps, the first at context `ctx` (longest `mx`)."""
        return self._potential(ctx + steps * self.n, mx + steps) - self._potential(ctx, mx)

    def steps_begun(self, ctx: int, mx: int, within_ns: int, most: int, extra_ns: int = 0) -> int:
        """How many of `most` steps begin before `within_ns` has passed; at least one.

        Each step takes `extra_ns` more than its device time. A step that would begin exactly at
        `within_ns` does not count: what happens at that time comes before it.
        """
        low, high = 1, most
        if within_ns <= 0 or most <= 1:
            return 1 if most >= 1 else 0
        if self.ns(ctx, mx, most - 1) + extra_ns * (most - 1) < within_ns:
            return most
        # Solve the quadratic for a first guess, then settle it exactly.
        slope = self.per_ctx * self.n + self.per_max
        first = self.base + self.per_ctx * ctx + self.per_max * mx + extra_ns * FEMTO
        target = within_ns * FEMTO
        if slope > 0:
            b = 2 * first - slope
            guess = (isqrt(b * b + 8 * slope * target) - b) // (2 * slope)
        else:
            guess = target // max(first, 1)
        # A window of one step on either side almost always holds the answer; otherwise bisect.
        # Invariant: step `low` begins in time, step `high` does not (steps counted from 1).
        for probe in (guess, guess + 1, guess + 2):
            if low < probe <= high:
                if self.ns(ctx, mx, probe - 1) + extra_ns * (probe - 1) < within_ns:
                    low = probe
                else:
                    high = probe
                    break
        while high - low > 1:
            middle = (low + high) // 2
            if self.ns(ctx, mx, middle - 1) + extra_ns * (middle - 1) < within_ns:
                low = middle
            else:
                high = middle
        return low


class StepCosts(Protocol):
    """A cost model: `Roofline`, `Calibrated` or any object with these methods."""

    name: str

    def device_ns(self, batch: Batch) -> int:
        """Device time of a step that computes at least one prompt chunk."""
        ...

    def launch_ns(self, batch: Batch) -> int:
        """CPU time, after `host_ns`, of launching a step with prompt chunks while the device computes it.

        It ends no sooner than the last launch; 0 where launching is quick (CUDA graphs, fused kernels).
        """
        ...

    def decode_line(self, n: int) -> DecodeLine:
        """Device time of a pure decode step of `n` >= 1 requests, as a line in its context."""
        ...

    def warm_ns(self, after: int) -> int:
        """Device time added to a decode step right after a step with prompts, of `after` tokens in all: what
        it and the next ones lose to a GPU that has just done much arithmetic."""
        ...

    def shared_ns(self, tokens: int, requests: int) -> int:
        """Device time that a step of `requests` decoding requests saves where `tokens` of their context are
        in the blocks of another request of the step as well, which has them fetched already.

        It is the same for all steps of a stretch of decode steps, and never more than their contexts take.
        """
        ...

    def host_ns(self, requests: int) -> int:
        """CPU time a step of `requests` requests adds when nothing overlaps it."""
        ...

    def arrival_ns(self, input_tokens: int) -> int:
        """CPU time between steps for one arriving request of `input_tokens` prompt tokens."""
        ...

    def expected_error(self) -> str:
        """The error to expect of figures made with these costs: a `Note`, or a sentence."""
        ...
