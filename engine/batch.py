"""A step laid out for the device: every number it needs, packed into one int32 buffer for one transfer.

Tokens of requests that compute one token come first, a row each; then the longer prompt chunks, sequence
after sequence. For a CUDA graph the tokens are padded to the graph's size, and what the graph reads stands
at places that depend on that size alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pagecast.engine import ops
from pagecast.engine.backend import NO_PROMPTS, Backend, PromptChunks
from pagecast.engine.rows import Rows
from pagecast.engine.sequence import Sequence
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.plan import Chunk, StepPlan, counts_as_decode
from pagecast.sim.core.request import Request

Ints = NDArray[np.int32]
PADDING = -1  # the position of a row that computes nothing
_ALIGN = 4  # sections begin at multiples of 16 bytes


def graph_sections(size: int, singles: int = 0, plan: int = 0) -> tuple[Tokens, Chunks]:
    """Where the numbers of a batch of `size` tokens lie: they are packed first, `Chunks` after `Tokens`.

    With prompts, there is room for the lengths of `singles` single tokens and for `plan` numbers of the
    attention backend's plan.
    """
    step, lens = _aligned(size), 3 * _aligned(size)
    extra = lens + _aligned(singles)
    tokens = Tokens(*(slice(start, start + size) for start in (0, step, 2 * step)))
    return tokens, Chunks(NO_PROMPTS, slice(lens, lens + singles), slice(extra, extra + plan))


def _aligned(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


class StepBuffer:
    """The buffer on the device, and two of it in pinned host memory, filled in turn.

    Two are enough: a step's is filled again two steps later, when the step has been waited for.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self.device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=pin) for _ in range(2)]
        self._arrays: list[Ints] = [host.numpy() for host in self._hosts]
        self._transfers: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._end = 0

    def begin(self) -> None:
        """Starts a step."""
        self._turn ^= 1
        self._end = 0

    def room(self, length: int) -> tuple[slice, Ints]:
        """The next section of that length, and where to write it."""
        start = _aligned(self._end)
        self._end = start + length
        section = slice(start, self._end)
        return section, self._arrays[self._turn][section]

    def put(self, values: Ints) -> slice:
        """Adds a section with these values."""
        section, place = self.room(len(values))
        place[:] = values
        return section

    def send(self) -> None:
        """Queues the transfer of everything since `begin`."""
        ops.copy_numbers(self._hosts[self._turn][: self._end], self.device[: self._end])

    @property
    def sent(self) -> Ints:
        """Everything since `begin`."""
        return self._arrays[self._turn][: self._end]

    def receive(self, numbers: Ints) -> None:
        """Begins a step with what another `StepBuffer` sent, and queues its transfer.

        Nobody waits for such a step: its buffer is free once its own transfer has ended.
        """
        self.begin()
        transfer = self._transfers[self._turn]
        if transfer is not None:
            transfer.synchronize()
        _, place = self.room(len(numbers))
        place[:] = numbers
        self.send()
        if self.device.is_cuda:
            self._transfers[self._turn] = transfer = transfer or torch.cuda.Event()
            transfer.record()


class Tokens(NamedTuple):
    """Sections of one number a token: its row, its id (-1: the newest drawn in that row), its position."""

    rows: slice
    ids: slice
    positions: slice


class Draws(NamedTuple):
    """Who gets the token drawn in each row of the logits (None: nobody), and sections of one number a row.

    A sequence that verifies n draft tokens has n + 1 rows, one after another.

    `sampled`: numbers of the tokens whose logits are needed (None: of all). `forced`: tokens to take
    whatever is drawn (-1: none). `filtered`: numbers of the rows with top-k or top-p (None: no such row).
    """

    takers: list[Sequence | None]
    sampled: slice | None
    forced: slice
    filtered: slice | None


class Chunks(NamedTuple):
    """The prompt chunks of more than one token, and the section of what the backend planned for them.

    `lens`, for a CUDA graph: the tokens that each of the first rows sees, itself included; 0 for a chunk's.
    """

    prompts: PromptChunks
    lens: slice
    extra: slice


class Changes(NamedTuple):
    """Sections of what changed in the device's tables, and blocks to copy as pairs."""

    places: slice
    blocks: slice
    params: slice
    copies: slice


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One step's layout; slices are sections of the packed buffer.

    The first `singles` tokens are one of a request each. `columns`: blocks of the longest table.
    `graph`: the size of the CUDA graph to run, 0 for none. It is a graph for prompts where `chunks` has any.
    """

    singles: int
    columns: int
    graph: int
    tokens: Tokens
    chunks: Chunks
    draws: Draws
    changes: Changes

    def without_takers(self) -> StepLayout:
        """The layout as workers get it: they compute the step and hand out no tokens."""
        return replace(self, draws=self.draws._replace(takers=[]))


class _Part(NamedTuple):
    """Numbers of some of the step's tokens, as in `Tokens`."""

    rows: Ints
    ids: Ints
    positions: Ints


class Batches:
    """Lays out plans. CUDA graphs hold steps of single tokens of the sizes `graphs`, and steps with prompts
    of the sizes `prompt_graphs`."""

    def __init__(
        self, buffer: StepBuffer, rows: Rows, sequences: Mapping[Request, Sequence], backend: Backend
    ) -> None:
        self.buffer = buffer
        self.rows = rows
        self.backend = backend
        self.graphs: list[int] = []
        self.prompt_graphs: list[int] = []
        self._sequences = sequences
        self._decodes: tuple[Request, ...] = ()
        self._decoding: list[Sequence] = []
        self._decode_rows = _ints([])

    def lay_out(self, plan: StepPlan, memory: Memory) -> StepLayout:
        """Packs a plan's numbers and queues their transfer. `memory` has the block tables."""
        for chunk in plan.chunks:
            self.rows.serve(self._sequences[chunk.request], chunk.start + chunk.tokens, memory)
        longs = [chunk for chunk in plan.chunks if not counts_as_decode(chunk.tokens)]
        part, takers = self._singles(plan, memory)
        singles = len(takers)
        part = _join([part, *map(self._part, longs)])
        graph = self._graph(len(part.rows), bool(longs))
        part = _padded(part, graph - len(part.rows), self.rows.padding)
        ends = singles - 1 + np.cumsum([chunk.tokens for chunk in longs], dtype=np.int32)
        yielding = [(chunk, end) for chunk, end in zip(longs, ends.tolist(), strict=True) if chunk.last]
        for chunk, _ in yielding:
            takers += [self._sequences[chunk.request]] * (1 + chunk.drafts)
        sampled = _ints([*range(singles), *_ends_and_drafts(yielding)]) if longs else None
        self.buffer.begin()
        # In this order: CUDA graphs know the places of tokens and chunks.
        batch = StepLayout(
            singles=singles,
            columns=-(-max([plan.decode_max + 1, *_lens(longs)]) // self.rows.block_size),
            graph=graph,
            tokens=Tokens(*map(self.buffer.put, part)),
            chunks=self._chunks(longs, part.positions[:singles], graph),
            draws=self._draws(takers, part, sampled),
            changes=Changes(*map(self.buffer.put, (*self.rows.changes(), self._copies(plan, memory)))),
        )
        self.buffer.send()
        return batch

    def _graph(self, tokens: int, prompts: bool) -> int:
        """The smallest CUDA graph for so many tokens; 0 for none."""
        sizes = self.prompt_graphs if prompts else self.graphs
        return next((size for size in sizes if size >= tokens), 0)

    def _singles(self, plan: StepPlan, memory: Memory) -> tuple[_Part, list[Sequence | None]]:
        """Tokens of requests that compute one, and who takes what is drawn after them."""
        if plan.decodes is not self._decodes:
            self._decodes = plan.decodes
            self._decoding = [self._sequences[request] for request in plan.decodes]
            self._decode_rows = _ints([sequence.row for sequence in self._decoding])
        positions = _ints(plan.positions())
        n = len(positions)
        self.rows.serve_decodes(self._decoding, positions, memory)
        part = _Part(self._decode_rows, np.full(n, -1, np.int32), positions)
        takers: list[Sequence | None] = list(self._decoding)
        chunks = [chunk for chunk in plan.chunks if counts_as_decode(chunk.tokens)]
        takers += [self._sequences[chunk.request] if chunk.last else None for chunk in chunks]
        return _join([part, *map(self._part, chunks)]), takers

    def _part(self, chunk: Chunk) -> _Part:
        sequence = self._sequences[chunk.request]
        start, end = chunk.start, chunk.start + chunk.tokens
        rows = np.full(chunk.tokens, sequence.row, np.int32)
        ids = sequence.ids[start : end - chunk.drafts]
        if chunk.drafts:
            ids = np.concatenate([ids, sequence.draft_tokens[: chunk.drafts]])
        return _Part(rows, ids, np.arange(start, end, dtype=np.int32))

    def _draws(self, takers: list[Sequence | None], part: _Part, sampled: Ints | None) -> Draws:
        """`sampled` numbers the tokens after which `takers` get one; None: all, padding too, for nobody."""
        at = part.positions if sampled is None else part.positions[sampled]
        section, forced = self.buffer.room(len(at))
        forced[:] = -1
        filtered = []
        for i, taker in enumerate(takers):
            if taker is None:
                continue
            if taker.params.filtered:
                filtered.append(i)
            if taker.forced is not None:
                number = at[i] + 1 - taker.request.prompt_tokens
                if number < len(taker.forced):  # a draft token may reach beyond the end
                    forced[i] = taker.forced[number]
        return Draws(
            takers,
            None if sampled is None else self.buffer.put(sampled),
            section,
            self.buffer.put(_ints(filtered)) if filtered else None,
        )

    def _copies(self, plan: StepPlan, memory: Memory) -> Ints:
        """Pairs of blocks: of the parent, and of the fork that goes on in a copy of it."""
        pairs: list[int] = []
        for chunk in plan.chunks:
            if chunk.copied is not None:
                pairs += chunk.copied, memory.blocks(chunk.request)[chunk.start // self.rows.block_size]
        return _ints(pairs)

    def _chunks(self, longs: list[Chunk], singles: Ints, graph: int) -> Chunks:
        """`singles` are the positions of the single tokens."""
        if not longs:
            return Chunks(NO_PROMPTS, slice(0, 0), slice(0, 0))
        rows = [self._sequences[chunk.request].row for chunk in longs]
        prompts = PromptChunks([chunk.tokens for chunk in longs], _lens(longs), rows)
        plan = self.backend.plan(prompts, len(singles), captured=bool(graph))
        if not graph:
            return Chunks(prompts, slice(0, 0), self.buffer.put(plan))
        lens, seen = self.buffer.room(self.most_singles(graph))
        seen[:] = 0
        seen[: len(singles)] = singles + 1
        extra, room = self.buffer.room(self.backend.plan_room(graph))
        room[: len(plan)] = plan
        return Chunks(prompts, lens, extra)

    def most_singles(self, tokens: int) -> int:
        """How many of a step's tokens can be one of a request each."""
        return min(tokens, self.rows.padding)


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int32)


def _ends_and_drafts(yielding: list[tuple[Chunk, int]]) -> list[int]:
    """The places of chunks' last tokens, and before each those that draft tokens follow."""
    return [place for chunk, end in yielding for place in range(end - chunk.drafts, end + 1)]


def _lens(chunks: list[Chunk]) -> list[int]:
    return [chunk.start + chunk.tokens for chunk in chunks]


def _join(parts: list[_Part]) -> _Part:
    if len(parts) == 1:
        return parts[0]
    return _Part(*map(np.concatenate, zip(*parts, strict=True)))


def _padded(part: _Part, n: int, row: int) -> _Part:
    """With `n` tokens more (none if n < 1) in `row` that compute nothing."""
    if n < 1:
        return part
    return _join([part, _Part(*(np.full(n, fill, np.int32) for fill in (row, 0, PADDING)))])
