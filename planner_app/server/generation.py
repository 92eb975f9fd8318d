"""One sequence being generated, as server and backend share it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagecast.planner_app.server.errors import ApiError

NEVER = -1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, and when a text ends; OpenAI's and vLLM's names.

    `max_tokens` None: as many as the model's length allows.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None


class Bell:
    """Wakes the one task that waits for any of a request's generations."""

    __slots__ = ("_rung", "_waiter")

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._rung = False

    def ring(self) -> None:
        """Wakes the waiting task, or lets the next wait return at once. Called in the event loop's thread."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
                return
        self._rung = True

    async def wait(self) -> None:
        """Returns once something has happened since the last wait."""
        if self._rung:
            self._rung = False
            return
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


@dataclass(slots=True, eq=False)
class Generation:
    """A prompt and what has come of it. The backend writes, whoever serves the client reads.

    `tokens` are output token ids; the first `count` of them have been generated. `echo` are tokens to be
    repeated where a backend echoes; empty: the prompt. `choice` numbers the generations of one prompt.
    `ending` is how the text will end where that is known from the start; `hidden` tokens at its end are not
    part of the text. Times are nanoseconds of the
    backend's clock. `finish_reason` is empty until the end: then "stop", "length",
    "abort" or "error", and `reason` says more.
    """

    number: int
    prompt: Sequence[int]
    sampling: Sampling
    bell: Bell
    adapter: str = ""
    salt: str = ""
    priority: int = 0
    choice: int = 0
    choices: int = 1  # generations that the request asked for
    echo: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list)
    count: int = 0
    hidden: int = 0
    ending: str = "length"
    cached_tokens: int = NEVER
    external_tokens: int = 0  # of `cached_tokens`, those loaded from host memory
    arrival_ns: int = NEVER
    admitted_ns: int = NEVER
    first_ns: int = NEVER
    last_ns: int = NEVER
    finished_ns: int = NEVER
    finish_reason: str = ""
    stop_reason: int | str | None = None
    reason: str = ""
    error: ApiError | None = None

    @property
    def done(self) -> bool:
        """Whether no more tokens come."""
        return bool(self.finish_reason)

    @property
    def max_tokens(self) -> int:
        """The most tokens that were asked for; 0 where the client left it open."""
        return self.sampling.max_tokens or 0
