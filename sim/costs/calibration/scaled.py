"""Step costs that stretch others: by a factor, or by the corrections that a measurement asks for."""

from __future__ import annotations

from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.decode_line import FEMTO, DecodeLine
from pagecast.sim.costs.measured.corrections import Corrections
from pagecast.sim.costs.step_costs import StepCosts


class ScaledCosts:
    """Any step costs with every time multiplied by `factor`; implements `StepCosts`.

    `prompts`: another factor, for steps with prompts.
    """

    def __init__(self, costs: StepCosts, factor: float, prompts: float | None = None) -> None:
        self.name = costs.name
        self._costs, self._factor = costs, factor
        self._prompts = factor if prompts is None else prompts

    def device_ns(self, batch: Batch) -> int:
        """Device time of a step that computes at least one prompt chunk."""
        return round(self._costs.device_ns(batch) * self._prompts)

    def launch_ns(self, batch: Batch) -> int:
        return round(self._costs.launch_ns(batch) * self._prompts)

    def decode_line(self, n: int) -> DecodeLine:
        """Device time of a pure decode step of `n` requests."""
        return self._costs.decode_line(n).scaled(self._factor)

    def host_ns(self, requests: int) -> int:
        """CPU time a step adds when nothing overlaps it."""
        return round(self._costs.host_ns(requests) * self._factor)

    def warm_ns(self, after: int) -> int:
        return round(self._costs.warm_ns(after) * self._factor)

    def shared_ns(self, tokens: int, requests: int) -> int:
        return round(self._costs.shared_ns(tokens, requests) * self._factor)

    def arrival_ns(self, input_tokens: int) -> int:
        """CPU time between steps for one arriving request."""
        return round(self._costs.arrival_ns(input_tokens) * self._factor)

    def expected_error(self) -> str:
        """The error of the costs that are scaled."""
        return self._costs.expected_error()

    def outside(
        self, longest_context: int, most_tokens: int, most_requests: int, block_size: int
    ) -> str | None:
        """The note of the costs that are scaled."""
        return self._costs.outside(longest_context, most_tokens, most_requests, block_size)


class CorrectedCosts(ScaledCosts):
    """Any step costs with corrections: time that each step takes more, and factors on its device time.

    The host's time stays as it is: what a measurement adds to it is the corrections' `step_s`.
    """

    def __init__(self, costs: StepCosts, corrections: Corrections) -> None:
        super().__init__(costs, corrections.decode, corrections.prompt)
        self.name, self.corrections = corrections.name, corrections
        self._added_ns = round(corrections.step_s * 1e9)

    @property
    def corrected_name(self) -> str:
        """The costs that are corrected."""
        return self._costs.name

    def corrected(self, corrections: Corrections) -> CorrectedCosts:
        """The same with other corrections."""
        return CorrectedCosts(self._costs, corrections)

    def device_ns(self, batch: Batch) -> int:
        """Device time of a step that computes at least one prompt chunk."""
        return max(super().device_ns(batch) + self._added_ns, 1)

    def decode_line(self, n: int) -> DecodeLine:
        """Device time of a pure decode step of `n` requests."""
        return super().decode_line(n).longer(self._added_ns * FEMTO)

    def host_ns(self, requests: int) -> int:
        """CPU time a step adds when nothing overlaps it."""
        return self._costs.host_ns(requests)

    def launch_ns(self, batch: Batch) -> int:
        return self._costs.launch_ns(batch)

    def arrival_ns(self, input_tokens: int) -> int:
        """CPU time between steps for one arriving request."""
        return self._costs.arrival_ns(input_tokens)
