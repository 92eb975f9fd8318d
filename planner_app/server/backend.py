"""Backend protocol: whatever generates tokens behind the server, the simulator or the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagecast.planner_app.server.generation import Generation
from pagecast.sim.core.limits import Limits


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's state at one instant: requests, and blocks used of those there are."""

    running: int
    waiting: int
    used_blocks: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class HostTierUse:
    """What KV offloading has moved so far, and how full the host tier is (`usage`: 0 to 1)."""

    load_bytes: int
    load_s: float
    store_bytes: int
    store_s: float
    usage: float
    skipped_stores: int


class Observer(Protocol):
    """Observer of a replica: called for each event, in the order in which they happen."""

    def step(self, tokens: int, gaps_ns: dict[int, int], first: list[Generation], late_ns: int) -> None:
        """A step of `tokens` tokens ended. `gaps_ns`: how many requests got a token so long after their last;
        `first` got their first. `late_ns`: how much later than it ended this was handled."""

    def ended(self, generation: Generation) -> None:
        """A generation has ended, whichever way."""


class GenerationBackend(Protocol):
    """Generates tokens. All methods are called in the event loop's thread."""

    limits: Limits
    max_model_len: int

    async def start(self) -> None:
        """Begins to serve. Errors: what keeps it from doing so."""

    async def stop(self) -> None:
        """Ends every request and gives back what it holds."""

    def submit(self, generation: Generation) -> None:
        """Queues a generation. Where it can never be served it ends at once, with its `error`."""

    def cancel(self, generation: Generation) -> None:
        """Ends a generation, where it has not ended; its `finish_reason` becomes "abort"."""

    def load(self) -> ReplicaLoad:
        """The load now: requests that run and wait, and blocks in use."""
        ...

    def adapters(self) -> tuple[list[str], list[str]]:
        """The adapters of running and of waiting requests, each once, in order of their names."""
        ...

    def preemptions(self) -> int:
        """How often a request lost its blocks so far."""
        ...

    def host_tier(self) -> HostTierUse | None:
        """KV offloading so far; None where there is no host tier."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it can serve: False after a failure."""
        ...
