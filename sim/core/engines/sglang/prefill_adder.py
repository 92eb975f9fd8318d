"""Prefill adder: which prompts, and how much of them, SGLang puts in one batch.

It counts on the memory that running requests will still need, by the new-token ratio, and reserves the whole
of what it admits. `total` and `current` are such reservations in tokens; `input` and `chunk` are what is left
of the batch's own limits.

Source: SGLang 0.5.23, srt/managers/schedule_policy.py, `PrefillAdder`, and mem_cache/prefill_budget.py.
"""

from __future__ import annotations

from enum import Enum

from pagecast.sim.core.engines.sglang.memory import RadixMemory
from pagecast.sim.core.engines.sglang.tree import Match
from pagecast.sim.core.request import Request

CLIP = 4096
"""An output counts as no longer than this where memory is reserved."""


class AddVerdict(Enum):
    """Whether more may be added to a batch."""

    CONTINUE = "continue"
    NO_TOKEN = "no token"  # memory is used up
    OTHER = "other"  # the batch is full


class Prompt:
    """A chunk in the making: `tokens` tokens of a request, whose first `there` are there."""

    __slots__ = ("match", "request", "there", "tokens")

    def __init__(self, request: Request, there: int, tokens: int, match: Match | None) -> None:
        self.request = request
        self.there = there
        self.tokens = tokens
        self.match = match  # what a request holds from now on; None where it holds its prefix already


class Headroom:
    """Tokens that a running request may still generate, as the adder counts them."""

    def __init__(self, ratio: float, *, ignore_eos: bool) -> None:
        self.ratio = 1.0 if ignore_eos else ratio

    def tokens(self, request: Request, generated: int) -> float:
        """Tokens that are reserved for it."""
        return min(request.max_tokens - generated, CLIP) * self.ratio


class PrefillAdder:
    """One batch of prompts being put together.

    `running` are the running requests with their numbers of generated tokens. `mixed`: so many decodes join
    the batch.
    """

    def __init__(
        self,
        memory: RadixMemory,
        headroom: Headroom,
        running: list[tuple[Request, int]],
        *,
        max_prefill_tokens: int,
        chunk_tokens: int | None,
        mixed: int,
        ignore_eos: bool,
    ) -> None:
        self.memory = memory
        self.page = memory.block_size
        self.input = max_prefill_tokens - mixed
        self.chunk = None if chunk_tokens is None else chunk_tokens - mixed
        self.added: list[Prompt] = []
        self.unfinished: Request | None = None  # whose prompt is cut off by this batch
        self._headroom = headroom
        self._running = running
        self._in_full = ignore_eos and not memory.caching
        self._states: list[tuple[float, int]] | None = None
        self._current = float(mixed)
        reserved = [headroom.tokens(request, generated) for request, generated in running]
        self._total = self._current + sum(reserved)

    # ---- budgets

    @property
    def left_total(self) -> float:
        """Tokens that nobody has and nobody will need."""
        return self.memory.room_tokens - self._total

    @property
    def left_current(self) -> float:
        """Tokens that nobody has."""
        return self.memory.room_tokens - self._current

    def verdict(self) -> AddVerdict:
        """Whether another prompt may be tried."""
        if self.left_total <= 0 or self.left_current <= 0:
            return AddVerdict.NO_TOKEN
        if self.input <= 0 or (self.chunk is not None and self.chunk <= 0):
            return AddVerdict.OTHER
        return AddVerdict.CONTINUE

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def _charge(self, tokens: int, output: int) -> None:
        tokens = self._ceil(tokens)
        self._total += tokens + self.page + output
        self._current += tokens + self.page
        self.input -= tokens
        if self.chunk is not None:
            self.chunk -= tokens

    # ---- adding

    def add_rest(self, request: Request) -> bool:
        """Adds the next chunk of the prompt that was cut off: as much as fits, and a chunk in any case.

        False where not even eviction makes room for it: SGLang stops there ("Prefill out of memory"), here
        the chunk waits.
        """
        assert self.chunk is not None
        most = min(self.chunk, int(self.left_total))
        if most <= 0:
            most = self.chunk
        missing = request.known_tokens - request.computed_tokens
        tokens = min(missing, most)
        if self.memory.missing(request, request.computed_tokens + tokens) > self.memory.free_blocks:
            return False
        self.added.append(Prompt(request, request.computed_tokens, tokens, None))
        if missing > most:
            self._charge(tokens, 0)
            self.unfinished = request
        else:
            self._charge(tokens, min(request.max_tokens, CLIP))
        return True

    def add(self, request: Request) -> AddVerdict:
        """Tries to add a waiting request, whose prefix is looked up now."""
        match = self.memory.match(request, request.known_tokens - 1)
        if self._in_full:
            return self._add_in_full(request, match)
        there = match.pages * self.page
        missing = request.known_tokens - there
        generated = request.known_tokens - request.prompt_tokens
        reserve = missing + min(max(request.max_tokens - generated, 0), CLIP) + self.page
        if not reserve < self.memory.room_beside(match.node) - self._total:
            return AddVerdict.NO_TOKEN
        paged = self._ceil(missing)
        if self.chunk is None:
            if self.added and paged >= self.input:
                return AddVerdict.OTHER
        elif paged > self.chunk:
            end = (there + self.chunk // self.page * self.page) // self.page * self.page
            if end <= there:
                return AddVerdict.OTHER
            return self._commit(request, match, end - there, 0, cut=True)
        return self._commit(request, match, missing, min(request.max_tokens, CLIP), cut=False)

    def _commit(self, request: Request, match: Match, tokens: int, output: int, *, cut: bool) -> AddVerdict:
        self.memory.hold(request, match)
        self.added.append(Prompt(request, match.pages * self.page, tokens, match))
        if cut:
            self.unfinished = request
        self._charge(tokens, output)
        return self.verdict()

    def _add_in_full(self, request: Request, match: Match) -> AddVerdict:
        """Adds a request whose output's length is certain, where nothing is cached: all that run are played
        to their ends, the first to end first, and memory must be enough at each of them."""
        missing = request.known_tokens
        paged = self._ceil(missing) + self.page
        if paged > min(self.left_current, self.left_total):
            return AddVerdict.NO_TOKEN
        states = self._play(request)
        room = self.left_current - paged
        freed = 0
        for number, (more, held) in enumerate(states):
            together = len(states) - number
            if room + freed - more * together <= together:
                return AddVerdict.NO_TOKEN
            freed += held
        if self.chunk is None or missing <= self.chunk:
            return self._commit(request, match, missing, min(request.max_tokens, CLIP), cut=False)
        if self.chunk <= 0:
            return AddVerdict.OTHER
        return self._commit(request, match, self.chunk, 0, cut=True)

    def _play(self, request: Request) -> list[tuple[float, int]]:
        """Who ends when: (tokens still to generate, tokens freed then), with `request` added."""
        if self._states is None:
            states = [self._state(request, request.known_tokens - request.prompt_tokens)]
            states += [self._state(each, generated) for each, generated in self._running]
            states += [
                self._state(prompt.request, prompt.request.known_tokens - prompt.request.prompt_tokens)
                for prompt in self.added
            ]
            self._states = sorted([state for state in states if state[0] > 0], key=_ends)
            return self._states
        state = self._state(request, request.known_tokens - request.prompt_tokens)
        if state[0] > 0:
            # As in SGLang: a state that is later than all others goes before the last of them.
            later = [place for place, other in enumerate(self._states) if state[0] <= other[0]]
            self._states.insert(later[0] if later else max(len(self._states) - 1, 0), state)
        return self._states

    def _state(self, request: Request, generated: int) -> tuple[float, int]:
        more = request.max_tokens * self._headroom.ratio - generated
        return more, request.prompt_tokens + generated


def _ends(state: tuple[float, int]) -> float:
    return state[0]
