"""Load shedding: requests are rejected on arrival whose first token would come too late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request
from pagecast.sim.core.running import Running

PrefillNs = Callable[[int], float]
"""The time to compute so many prompt tokens, in full steps, in nanoseconds."""

_RECENT = 32  # admissions at most, and
_LEAST = 8  # at least, that tell the pace of the queue
_WEIGHT = 0.05  # of the newest admission, in the share of prompts that is not cached


class ShedByTtft:
    """Rejects a request whose predicted TTFT is above `most_ns`.

    The prediction is the greater of two times: what the prompts ahead and its own take to compute
    (`prefill_ns`, of the share of tokens that was not cached lately), and what they take at the pace of
    admissions since the queue was last empty, which is slower where blocks or the batch are short.
    """

    def __init__(self, most_ns: int, prefill_ns: PrefillNs) -> None:
        self._most_ns = most_ns
        self._prefill_ns = prefill_ns
        self._uncached = 1.0
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)  # time and prompt tokens

    def predicted_ns(self, request: Request, running: Running, queue: Queue) -> float:
        """The TTFT to expect of a request that joins the queue now."""
        ahead = sum([other.known_tokens for other in queue])
        chunks = sum([other.known_tokens - other.computed_tokens for other in running.chunked])
        compute = self._prefill_ns(chunks + int((ahead + request.known_tokens) * self._uncached))
        if not ahead:
            self._recent.clear()  # what was admitted before came no faster than it was asked for
        if len(self._recent) < _LEAST:
            return compute
        first = self._recent[0][0]
        tokens = sum([count for _, count in self._recent])
        return max(compute, (ahead + request.known_tokens) * (request.arrival_ns - first) / tokens)

    def refusal(self, request: Request, running: Running, queue: Queue) -> str:
        """The prediction, where it is above the limit."""
        predicted = self.predicted_ns(request, running, queue)
        if predicted <= self._most_ns:
            return ""
        return f"predicted TTFT {predicted / 1e9:.3g} s is above {self._most_ns / 1e9:g} s"

    def admitted(self, request: Request, cached_tokens: int, now: int) -> None:
        """Learns the pace of admissions, and how much of prompts is not cached."""
        self._recent.append((now, request.known_tokens))
        share = 1 - cached_tokens / request.known_tokens
        self._uncached += _WEIGHT * (share - self._uncached)
