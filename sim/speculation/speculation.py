"""Speculation of one replica: a drafter for the scheduler, and what comes of its draft tokens.

Every draw is a function of the seed, the request and how far its output is, and of nothing else: a replay
stays a pure function, and one request accepts the same draft tokens at any load.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import zip_longest
from struct import Struct

import numpy as np
import xxhash
from pagecast.sim.core.plan import DONE, Outcome, StepPlan
from pagecast.sim.core.request import Request
from pagecast.sim.speculation.config import SpeculativeConfig
from pagecast.sim.speculation.recorded import RecordedDrafts
from pagecast.traces.arrays import Floats

_PLACE = Struct("<qqqb").pack
_RIGHT, _MATCH = 0, 1  # what a draw decides


class Speculation:
    """A `Drafter` with draft tokens as `config` says, drawn with `seed`, or as a trace has recorded them.

    `ahead`: the scheduler plans ahead, and leaves room for all draft tokens before it knows them.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        *,
        seed: int = 0,
        ahead: bool = False,
        recorded: RecordedDrafts | None = None,
    ) -> None:
        self.config = config
        self.lookahead = config.lookahead
        self.reserved = config.reserved
        self.recomputes_block = config.recomputes_block
        self.most = config.num_speculative_tokens
        self.padding = config.padding
        self.drafts = 0  # times a request had draft tokens verified
        self.draft_tokens = 0  # draft tokens that were verified
        self.accepted = [0] * config.num_speculative_tokens  # of these the accepted ones, by position
        self._gaps = array("q")  # nanoseconds between outputs of a request, for all that had tokens before
        self._latest: dict[int, int] = {}
        self._rates = config.rates()
        self._seed = seed % 2**63  # as `_PLACE` takes it
        self._ahead = ahead
        self._recorded = recorded

    def draft(self, request: Request, requests: int) -> int:
        """How many draft tokens follow the tokens that a step yields; the step has so many `requests`."""
        drafts = self.config.drafts(requests)
        if self._ahead:
            return drafts
        if self._recorded is not None:
            return min(self._recorded.drafted(request, drafts), drafts)
        return drafts if self._matches(request) else 0

    def outcome(self, plan: StepPlan, now: int = 0) -> Outcome:
        """How many draft tokens of each request are accepted. Asked once, when the plan is committed."""
        accepted = []
        latest = self._latest
        for chunk in plan.chunks:
            request = chunk.request
            if not chunk.last or not request.alive:
                continue
            before = latest.get(request.index)
            if before is not None:
                self._gaps.append(now - before)
            latest[request.index] = now
            if chunk.drafts:
                number = 0 if chunk.padded else self._accepted(request, chunk.drafts)
                accepted.append((request.id, number))
                self.drafts += 1
                self.draft_tokens += chunk.drafts
                for position in range(number):
                    self.accepted[position] += 1
        return Outcome(accepted=tuple(accepted)) if accepted else DONE

    def ended(self, request: Request) -> None:
        """Takes note that a request has no more outputs."""
        self._latest.pop(request.index, None)

    def forget_times(self) -> None:
        """Forgets the times between outputs, where nobody will ask for them: memory stays bounded."""
        del self._gaps[:]

    def gaps_s(self) -> Floats:
        """Seconds between outputs of a request, of one or more tokens each (inter-token latency)."""
        return np.frombuffer(self._gaps, dtype=np.int64).astype(np.float64) * 1e-9

    def _accepted(self, request: Request, drafts: int) -> int:
        if self._recorded is not None:
            recorded = self._recorded.accepted(request)
            if recorded is not None:
                return min(recorded, drafts)
        if self._ahead and not self._matches(request):
            return 0
        chance = self._draw(request, _RIGHT)
        accepted = 0
        while accepted < drafts and chance < self._rates[accepted]:
            accepted += 1
        return accepted

    def _matches(self, request: Request) -> bool:
        rate = self.config.match_rate
        return rate >= 1 or self._draw(request, _MATCH) < rate

    def _draw(self, request: Request, what: int) -> float:
        """A number from 0 to 1, the same for the same place of the same request's output."""
        place = _PLACE(self._seed, request.index, request.known_tokens - request.prompt_tokens, what)
        return xxhash.xxh3_64_intdigest(place) / 2.0**64


def draft_figures(parts: Sequence[Speculation]) -> dict[str, object]:
    """Counts of replicas by vLLM's names, and what follows from them.

    By position: of all times that draft tokens were verified, also where a replica drafts fewer.
    """
    positions = [sum(counts) for counts in zip_longest(*(part.accepted for part in parts), fillvalue=0)]
    accepted = sum(positions)
    drafts = sum(part.drafts for part in parts)
    draft_tokens = sum(part.draft_tokens for part in parts)
    return {
        "num_drafts": drafts,
        "num_draft_tokens": draft_tokens,
        "num_accepted_tokens": accepted,
        "acceptance_rate": accepted / draft_tokens if draft_tokens else None,
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "acceptance_rates_per_position": [count / drafts if drafts else None for count in positions],
    }
