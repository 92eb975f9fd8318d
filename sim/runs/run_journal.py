"""Journal of a run in progress: the lines of `journal`, from requests, plans and names of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request, State
from pagecast.sim.runs.journal import CANCELLED, FINISHED, REJECTED, JournalWriter
from pagecast.sim.runs.transfers import RecordedTransfer

_STATES = {State.FINISHED: FINISHED, State.CANCELLED: CANCELLED, State.REJECTED: REJECTED}


class RunJournal:
    """Writes what happens to a journal. Requests are known by their `index`; times are nanoseconds."""

    def __init__(self, writer: JournalWriter) -> None:
        self.writer = writer
        self._rows: dict[int, int] = {}  # live requests by their number
        self._new: set[int] = set()  # of these, those that have not run yet
        self._endings: dict[int, int] = {}  # those that ended since the last step
        self._count = 0

    def submitted(
        self,
        request: Request,
        at_ns: int,
        digests: Sequence[bytes],
        tail: Sequence[int],
        *,
        adapter: str = "",
        salt: str = "",
    ) -> None:
        """A request was handed to the scheduler. `digests` are those of its prompt's full blocks, each of all
        tokens up to its end; `tail` the tokens after them."""
        self._rows[request.index] = self._count
        self._new.add(request.index)
        self._count += 1
        before = digests[-1] if digests else f"{adapter}/{salt}/".encode()
        rest = np.asarray(tail, np.int64).tobytes()
        line = [request.arrival_ns, at_ns, request.prompt_tokens, request.output_tokens, request.priority]
        names = [_names(digests), xxhash.xxh3_64_intdigest(before + rest)]
        self.writer.add(["s", *line, adapter, salt, *names])

    def idle(self, at_ns: int) -> None:
        """A plan preempted requests and found nothing to compute."""
        self.writer.add(["i", at_ns])

    def committed(self, plan: StepPlan, start_ns: int, end_ns: int) -> None:
        """A step ran."""
        admitted = []
        for chunk in plan.chunks:
            number = chunk.request.index
            if number in self._new:
                self._new.discard(number)
                admitted.append([self._rows[number], chunk.request.cached_tokens])
        shape = [plan.decode_n, plan.decode_ctx, plan.decode_max]
        state = [plan.running, plan.waiting, plan.used_blocks]
        self._endings.clear()
        self.writer.add(["t", start_ns, end_ns, *shape, *state, plan.prefill, admitted])

    def verified(self, plan: StepPlan, outcome: Outcome) -> None:
        """A step of requests that speculate was committed; to be called before `committed`."""
        accepted = dict(outcome.accepted)
        rows = self._endings | self._rows
        drafts = []
        for chunk in plan.chunks:
            request = chunk.request
            count = request.drafts if chunk.last and request.state is State.DECODE else -1
            if request.index in rows and (chunk.drafts or count >= 0):
                drafts.append([rows[request.index], accepted.get(request.id, -1), count])
        self.writer.add(["g", drafts])

    def transferred(self, transfers: Iterable[RecordedTransfer]) -> None:
        """The scheduler was told that transfers to or from the host tier have ended."""
        for transfer in transfers:
            self.writer.add(["x", *transfer])

    def ended(self, request: Request, at_ns: int, tokens: int, digests: Sequence[bytes]) -> None:
        """A request ended with so many tokens; `digests` are those of its full blocks, output included."""
        row = self._endings[request.index] = self._rows.pop(request.index)
        self._new.discard(request.index)
        end: list[Any] = [_STATES[request.state], request.first_token_ns, at_ns, tokens, request.reason]
        self.writer.add(["e", row, *end, _names(digests), max(request.cached_tokens, 0)])


def _names(digests: Sequence[bytes]) -> list[int]:
    return [int.from_bytes(digest[:8], "little") >> 2 for digest in digests]
