"""LoRA adapters: a step computes with so many of them at most."""

from __future__ import annotations

from collections.abc import Iterable

from pagecast.sim.core.request import Request


class AdapterSlots:
    """The adapters of one step; a request whose adapter has no place in it waits (vLLM)."""

    lasting = False

    def __init__(self, requests: Iterable[Request], most: int) -> None:
        self._most = most
        self._adapters = {request.adapter for request in requests if request.adapter}

    def opens(self, request: Request) -> bool:
        """Whether a request's adapter has a place."""
        adapter = request.adapter
        return not adapter or adapter in self._adapters or len(self._adapters) < self._most

    def enter(self, request: Request) -> None:
        """Takes the place of a request's adapter."""
        if request.adapter:
            self._adapters.add(request.adapter)

    def hold(self, request: Request) -> None:
        pass  # it takes the place when it is admitted
