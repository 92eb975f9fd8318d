"""Mail between an engine and the server in front of it, which are processes of their own.

Messages are pickled tuples with their length before them, over a pair of connected sockets. Both ends are
pagecast's own: nothing that a client sends is unpickled.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pagecast.planner_app.server.backend import HostTierUse, ReplicaLoad, SpeculationUse
from pagecast.planner_app.server.generation import Sampling
from pagecast.sim.core.limits import Limits

_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 8 << 20  # as much of it as the system gives
_MOST_READ = 1 << 20


class EngineFacts(NamedTuple):
    """The facts that a server needs of the engine behind it. `start_ns`: time 0 of the engine's clock, on the
    system's monotonic clock."""

    model: str
    vocabulary: int
    limits: Limits
    max_model_len: int
    cache_config: dict[str, str]
    start_ns: int


class Submission(NamedTuple):
    """To the engine: generate. `prompt`: token ids, int32."""

    number: int
    prompt: NDArray[np.int32]
    sampling: Sampling
    arrival_ns: int
    priority: int
    salt: str
    choice: int


class Cancellation(NamedTuple):
    """To the engine: nobody waits for this generation any more."""

    number: int


class Farewell(NamedTuple):
    """To the engine: serve no more, and close the connection."""


class GenerationStart(NamedTuple):
    """When a generation that has its first token began to run, and what it found in the cache."""

    number: int
    admitted_ns: int
    cached_tokens: int
    external_tokens: int


class GenerationEnd(NamedTuple):
    """A sequence has ended; `finish_reason` and `reason` as the engine has them."""

    number: int
    finish_reason: str
    reason: str
    preemptions: int


class StepNews(NamedTuple):
    """To the server: tokens and ends of the last steps, and the engine's state after them.

    `numbers` and `tokens`: each new token and the generation it belongs to. `computed` counts the tokens of
    the steps, `received` the submissions that the scheduler has been given since the start.
    """

    received: int
    computed: int
    end_ns: int
    numbers: list[int]
    tokens: list[int]
    admitted: list[GenerationStart]
    ended: list[GenerationEnd]
    load: ReplicaLoad
    preemptions: int
    speculation: SpeculationUse | None
    host_tier: HostTierUse | None
    unrecorded: str


class Failure(NamedTuple):
    """To the server: the engine serves no more."""

    reason: str


class Draining(NamedTuple):
    """To the server: take no new requests and end when those under way have ended."""


class MailReader:
    """Puts messages together from the bytes that come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete now."""
        self._bytes += data
        place = 0
        while len(self._bytes) - place >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, place)
            end = place + _LENGTH.size + length
            if len(self._bytes) < end:
                break
            yield pickle.loads(memoryview(self._bytes)[place + _LENGTH.size : end].tobytes())
            place = end
        del self._bytes[:place]


def packed(message: Any) -> bytes:
    """A message as it is sent."""
    text = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(text)) + text


class Mailbox:
    """The engine's end: read without waiting, and written to at once. `closed`: the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = MailReader()
        self.closed = False

    def receive(self, wait_s: float = 0.0) -> list[Any]:
        """The messages that are there; waits so long for one where there is none."""
        if wait_s:
            select.select([self._socket], [], [], wait_s)
        messages: list[Any] = []
        while not self.closed:
            try:
                data = self._socket.recv(_MOST_READ, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.closed = not data
            messages.extend(self._reader.feed(data))
        return messages

    def send(self, message: Any) -> None:
        """Sends a message; where the other end is gone, to nobody."""
        try:
            self._socket.sendall(packed(message))
        except OSError:
            self.closed = True

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


def mail_sockets() -> tuple[socket.socket, socket.socket]:
    """A connected pair, each with room for the messages of many steps."""
    pair = socket.socketpair()
    for one in pair:
        with suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return pair
