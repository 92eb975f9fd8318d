"""Speculation of one replica: a drafter for the scheduler, and what comes of its guesses.

Every draw is a function of the seed, the request and how far its output is, and of nothing else: a replay
stays a pure function, and one request accepts the same guesses at any load.
"""

from __future__ import annotations

from struct import Struct

import xxhash
from pagecast.sim.core.plan import DONE, Outcome, StepPlan
from pagecast.sim.core.request import Request
from pagecast.sim.speculation.config import SpeculativeConfig
from pagecast.sim.speculation.recorded import RecordedGuesses

_PLACE = Struct("<qqqb").pack
_RIGHT, _MATCH = 0, 1  # what a draw decides


class Speculation:
    """A `Drafter` with guesses as `config` says, drawn with `seed`, or as a trace has recorded them.

    `ahead`: the scheduler plans ahead, and leaves room for all guesses before it knows them.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        *,
        seed: int = 0,
        ahead: bool = False,
        recorded: RecordedGuesses | None = None,
    ) -> None:
        self.config = config
        self.lookahead = config.lookahead
        self.reserved = config.reserved
        self.recomputes_block = config.recomputes_block
        self.drafted = 0  # guesses verified so far, and how many of them were right
        self.right = 0
        self.verified = 0  # times a request had guesses verified
        self._rates = config.rates()
        self._seed = seed
        self._ahead = ahead
        self._recorded = recorded

    def draft(self, request: Request, requests: int) -> int:
        """How many guesses follow the tokens that a step yields; the step has so many `requests`."""
        guesses = self.config.guesses(requests)
        if self._ahead:
            return guesses
        if self._recorded is not None:
            return min(self._recorded.drafted(request, guesses), guesses)
        return guesses if self._matches(request) else 0

    def outcome(self, plan: StepPlan) -> Outcome:
        """How many guesses of each request of a plan are right. To be asked once, when it is committed."""
        accepted = []
        for chunk in plan.chunks:
            if chunk.drafts and chunk.request.alive:
                right = self._accepted(chunk.request, chunk.drafts)
                accepted.append((chunk.request.id, right))
                self.drafted += chunk.drafts
                self.right += right
                self.verified += 1
        return Outcome(accepted=tuple(accepted)) if accepted else DONE

    def _accepted(self, request: Request, drafts: int) -> int:
        if self._recorded is not None:
            recorded = self._recorded.accepted(request)
            if recorded is not None:
                return min(recorded, drafts)
        if self._ahead and not self._matches(request):
            return 0
        chance = self._draw(request, _RIGHT)
        right = 0
        while right < drafts and chance < self._rates[right]:
            right += 1
        return right

    def _matches(self, request: Request) -> bool:
        rate = self.config.match_rate
        return rate >= 1 or self._draw(request, _MATCH) < rate

    def _draw(self, request: Request, what: int) -> float:
        """A number from 0 to 1, the same for the same place of the same request's output."""
        place = _PLACE(self._seed, request.index, request.known - request.prompt_tokens, what)
        return xxhash.xxh3_64_intdigest(place) / 2.0**64
