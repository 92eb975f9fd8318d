"""Fair order of the queue: tenants take turns by the tokens that they were served, over their weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.tenants import Tenants


class WeightedFair:
    """The tenant with the least service for its weight goes first; within a tenant, first come first served.

    Service is counted in tokens of prompt and output when a request is admitted for the first time. A tenant
    that had nothing waiting is lifted to the least served one that had, so that nobody saves up turns.
    Source: virtual token counter (Sheng et al., OSDI 2024), with output counted ahead.
    """

    stable = True

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._waiting: dict[str, deque[Request]] = {}
        self._service: dict[str, float] = {}

    def beside(self) -> WeightedFair:
        """An order of other requests of the same tenants: what they are served counts in both."""
        other = WeightedFair(self._tenants)
        other._service = self._service
        return other

    def __iter__(self) -> Iterator[Request]:
        for tenant in sorted(self._waiting, key=self._service.__getitem__):
            yield from self._waiting[tenant]

    def _queue_of(self, tenant: str) -> deque[Request]:
        queue = self._waiting.get(tenant)
        if queue is None:
            least = min([self._service[name] for name in self._waiting], default=0.0)
            self._service[tenant] = max(self._service.get(tenant, 0.0), least)
            queue = self._waiting[tenant] = deque()
        return queue

    def add(self, request: Request) -> None:
        """Adds an arrival behind its tenant's others."""
        self._queue_of(request.tenant).append(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Adds requests ahead of their tenants' others, in their order."""
        for request in reversed(requests):
            self._queue_of(request.tenant).appendleft(request)

    def bring_back(self, requests: Sequence[Request]) -> None:
        """Adds requests taken out of the front again, where they were.

        A tenant was not gone meanwhile: its service stays as it was.
        """
        for request in reversed(requests):
            self._waiting.setdefault(request.tenant, deque()).appendleft(request)

    def first(self, memory: Memory) -> Request | None:
        """The first request of the tenant that was served least for its weight."""
        waiting = self._waiting
        if not waiting:
            return None
        if len(waiting) == 1:
            return next(iter(waiting.values()))[0]
        return waiting[min(waiting, key=self._service.__getitem__)][0]

    def pass_over(self, request: Request) -> None:
        pass  # its tenant's turn keeps its place

    def remove(self, request: Request) -> None:
        """Takes a request out, and charges its tenant where it was admitted."""
        tenant = request.tenant
        queue = self._waiting[tenant]
        if queue[0] is request:
            queue.popleft()
        else:
            queue.remove(request)
        if not queue:
            del self._waiting[tenant]
        if request.state is State.PREFILL and not request.preemptions:
            self._service[tenant] += request.total_tokens / self._tenants.share(tenant).weight
