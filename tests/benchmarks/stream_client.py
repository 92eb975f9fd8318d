"""Client of many streams that takes little of the machine: plain sockets and epoll, no HTTP library."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

CHUNK = b"data: {"
_NAP_S = 0.002


class Stream:
    """One request to `/v1/completions` whose chunks are counted. `leave_after`: chunks, then the client goes.

    Times are seconds of the monotonic clock; `status` is HTTP's.
    """

    def __init__(self, port: int, body: dict[str, Any], leave_after: int | None = None) -> None:
        self.chunks = 0
        self.first_s = 0.0
        self.last_s = 0.0
        self.status = 0
        self._leave_after = leave_after
        text = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n"
        head += "content-type: application/json\r\nconnection: close\r\n\r\n"
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.begun_s = time.monotonic()
        self.socket.sendall(head.encode() + text)
        self.socket.setblocking(False)

    def read(self) -> bool:
        """Counts what has come; False at the end."""
        data = self.socket.recv(1 << 16)
        if not data:
            self.socket.close()
            return False
        if not self.status:
            self.status = int(data[9:12])
        self.last_s = time.monotonic()
        chunks = data.count(CHUNK)
        if chunks:
            self.first_s = self.first_s or self.last_s
            self.chunks += chunks
        if self._leave_after is not None and self.chunks >= self._leave_after:
            self.socket.close()
            return False
        return True


def load(
    port: int,
    bodies: Sequence[dict[str, Any]],
    per_s: float | None = None,
    leave_after: Sequence[int | None] | None = None,
) -> list[Stream]:
    """Sends the requests, `per_s` of them per second or all at once, and reads them to their ends."""
    poll = select.epoll()
    opened: list[Stream] = []
    reading: dict[int, Stream] = {}
    begun = time.monotonic()
    while reading or len(opened) < len(bodies):
        due = len(bodies) if per_s is None else 1 + (time.monotonic() - begun) * per_s
        while len(opened) < min(len(bodies), due):
            at = len(opened)
            stream = Stream(port, bodies[at], None if leave_after is None else leave_after[at])
            opened.append(stream)
            reading[stream.socket.fileno()] = stream
            poll.register(stream.socket.fileno(), select.EPOLLIN)
        for number, _ in poll.poll(0, len(bodies)):
            if not reading[number].read():
                del reading[number]
        time.sleep(_NAP_S)
    poll.close()
    return opened
