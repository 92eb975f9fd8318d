"""Recording of a live server: keeps its history as a journal, from which a recorded run is made."""

from __future__ import annotations

import secrets
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pagecast.planner_app.server.generation import Generation
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request, State
from pagecast.sim.runs.journal import JournalWriter
from pagecast.sim.runs.run_journal import RunJournal
from pagecast.sim.runs.transfers import RecordedTransfer


class JournalKeeper:
    """Implements `Keeper`: writes a replica's history to a journal in `folder`.

    Salts are secrets: a recording has them under names of its own.
    """

    def __init__(self, folder: Path, meta: dict[str, Any], *, segment_bytes: int) -> None:
        self._writer = JournalWriter(folder, meta, segment_bytes=segment_bytes)
        self._journal = RunJournal(self._writer)
        self._key = secrets.token_bytes(16)

    def submitted(self, request: Request, generation: Generation, at_ns: int) -> None:
        block_size = request.keys.block_size
        blocks = _whole_blocks(request, request.prompt_tokens)
        self._journal.submitted(
            request,
            at_ns,
            request.keys.digests[:blocks],
            generation.prompt[blocks * block_size :],
            adapter=generation.adapter,
            salt=self._name_of(generation.salt),
        )

    def _name_of(self, salt: str) -> str:
        """Equal names for equal salts, of which nobody learns the salt."""
        return blake2b(salt.encode(), digest_size=8, key=self._key).hexdigest() if salt else ""

    def idle(self, at_ns: int) -> None:
        self._journal.idle(at_ns)

    def committed(self, plan: StepPlan, start_ns: int, end_ns: int) -> None:
        self._journal.committed(plan, start_ns, end_ns)

    def ended(self, request: Request, generation: Generation, at_ns: int) -> None:
        tokens = 0 if request.state is State.REJECTED else request.output_tokens
        blocks = _whole_blocks(request, request.prompt_tokens + tokens)
        self._journal.ended(request, at_ns, tokens, request.keys.digests[:blocks])

    def verified(self, plan: StepPlan, outcome: Outcome) -> None:
        self._journal.verified(plan, outcome)

    def transferred(self, transfers: list[RecordedTransfer]) -> None:
        self._journal.transferred(transfers)

    def flush(self) -> None:
        """Hands what there is to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Puts a recorded run in the journal's place."""
        self._writer.close()


def _whole_blocks(request: Request, tokens: int) -> int:
    """Blocks of the first `tokens` tokens whose keys cover none beyond."""
    return max(tokens - request.keys.lookahead, 0) // request.keys.block_size
