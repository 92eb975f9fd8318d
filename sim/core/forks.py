"""Forks: requests held back until the prompt they share with another is computed.

A fork's prompt is its parent's. Once that is computed, the fork finds its full blocks as any request would,
and is given a copy of the last, partly filled one. So it computes a single token of the prompt, after which
it draws a token of its own.
"""

from __future__ import annotations

from pagecast.sim.core.request import Request, State


class Forks:
    """Requests that wait for their parent's prompt, in the order they came."""

    def __init__(self) -> None:
        self._held: dict[Request, list[Request]] = {}
        self.count = 0  # of all

    def __len__(self) -> int:
        return self.count

    def hold(self, request: Request) -> bool:
        """Keeps a request back if its parent's prompt is still to be computed."""
        parent = request.parent
        if parent is None or parent.state not in (State.WAITING, State.LOADING, State.PREFILL):
            return False
        self._held.setdefault(parent, []).append(request)
        self.count += 1
        return True

    def drop(self, request: Request) -> bool:
        """Takes out a request that has ended. False: it is not held back."""
        parent = request.parent
        held = self._held.get(parent) if parent is not None else None
        if parent is None or held is None or request not in held:
            return False
        held.remove(request)
        if not held:
            del self._held[parent]
        self.count -= 1
        return True

    def release(self, parent: Request) -> list[Request]:
        """Takes out the forks of a request: its prompt is computed, or never will be."""
        held = self._held.pop(parent, [])
        self.count -= len(held)
        return held
