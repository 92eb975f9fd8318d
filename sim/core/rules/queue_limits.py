"""Limits of the queue: requests are rejected on arrival while too many, or too long ones, are unfinished."""

from __future__ import annotations

from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import NEVER, Request
from pagecast.sim.core.running import Running


class QueueLimits:
    """vLLM's: at most so many requests that wait or run, and so many prompt tokens without a first token.

    A prompt counts whole until its first token, whatever of it is cached or computed; the last to be let in
    may exceed the limit of tokens. Source: vllm/v1/engine/async_llm.py, `check_admission` (0.31).
    """

    def __init__(self, requests: int | None, tokens: int | None) -> None:
        self._requests = requests
        self._tokens = tokens

    def refusal(self, request: Request, running: Running, queue: Queue) -> str:
        """The limit that is reached; empty where none is."""
        requests = self._requests
        if requests is not None and len(running.requests) + len(queue) + 1 > requests:
            return f"max_num_queued_reqs {requests} is reached"
        tokens = self._tokens
        if tokens is None:
            return ""
        waiting = [other for other in (*running.requests, *queue) if other.first_token_ns == NEVER]
        if sum([other.prompt_tokens for other in waiting]) < tokens:
            return ""
        return f"max_num_queued_tokens {tokens} is reached"

    def admitted(self, request: Request, cached_tokens: int, now: int) -> None:
        pass  # admissions free no place
