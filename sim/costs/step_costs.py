"""Step costs: the interface of every cost model, in integer nanoseconds.

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


class StepCosts(Protocol):
    """A cost model: `Roofline`, `CalibratedCosts` or any object with these methods.

    A subclass inherits the answers of a model that no run was fitted to: clocks are steady, sharing spares
    nothing, and no size is out of range.
    """

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
        return 0

    def shared_ns(self, tokens: int, requests: int) -> int:
        """Device time that a step of `requests` decoding requests saves where `tokens` of their context are
        in the blocks of another request of the step as well, which has them fetched already.

        It is the same for all steps of a stretch of decode steps, and never more than their contexts take.
        """
        return 0

    def host_ns(self, requests: int) -> int:
        """CPU time a step of `requests` requests adds when nothing overlaps it."""
        ...

    def arrival_ns(self, input_tokens: int) -> int:
        """CPU time between steps for one arriving request of `input_tokens` prompt tokens."""
        ...

    def expected_error(self) -> str:
        """The error to expect of figures made with these costs: a `Note`, or a sentence."""
        ...

    def outside(
        self, longest_context: int, most_tokens: int, most_requests: int, block_size: int
    ) -> str | None:
        """A note on where a replay left the range that these costs are known for; None where it did not.

        The replay's largest values: `longest_context` tokens in a request, `most_tokens` computed in a step,
        `most_requests` decoding in a step. `block_size` is in tokens.
        """
        return None
