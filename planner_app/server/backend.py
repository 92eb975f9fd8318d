"""Backend protocol: whatever generates tokens behind the server, the simulator or the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from pagecast.planner_app.server.generation import Generation
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.tiers.offloading import Offloading
from pagecast.sim.runs.transfers import LOAD, STORE, RecordedTransfer


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's state at one instant: requests, and blocks used of those there are."""

    running: int
    waiting: int
    used_blocks: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class HostTierUse:
    """Bytes and blocks that KV offloading has moved so far, and how full the host tier is (`usage`: 0 to 1).

    The sizes are numbers of transfers by their bytes.
    """

    load_bytes: int
    load_s: float
    store_bytes: int
    store_s: float
    usage: float
    skipped_stores: int
    load_sizes: dict[int, int] = field(default_factory=dict)
    store_sizes: dict[int, int] = field(default_factory=dict)


class TransferCount:
    """Counts transfers between the device and its host tier that have ended."""

    def __init__(self) -> None:
        self._ns = {LOAD: 0, STORE: 0}
        self._sizes: dict[str, dict[int, int]] = {LOAD: {}, STORE: {}}

    def count(self, transfers: Iterable[RecordedTransfer]) -> None:
        """Counts those that have ended; the host's own, to a disk, are none of them."""
        for transfer in transfers:
            sizes = self._sizes.get(transfer.kind)
            if sizes is not None:
                self._ns[transfer.kind] += transfer.end_ns - transfer.start_ns
                sizes[transfer.bytes] = sizes.get(transfer.bytes, 0) + 1

    def use(self, offloading: Offloading) -> HostTierUse:
        """All of it so far, and how full the tier is."""
        loads, stores = self._sizes[LOAD], self._sizes[STORE]
        return HostTierUse(
            sum(size * times for size, times in loads.items()),
            self._ns[LOAD] / 1e9,
            sum(size * times for size, times in stores.items()),
            self._ns[STORE] / 1e9,
            offloading.host.used / offloading.host.room,
            offloading.host.refused_stores,
            dict(loads),
            dict(stores),
        )


@dataclass(slots=True)
class SpeculationUse:
    """Draft tokens so far: how often a request had some verified, how many, and how many were accepted.

    `accepted_per_position[i]` counts the times that the draft token at place `i` was accepted.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def count(self, plan: StepPlan, outcome: Outcome) -> None:
        """Counts the draft tokens of a step that has ended."""
        accepted: dict[str, int] | None = None
        for chunk in plan.chunks:
            drafts = chunk.drafts
            if not drafts:
                continue
            if accepted is None:
                accepted = dict(outcome.accepted)
            kept = accepted.get(chunk.request.id, drafts)
            self.drafts += 1
            self.draft_tokens += drafts
            self.accepted_tokens += kept
            if len(self.accepted_per_position) < drafts:
                self.accepted_per_position += [0] * (drafts - len(self.accepted_per_position))
            for place in range(kept):
                self.accepted_per_position[place] += 1

    @classmethod
    def of(cls, drafts: int) -> SpeculationUse:
        """No draft tokens so far, of requests that make at most `drafts` at once."""
        return cls(accepted_per_position=[0] * drafts)


class Observer(Protocol):
    """Observer of a replica: called for each event, in the order in which they happen."""

    def step(
        self, tokens: int, generated: int, gaps_ns: dict[int, int], first: list[Generation], late_ns: int
    ) -> None:
        """A step of `tokens` tokens ended, in which `generated` came out.

        `gaps_ns`: how many requests got tokens so long after their last; `first` got their first. `late_ns`:
        how much later than it ended this was handled.
        """

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

    def now(self) -> int:
        """The present on the backend's clock, in nanoseconds."""
        ...

    def submit(self, generation: Generation) -> None:
        """Queues a generation whose body had come at its `arrival_ns`, before it was parsed and tokenized.

        The simulator has no costs for that and sets `arrival_ns` to the present. Where a generation can never
        be served it ends at once, with its `error`.
        """

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

    def speculation(self) -> SpeculationUse | None:
        """Draft tokens so far; None where requests do not speculate."""
        ...

    @property
    def unrecorded(self) -> str:
        """Why a recording that was asked for has ended; empty while it goes on, or where there is none."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it can serve: False after a failure."""
        ...
