"""Decode time of uneven sequences: the lesser of two lines in the context, or a third line for even ones.

Reading the caches of a decode batch takes as long as the SM that finishes last. Three regimes, each a
`DecodeLine`: even contexts (whole waves of tiles), a tail that grows with the longest context, and a cap once
long sequences are split. While a batch decodes, all contexts grow together: how far the longest one exceeds
the mean does not change, so evenness stays as it is, and the cap gives way to the tail at one step that
integers can tell. Sums over any cut of steps therefore agree to the nanosecond, as with a single line.
"""

from __future__ import annotations

from pagecast.sim.costs.decode_line import DecodeLine
from pagecast.sim.costs.pieces import TwoPieces


class UnevenLine(TwoPieces):
    """As a tuple it is the tail's line; `first` is the cap's and `even` the third, with the same base."""

    even: DecodeLine
    even_tokens: int

    @classmethod
    def of(cls, tail: DecodeLine, cap: DecodeLine, even: DecodeLine, even_tokens: int) -> UnevenLine:
        """Joins the three; `even` is for a longest context less than `even_tokens` above the mean."""
        line = cls(*tail)
        line.first, line.even, line.even_tokens = cap, even, even_tokens
        return line

    def scaled(self, factor: float) -> UnevenLine:
        """Every time `factor` as long."""
        tail = DecodeLine(*self).scaled(factor)
        return self.of(tail, self.first.scaled(factor), self.even.scaled(factor), self.even_tokens)

    def longer(self, femtoseconds: int) -> UnevenLine:
        """Every step longer by the same time."""
        tail = DecodeLine(*self).longer(femtoseconds)
        return self.of(
            tail, self.first.longer(femtoseconds), self.even.longer(femtoseconds), self.even_tokens
        )

    def first_steps(self, ctx: int, mx: int) -> int:
        """Steps from this one on that the cap is the lesser for."""
        cap = self.first
        over = self.base - cap.base + (self.per_ctx - cap.per_ctx) * ctx + (self.per_max - cap.per_max) * mx
        slope = (self.per_ctx - cap.per_ctx) * self.n + self.per_max - cap.per_max
        if over <= 0:
            return 0
        return -(over // slope) if slope < 0 else 1 << 60

    def ns(self, ctx: int, mx: int, steps: int = 1) -> int:
        """Nanoseconds of `steps` consecutive decode steps, the first at context `ctx` (longest `mx`)."""
        if self.n * mx - ctx < self.even_tokens * self.n:
            return self.even.ns(ctx, mx, steps)
        return super().ns(ctx, mx, steps)

    def steps_begun(self, ctx: int, mx: int, within_ns: int, most: int, extra_ns: int = 0) -> int:
        """How many of `most` steps begin before `within_ns` has passed; at least one."""
        if self.n * mx - ctx < self.even_tokens * self.n:
            return self.even.steps_begun(ctx, mx, within_ns, most, extra_ns)
        return super().steps_begun(ctx, mx, within_ns, most, extra_ns)
