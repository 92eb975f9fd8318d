"""Decode time as a chain of straight pieces in the mean context.

Between two measured contexts the time is a line. While a batch decodes all its contexts grow together, so
that a stretch of steps crosses the pieces in order, and its sums are those of single steps to the nanosecond.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from math import inf

from pagecast.sim.costs.decode_line import DecodeLine


class ContextPieces(DecodeLine):
    """Lines by mean context: `pieces[i]` holds from a total context of `starts[i]` tokens on.

    As a tuple it is the last piece.
    """

    starts: list[int]
    pieces: list[DecodeLine]

    @classmethod
    def of(cls, starts: list[int], pieces: list[DecodeLine]) -> ContextPieces:
        """`starts` ascend from 0, one for each piece."""
        line = cls(*pieces[-1])
        line.starts, line.pieces = starts, pieces
        return line

    def scaled(self, factor: float) -> ContextPieces:
        """Every time `factor` as long."""
        return ContextPieces.of(self.starts, [piece.scaled(factor) for piece in self.pieces])

    def longer(self, femtoseconds: int) -> ContextPieces:
        """Every step longer by the same time, but never of negative length at the shortest context."""
        added = max(femtoseconds, -self.pieces[0].base)
        pieces = [piece._replace(base=piece.base + added) for piece in self.pieces]
        return ContextPieces.of(self.starts, pieces)

    def at_least(self, femtoseconds: int) -> ContextPieces:
        """No step shorter than that. Pieces must not fall with the context."""
        starts: list[int] = []
        pieces: list[DecodeLine] = []
        for start, piece, end in zip(self.starts, self.pieces, [*self.starts[1:], inf], strict=True):
            short = femtoseconds - piece.base - piece.per_ctx * start
            long_from: float = start
            if short > 0:
                starts.append(start)
                pieces.append(DecodeLine(self.n, femtoseconds, 0, 0))
                long_from = start - (-short // piece.per_ctx) if piece.per_ctx > 0 else inf
            if long_from < end:
                starts.append(int(long_from))
                pieces.append(piece)
        return ContextPieces.of(starts, pieces)

    def ns(self, ctx: int, mx: int, steps: int = 1) -> int:
        """Nanoseconds of `steps` consecutive decode steps, the first at context `ctx` (longest `mx`)."""
        at = bisect_right(self.starts, ctx) - 1
        if at + 1 == len(self.starts) or ctx + (steps - 1) * self.n < self.starts[at + 1]:
            return self.pieces[at].ns(ctx, mx, steps)
        return sum(line.ns(*part) for line, part in self._parts(at, ctx, mx, steps))

    def steps_begun(self, ctx: int, mx: int, within_ns: int, most: int, extra_ns: int = 0) -> int:
        """How many of `most` steps begin before `within_ns` has passed; at least one."""
        at = bisect_right(self.starts, ctx) - 1
        if at + 1 == len(self.starts) or ctx + (most - 1) * self.n < self.starts[at + 1]:
            return self.pieces[at].steps_begun(ctx, mx, within_ns, most, extra_ns)
        count = 0
        for line, (here, longest, steps) in self._parts(at, ctx, mx, most):
            if count and within_ns <= 0:
                break
            piece_ns = line.ns(here, longest, steps) + extra_ns * steps
            if piece_ns >= within_ns or count + steps == most:
                return count + line.steps_begun(here, longest, within_ns, steps, extra_ns)
            count += steps
            within_ns -= piece_ns
        return count

    def _parts(
        self, at: int, ctx: int, mx: int, steps: int
    ) -> Iterator[tuple[DecodeLine, tuple[int, int, int]]]:
        """The pieces that `steps` steps cross, each with its context, longest context and steps."""
        while steps > 0:
            here = steps
            if at + 1 < len(self.starts):
                here = min(steps, -((ctx - self.starts[at + 1]) // self.n))
            if here > 0:
                yield self.pieces[at], (ctx, mx, here)
            ctx, mx, steps, at = ctx + here * self.n, mx + here, steps - here, at + 1
