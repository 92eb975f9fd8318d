"""A replica as a router sees it: what the router counts itself, and gauges as of the last scrape."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pagecast.sim.core.limits import Limits
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.fleet.gauges import Gauges
from pagecast.sim.replica.arrivals import NEVER_NS

_LEAST = Limits(1)


class View:
    """One replica in one router's account.

    `requests` and `prompt_tokens` count what this router sent there and has not ended. `prefill_rows`: those
    of them without a first token, in order; call `settle` before reading it. `first_token_ns(row)`: when a
    request got its first token, or `NEVER_NS`. `changed_ns()`: when the replica changed last. `gauges(now)`:
    those of the latest scrape. `step_line`: derived from the counts by the router, None after each change.
    """

    __slots__ = (
        "_settled_ns",
        "block_size",
        "changed_ns",
        "costs",
        "first_token_ns",
        "gauges",
        "max_num_seqs",
        "name",
        "num_blocks",
        "number",
        "prefill_rows",
        "prompt_tokens",
        "prompts",
        "requests",
        "step_line",
    )

    def __init__(
        self,
        number: int,
        name: str,
        *,
        limits: Limits = _LEAST,
        costs: StepCosts | None = None,
        gauges: Callable[[int], Gauges],
        first_token_ns: Callable[[int], int] = lambda row: NEVER_NS,
        changed_ns: Callable[[], int] = lambda: NEVER_NS,
    ) -> None:
        self.number = number
        self.name = name
        self.num_blocks = limits.num_blocks
        self.block_size = limits.block_size
        self.max_num_seqs = limits.max_num_seqs
        self.costs = costs
        self.gauges = gauges
        self.first_token_ns = first_token_ns
        self.changed_ns = changed_ns
        self._settled_ns: int | None = None  # the change after which `prefill_rows` was settled
        self.step_line: tuple[float, float] | None = None
        self.requests = 0
        self.prompt_tokens = 0
        self.prompts: dict[int, int] = {}  # prompt tokens of the requests in flight, by row
        self.prefill_rows: deque[int] = deque()

    def add(self, row: int, prompt_tokens: int) -> None:
        """A request was sent there."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.prompts[row] = prompt_tokens
        self.step_line = None

    def remove(self, row: int) -> None:
        """A request has ended there, whichever way."""
        self.requests -= 1
        self.prompt_tokens -= self.prompts.pop(row)
        self._settled_ns = None
        self.step_line = None

    def settle(self, now: int) -> list[int]:
        """Drops from `prefill_rows` those at its head that have ended or got their first token by `now`."""
        changed_ns = self.changed_ns()
        dropped: list[int] = []
        if changed_ns == self._settled_ns:
            return dropped
        self._settled_ns = changed_ns if changed_ns < now else None
        rows = self.prefill_rows
        while rows:
            row = rows[0]
            if row in self.prompts and self.first_token_ns(row) > now:
                break
            dropped.append(rows.popleft())
        return dropped


Views = Sequence[View]
