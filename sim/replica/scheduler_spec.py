"""Specification of a scheduler: all that its decisions follow from, but for the requests."""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.core.engines.profile import Profile
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.kv_events import KvEventStream
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.speculation.config import SpeculativeConfig
from pagecast.sim.speculation.recorded import RecordedDrafts
from pagecast.sim.speculation.speculation import Speculation


@dataclass(frozen=True, eq=False, kw_only=True)
class SchedulerSpec:
    """Limits and rules of a scheduler, and how its requests speculate.

    `speculation`: None where they do not. `drafts`: draft tokens that were recorded, which are followed; the
    others are drawn with `seed`.
    """

    limits: Limits
    rules: Profile = VLLM
    speculation: SpeculativeConfig | None = None
    drafts: RecordedDrafts | None = None
    seed: int = 0

    def scheduler(
        self, *, log: bool = False, kv_events: KvEventStream | None = None, numbered: bool = True
    ) -> Scheduler:
        """A scheduler that has not begun. Parameters are those of `Scheduler`."""
        return Scheduler(
            self.limits, self.rules, log=log, kv_events=kv_events, drafter=self._drafter(), numbered=numbered
        )

    @property
    def key_lookahead(self) -> int:
        """How many tokens after a block its key covers."""
        recomputes = self.speculation is not None and self.speculation.recomputes_block
        return self.rules.key_lookahead(self.limits, recomputes_block=recomputes)

    def _drafter(self) -> Speculation | None:
        """A drafter of its own for each scheduler: it reads recorded draft tokens from the start."""
        if self.speculation is None:
            return None
        return Speculation(
            self.speculation,
            seed=self.seed,
            ahead=self.limits.pipeline_depth > 0,
            recorded=None if self.drafts is None else self.drafts.again(),
        )


def speculation_of(scheduler: Scheduler) -> Speculation | None:
    """The drafter of a scheduler that a spec has made; None where requests do not speculate."""
    drafter = scheduler.lifecycle.drafter
    assert drafter is None or isinstance(drafter, Speculation)
    return drafter
