"""One sequence being generated, as server and backend share it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagecast.planner_app.server.errors import ApiError

NEVER = -1
_STREAMS_PER_TURN = 64


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


class Outbox:
    """Requests that have something to send to their clients: each once, in the order in which they rang.

    A step has a token for every stream. Each turn of the event loop sends to some of the streams, so that new
    requests are read meanwhile; tokens that come for a stream before its turn are sent together.
    """

    def __init__(self) -> None:
        self._rung: deque[Bell] = deque()
        self._scheduled = False

    def add(self, bell: Bell) -> None:
        """Queues a bell that has rung. Called in the event loop's thread."""
        self._rung.append(bell)
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        rung = self._rung
        self._scheduled = False
        try:
            for _ in range(min(len(rung), _STREAMS_PER_TURN)):
                rung.popleft().answer()
        finally:
            if rung and not self._scheduled:
                self._schedule()


class Bell:
    """Rung when a request has new tokens or an end; whoever answers the client listens.

    Without an outbox nobody can listen.
    """

    __slots__ = ("_listener", "_outbox", "rung")

    def __init__(self, outbox: Outbox | None = None) -> None:
        self.rung = False  # since the last answer
        self._outbox = outbox
        self._listener: Callable[[], None] | None = None

    def ring(self) -> None:
        """Has the listener called soon, once for all rings until then. Called in the event loop's thread."""
        if not self.rung:
            self.rung = True
            if self._listener is not None and self._outbox is not None:
                self._outbox.add(self)

    def listen(self, listener: Callable[[], None]) -> None:
        """Has `listener` called at each ring from now on, and soon where it has rung before."""
        self._listener = listener
        if self.rung and self._outbox is not None:
            self._outbox.add(self)

    def answer(self) -> None:
        """Calls the listener; to be called by the outbox."""
        self.rung = False
        if self._listener is not None:
            self._listener()

    def leave(self) -> None:
        """Nobody listens any more."""
        self._listener = None


@dataclass(slots=True, eq=False)
class Generation:
    """A prompt and its output so far. The backend writes; the answer to the client reads.

    `tokens` are output token ids; the first `count` of them have been generated. `echo` are tokens to be
    repeated where a backend echoes; empty: the prompt. `form` are the tokens of an answer whose form
    the request decides; empty: made up. `choice` numbers the generations of one prompt.
    `ending` is how the text will end where that is known from the start; `hidden` tokens at its end are not
    part of the text. Times are nanoseconds of the backend's clock. `finish_reason` is empty until the end:
    then "stop", "length", "abort" or "error", and `reason` says more.
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
    form: Sequence[int] = ()
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
    preemptions: int = 0
    stop_reason: int | str | None = None
    reason: str = ""
    error: ApiError | None = None

    def refuse(self, error: ApiError) -> None:
        """Ends it before it has begun."""
        self.error = error
        self.finish_reason = "error"
        self.reason = error.message
        self.bell.ring()

    @property
    def done(self) -> bool:
        """Whether no more tokens come."""
        return bool(self.finish_reason)

    @property
    def max_tokens(self) -> int:
        """The most tokens that were asked for; 0 where the client left it open."""
        return self.sampling.max_tokens or 0
