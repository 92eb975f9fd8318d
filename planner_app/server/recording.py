"""Recording of a live server: keeps its history as a journal, from which a recorded run is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from pagecast.planner_app.server.generation import Generation
from pagecast.sim.core.plan import StepPlan
from pagecast.sim.core.request import Request, State
from pagecast.sim.runs.journal import CANCELLED, FINISHED, REJECTED, JournalWriter

_STATES = {State.FINISHED: FINISHED, State.CANCELLED: CANCELLED, State.REJECTED: REJECTED}


class JournalKeeper:
    """Implements `Keeper`: writes a replica's history to a journal in `folder`."""

    def __init__(self, folder: Path, meta: dict[str, Any], *, segment_bytes: int) -> None:
        self._journal = JournalWriter(folder, meta, segment_bytes=segment_bytes)
        self._rows: dict[int, int] = {}  # live requests by their number
        self._new: set[int] = set()  # of these, those that have not run yet
        self._count = 0

    def submitted(self, request: Request, generation: Generation, at_ns: int) -> None:
        """See `Keeper`."""
        self._rows[request.index] = self._count
        self._new.add(request.index)
        self._count += 1
        blocks = request.prompt_tokens // request.keys.block_size
        rest = np.asarray(generation.prompt[blocks * request.keys.block_size :], np.int64).tobytes()
        before = request.keys.digests[blocks - 1] if blocks else _scope(generation)
        values = [request.arrival_ns, at_ns, request.prompt_tokens, request.output_tokens, request.priority]
        named = [_names(request, blocks), xxhash.xxh3_64_intdigest(before + rest)]
        self._journal.add(["s", *values, generation.adapter, generation.salt, *named])

    def idle(self, at_ns: int) -> None:
        """See `Keeper`."""
        self._journal.add(["i", at_ns])

    def committed(self, plan: StepPlan, start_ns: int, end_ns: int) -> None:
        """See `Keeper`."""
        admitted = []
        for chunk in plan.chunks:
            number = chunk.request.index
            if number in self._new:
                self._new.discard(number)
                admitted.append([self._rows[number], chunk.request.cached_tokens])
        shape = [plan.decode_n, plan.decode_ctx, plan.decode_max]
        left = [plan.running, plan.waiting, plan.used_blocks]
        self._journal.add(["t", start_ns, end_ns, *shape, *left, plan.prefill, admitted])

    def ended(self, request: Request, generation: Generation, at_ns: int) -> None:
        """See `Keeper`."""
        row = self._rows.pop(request.index)
        self._new.discard(request.index)
        tokens = 0 if request.state is State.REJECTED else request.output_tokens
        blocks = (request.prompt_tokens + tokens) // request.keys.block_size
        end = [_STATES[request.state], request.first_token_ns, at_ns, tokens, request.reason]
        self._journal.add(["e", row, *end, _names(request, blocks), max(request.cached_tokens, 0)])

    def flush(self) -> None:
        """Hands what there is to the operating system."""
        self._journal.flush()

    def close(self) -> None:
        """Puts a recorded run in the journal's place."""
        self._journal.close()


def _names(request: Request, blocks: int) -> list[int]:
    """The names of a request's first blocks, as far as they are known."""
    return [int.from_bytes(digest[:8], "little") >> 2 for digest in request.keys.digests[:blocks]]


def _scope(generation: Generation) -> bytes:
    return f"{generation.adapter}/{generation.salt}/".encode()
