"""Step costs: the interface of every cost model, in integer nanoseconds.

A step has CPU work on the host (scheduling, launching, handing out tokens) and work on the device.
Without pipelining a step takes their sum; at pipeline depth 1 they overlap. A pure decode step's
device time is linear in its context (`DecodeLine`), so that a replay need not visit each step.
"""

from __future__ import annotations

from typing import Protocol

from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.decode_line import DecodeLine


class StepCosts(Protocol):
    """A cost model: `Roofline`, `CalibratedCosts` or any object with these methods.

    A subclass inherits the answers of a model that no run was fitted to: clocks are steady, sharing spares
    nothing, and no size is out of range.
    """

    name: str

    def device_ns(self, batch: Batch) -> int:
        """Device time of a step that computes at least one prompt chunk."""
        ...

    def launch_ns(self, batch: Batch) -> int:
        """CPU time, after `host_ns`, of launching a step with prompt chunks while the device computes it.

        It ends no sooner than the last launch; 0 where launching is quick (CUDA graphs, fused kernels).
        """
        ...

    def decode_line(self, n: int) -> DecodeLine:
        """Device time of a pure decode step of `n` >= 1 requests, as a line in its context."""
        ...

    def warm_ns(self, after: int) -> int:
        """Device time added to a decode step right after a step with prompts, of `after` tokens in all: what
        it and the next ones lose to a GPU that has just done much arithmetic."""
        return 0

    def shared_ns(self, tokens: int, requests: int) -> int:
        """Device time that a step of `requests` decoding requests saves where `tokens` of their context are
        in the blocks of another request of the step as well, which has them fetched already.

        It is the same for all steps of a stretch of decode steps, and never more than their contexts take.
        """
        return 0

    def host_ns(self, requests: int) -> int:
        """CPU time a step of `requests` requests adds when nothing overlaps it."""
        ...

    def arrival_ns(self, input_tokens: int) -> int:
        """CPU time between steps for one arriving request of `input_tokens` prompt tokens."""
        ...

    def expected_error(self) -> str:
        """The error to expect of figures made with these costs: a `Note`, or a sentence."""
        ...

    def outside(
        self, longest_context: int, most_tokens: int, most_requests: int, block_size: int
    ) -> str | None:
        """A note on where a replay left the range that these costs are known for; None where it did not.

        The replay's largest values: `longest_context` tokens in a request, `most_tokens` computed in a step,
        `most_requests` decoding in a step. `block_size` is in tokens.
        """
        return None
