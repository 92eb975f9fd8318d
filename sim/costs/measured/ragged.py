"""Decode time of unequal contexts, where a kernel leaves SMs idle: the measured line and what is lost on top.

Both parts are exact sums over any cut of steps, and so is their total.
"""

from __future__ import annotations

from pagecast.sim.costs.decode_line import DecodeLine
from pagecast.sim.costs.families.fa3 import EVEN_TOKENS
from pagecast.sim.costs.families.uneven_line import UnevenLine
from pagecast.sim.costs.measured.lines import ContextPieces


class RaggedPieces(ContextPieces):
    """`ContextPieces` of equal contexts, with `lost` on top for unequal ones."""

    lost: UnevenLine

    @classmethod
    def around(cls, line: ContextPieces, cap: float, tail: float) -> RaggedPieces:
        """Adds to a line the share `cap` of its attention, at most what `tail` context tokens cost for each
        token by which the longest context exceeds the mean.

        A context token counts as it does in the last piece, where memory streams.
        """
        n, token = line.n, line.pieces[-1].per_ctx
        capped = DecodeLine(n, 0, round(token * cap), 0)
        longest = DecodeLine(n, 0, round(-token * tail / n), round(token * tail))
        return cls._joined(line, UnevenLine.of(longest, capped, DecodeLine(n, 0, 0, 0), EVEN_TOKENS))

    @classmethod
    def _joined(cls, line: ContextPieces, lost: UnevenLine) -> RaggedPieces:
        joined = cls(*line)
        joined.starts, joined.pieces, joined.lost = line.starts, line.pieces, lost
        return joined

    def scaled(self, factor: float) -> RaggedPieces:
        """Every time `factor` as long."""
        lost = self.lost
        first = DecodeLine(*lost.first).scaled(factor)
        longer = UnevenLine.of(DecodeLine(*lost).scaled(factor), first, lost.even, lost.even_tokens)
        return self._joined(super().scaled(factor), longer)

    def longer(self, femtoseconds: int) -> RaggedPieces:
        """Every step longer by the same time, but never of negative length at the shortest context."""
        return self._joined(super().longer(femtoseconds), self.lost)

    def at_least(self, femtoseconds: int) -> RaggedPieces:
        """No step of equal contexts shorter than that."""
        return self._joined(super().at_least(femtoseconds), self.lost)

    def ns(self, ctx: int, mx: int, steps: int = 1) -> int:
        """Nanoseconds of `steps` consecutive decode steps, the first at context `ctx` (longest `mx`)."""
        return super().ns(ctx, mx, steps) + self.lost.ns(ctx, mx, steps)

    def steps_begun(self, ctx: int, mx: int, within_ns: int, most: int, extra_ns: int = 0) -> int:
        """How many of `most` steps begin before `within_ns` has passed; at least one."""
        # Step k + 1 begins when k steps have passed: the least number that has passed by `within_ns`.
        below, above = 0, most
        guess = 1 + within_ns // max(self.ns(ctx, mx) + extra_ns, 1)
        while above - below > 1:
            guess = min(max(guess, below + 1), above - 1)
            elapsed_ns = self.ns(ctx, mx, guess) + extra_ns * guess
            if elapsed_ns >= within_ns:
                above = guess
            else:
                below = guess
            # Steps grow slowly, so that the mean of those looked at leads near the end.
            guess = within_ns * guess // max(elapsed_ns, 1) + (elapsed_ns < within_ns)
            if not below < guess < above:
                guess = (below + above) // 2
        return above
