"""`CalibratedCosts`: step costs as fitted from recorded runs; implements `StepCosts`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from pagecast.sim.core.plan import counts_as_decode
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.calibration import trust
from pagecast.sim.costs.calibration.curve import curve_weights, padded, table_weights
from pagecast.sim.costs.calibration.file import MEASURED, Calibration
from pagecast.sim.costs.calibration.option_costs import UNKNOWN, OptionCosts
from pagecast.sim.costs.decode_line import DecodeLine
from pagecast.sim.costs.families.common import LAUNCH_FLOOR, REQUEST
from pagecast.sim.costs.families.registry import family
from pagecast.sim.costs.families.term import ComputedStep, Place, Units
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.note import Note
from pagecast.traces.arrays import Floats, Ints

_TABLE = 16384  # token counts whose matrix work is looked up


class CalibratedCosts:
    """The costs of a calibration, or of one of its replicates.

    A step takes host and device time one after the other; their sum is what was fitted. At pipeline depth 1
    the host's part disappears behind the device, and steps with prompts change as `Host` says.
    """

    def __init__(
        self, calibration: Calibration, values: tuple[float, ...] | None = None, *, pipeline_depth: int = 0
    ) -> None:
        c = self.calibration = calibration
        self.pipeline_depth = pipeline_depth
        self.name = c.name
        self._values = values or (*c.curve_ns, *c.terms_ns.values())
        count = len(c.knots)
        self._curve = np.array(self._values[:count])
        self._terms = dict(zip(c.terms_ns, self._values[count:], strict=True))
        self._host_step = round(c.host.step_ns)
        self._host_request = round(c.host.request_ns)
        self._hidden = c.host.launch_ns if pipeline_depth else 0.0
        self._busy = 1.0 + (c.host.busy if pipeline_depth else 0.0)
        self._family = family(c.shape.family)
        curve_ns = self._values[:count]
        self._matrix = _matrix_table_ns(c.knots, curve_ns, c.shape.graph_sizes)
        self._prompt_matrix = _matrix_table_ns(c.knots, curve_ns, c.shape.prompt_sizes)
        self._largest_graph = c.shape.largest_graph
        self._lines: dict[int, DecodeLine] = {}
        self._step_terms = self._charged(Place.DEVICE, Place.HOST)
        self._arrival_terms = self._charged(Place.ARRIVAL)
        planned = c.host.single_ns if pipeline_depth else 0.0
        self._launch = planned or self._terms.get(LAUNCH_FLOOR, 0.0)
        self._launch_terms = [] if planned else self._charged(Place.HOST)

    def _charged(self, *places: Place) -> list[tuple[float, Units]]:
        """Coefficients and units of the terms charged at these places."""
        shape = self.calibration.shape
        return [
            (self._terms[term.name], term.bind(shape))
            for term in self._family.terms
            if term.place in places and self._terms.get(term.name)
        ]

    # -- the interface ---------------------------------------------------------------------------

    def device_ns(self, batch: Batch) -> int:
        """Device time of a step with prompt chunks."""
        if self._family.single_tokens_decode:
            batch = _single_tokens_decoding(batch)
            if not batch.prefill:
                return self.decode_line(batch.decode_n).ns(batch.decode_ctx, batch.decode_max)
        step = self._step(batch)
        tokens = step.tokens
        if tokens <= _TABLE:
            total = self._prompt_matrix[tokens]
        else:
            total = float(self._matrix_ns(np.array([tokens]), self.calibration.shape.prompt_sizes)[0])
        for each, units in self._step_terms:
            total += each * units(step)
        return max(round(total * self._busy - self._hidden) - self.host_ns(step.n + len(step.prefill)), 0)

    def launch_ns(self, batch: Batch) -> int:
        """Time to launch a step with prompts kernel by kernel; 0 where CUDA graphs are replayed."""
        if not self._launch:
            return 0
        step = self._step(_single_tokens_decoding(batch))
        if not step.prefill or not step.ungraphed:
            return 0
        total = self._launch + sum([each * units(step) for each, units in self._launch_terms])
        return max(round(total) - self.host_ns(step.n + len(step.prefill)), 0)

    def decode_line(self, n: int) -> DecodeLine:
        """Device time of a pure decode step of `n` requests; kept once computed."""
        line = self._lines.get(n)
        if line is None:
            line = self._lines[n] = self._make_line(n)
        return line

    def warm_ns(self, after: int) -> int:
        """Device time that decode steps after a step with prompts of `after` tokens take more, in all."""
        return round(self._family.warm_ns(self._terms, after))

    def shared_ns(self, tokens: int, requests: int) -> int:
        """Device time that a step saves because several of its requests read the same `tokens` of context."""
        return round(self._family.shared_ns(self.calibration.shape, self._terms, tokens, requests))

    def host_ns(self, requests: int) -> int:
        """CPU time a step of `requests` requests adds when nothing overlaps it."""
        return self._host_step + requests * self._host_request

    def arrival_ns(self, input_tokens: int) -> int:
        """CPU time between steps for one arriving request."""
        step = ComputedStep(0, 0, 0, (), 0, 0, False, arrivals=1, arrived_tokens=input_tokens)
        return round(sum([each * units(step) for each, units in self._arrival_terms]))

    def expected_error(self) -> Note:
        """A note on what was fitted, and on the error on a run left out of the fit."""
        not_ahead = bool(self.pipeline_depth) and self.calibration.host.source == MEASURED
        return trust.expected_error(self.calibration, not_ahead=not_ahead)

    def outside(
        self, longest_context: int, most_tokens: int, most_requests: int, block_size: int
    ) -> Note | None:
        """A note on where a replay left the fitted range; None where it did not.

        The replay's largest values: `longest_context` tokens in a request, `most_tokens` computed in a step,
        `most_requests` decoding in a step. `block_size` is in tokens.
        """
        return trust.outside(self.calibration, longest_context, most_tokens, most_requests, block_size)

    # -- the parts -------------------------------------------------------------------------------

    def _step(self, batch: Batch) -> ComputedStep:
        n, ctx, longest, prefill, after = batch
        tokens = n
        for chunk in prefill:
            tokens += chunk[0]
        return ComputedStep(n, ctx, longest, prefill, after, tokens, tokens > self._largest_graph)

    def _matrix_ns(self, tokens: Ints, sizes: tuple[int, ...]) -> Floats:
        weights = curve_weights(padded(tokens, sizes), self.calibration.knots)
        return np.asarray(weights @ self._curve, np.float64)

    def _make_line(self, n: int) -> DecodeLine:
        shape = self.calibration.shape
        in_table = n <= _TABLE
        matrix = self._matrix[n] if in_table else float(self._matrix_ns(np.array([n]), shape.graph_sizes)[0])
        fixed = matrix + self._terms.get(REQUEST, 0.0) * n - self.host_ns(n)
        return self._family.line(shape, self._terms, n, fixed)


@lru_cache(maxsize=8)
def _matrix_table_ns(
    knots: tuple[int, ...], curve_ns: tuple[float, ...], sizes: tuple[int, ...]
) -> tuple[float, ...]:
    """Matrix work by tokens. Kept, because a study asks for the same costs at every replay."""
    return tuple((table_weights(_TABLE, sizes, knots) @ np.array(curve_ns)).tolist())


def _single_tokens_decoding(batch: Batch) -> Batch:
    """The batch with each prompt chunk of one token as the decode that it is to a GPU."""
    n, ctx, longest, prefill, after = batch
    contexts = [context for tokens, context in prefill if counts_as_decode(tokens)]
    if not contexts:
        return batch
    chunks = tuple([chunk for chunk in prefill if chunk[0] > 1])
    return Batch(n + len(contexts), ctx + sum(contexts), max(longest, *contexts), chunks, after)


def option_costs(costs: StepCosts | None) -> OptionCosts:
    """What costs know of n-grams and of a host tier."""
    return costs.calibration.options if isinstance(costs, CalibratedCosts) else UNKNOWN
