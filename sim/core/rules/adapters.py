"""LoRA adapters: a step computes with so many of them at most."""

from __future__ import annotations

from pagecast.sim.core.request import Request
from pagecast.sim.core.step import Step


class AdapterSlots:
    """The adapters of one step; a request whose adapter has no place in it waits (vLLM)."""

    lasting = False

    def __init__(self, step: Step, most: int) -> None:
        self._most = most
        self._adapters = step.adapters()

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
