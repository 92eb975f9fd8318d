"""Decode time in two pieces: one line in the context for the first steps of a stretch, another for the rest.

The piece that holds for a step follows from its own context and longest context alone, and while a batch
decodes it changes once. Sums over any cut of steps therefore agree to the nanosecond, as with one line.
"""

from __future__ import annotations

from pagecast.sim.costs.decode_line import DecodeLine


class TwoPieces(DecodeLine):
    """As a tuple it is the later line; `first` holds for as many steps as `first_steps` says."""

    first: DecodeLine

    def first_steps(self, ctx: int, mx: int) -> int:
        """Steps from this one on that `first` holds for; none where it is 0 or less."""
        raise NotImplementedError

    def ns(self, ctx: int, mx: int, steps: int = 1) -> int:
        """Nanoseconds of `steps` consecutive decode steps, the first at context `ctx` (longest `mx`)."""
        early = self.first_steps(ctx, mx)
        if early <= 0:
            return super().ns(ctx, mx, steps)
        if early >= steps:
            return self.first.ns(ctx, mx, steps)
        before = self.first.ns(ctx, mx, early)
        return before + super().ns(ctx + early * self.n, mx + early, steps - early)

    def steps_begun(self, ctx: int, mx: int, within_ns: int, most: int, extra_ns: int = 0) -> int:
        """How many of `most` steps begin before `within_ns` has passed; at least one."""
        early = self.first_steps(ctx, mx)
        if early <= 0:
            return super().steps_begun(ctx, mx, within_ns, most, extra_ns)
        if early >= most:
            return self.first.steps_begun(ctx, mx, within_ns, most, extra_ns)
        spent = self.first.ns(ctx, mx, early) + extra_ns * early
        if spent >= within_ns:
            return self.first.steps_begun(ctx, mx, within_ns, early, extra_ns)
        rest = super().steps_begun(
            ctx + early * self.n, mx + early, within_ns - spent, most - early, extra_ns
        )
        return early + rest


class WindowLine(TwoPieces):
    """Layers that attend to `window` tokens at most: time grows with the context until its mean is that.

    For uneven contexts this is the most it can be: the mean of what is attended never exceeds the lesser of
    window and mean context.
    """

    window: int

    @classmethod
    def over(cls, line: DecodeLine, window: int, slope: int) -> WindowLine:
        """Adds `slope` femtoseconds to `line` for each context token, `window` of a request at most.

        Of several windows the narrowest comes first.
        """
        later = DecodeLine(*line)._replace(base=line.base + slope * window * line.n)
        return cls.of(later, steeper(line, slope), window)

    @classmethod
    def of(cls, later: DecodeLine, first: DecodeLine, window: int) -> WindowLine:
        """`first` while the mean context is below `window`, then `later`."""
        line = cls(*later)
        line.first, line.window = first, window
        return line

    def first_steps(self, ctx: int, mx: int) -> int:
        """Steps from this one on whose mean context is below the window."""
        return -((ctx - self.n * self.window) // self.n)

    def scaled(self, factor: float) -> WindowLine:
        """Every time `factor` as long."""
        return WindowLine.of(DecodeLine(*self).scaled(factor), self.first.scaled(factor), self.window)

    def longer(self, femtoseconds: int) -> WindowLine:
        """Every step longer by the same time."""
        first = self.first.longer(femtoseconds)
        return WindowLine.of(DecodeLine(*self).longer(femtoseconds), first, self.window)


def steeper(line: DecodeLine, slope: int) -> DecodeLine:
    """A plain line, or one over windows, with `slope` femtoseconds more for each context token."""
    plain = DecodeLine(*line)._replace(per_ctx=line.per_ctx + slope)
    if isinstance(line, WindowLine):
        return WindowLine.of(plain, steeper(line.first, slope), line.window)
    return plain
