"""Inbox: requests that have come, and that the scheduler has not looked for yet.

With `scheduler_recv_interval` SGLang looks for requests once in so many turns, to save the host's time. A
turn after a batch of prompts always looks. A scheduler with nothing to compute turns without a pause, so
that here it receives at once.

Source: SGLang 0.5.23, srt/managers/scheduler_components/recv_skipper.py.
"""

from __future__ import annotations

from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request

_MANY = 1 << 62


class Inbox:
    """Requests on their way to `queue`, in the order in which they came.

    `interval`: turns between two looks. `prompts`: the last batch had prompts.
    """

    def __init__(self, interval: int, queue: Queue) -> None:
        self.requests: dict[Request, None] = {}
        self.prompts = False
        self._interval = interval
        self._queue = queue
        self._turns = 0  # since the last look

    def turn(self) -> None:
        """Begins a turn of the scheduler, which receives if it is its time."""
        self._turns += self._interval if self.prompts else 1
        self.prompts = False
        if self._turns >= self._interval:
            self.receive()

    def receive(self) -> None:
        """Queues all requests."""
        self._turns = 0
        for request in self.requests:
            self._queue.add(request)
        self.requests.clear()

    def quiet(self) -> int:
        """The number of turns from now on in which nothing is received."""
        if not self.requests:
            return _MANY
        return 0 if self.prompts else self._interval - self._turns - 1

    def decode(self, turns: int) -> None:
        """Takes note of so many turns that only decoded, of which none received a request."""
        if turns and self.prompts:
            self.prompts = False
            self._turns = 0
            turns -= 1
        self._turns = (self._turns + turns) % self._interval
