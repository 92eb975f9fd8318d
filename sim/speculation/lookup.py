"""Host time of n-gram speculation: looking up guesses, laying out a step in chunks, comparing what was drawn.

It is spent between steps, for every request of a step, and so far known of one engine. The figure is the
slope of what synchronous steps took beyond their calibrated costs, fitted to a recorded run in which n-grams
were looked up and never found (3,078 decode steps of up to 31 requests, Qwen3-8B on an H200:
`tests/engine/recorded/h200f-qwen3-8b-ngram-chat`).
"""

from __future__ import annotations

from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.step_costs import StepCosts

REQUEST_NS = {"pagecast": 18_000}  # by the engine that a calibration was made for


def lookup_ns(costs: StepCosts) -> int:
    """Nanoseconds per request of a step; 0 where nobody has measured it."""
    if not isinstance(costs, CalibratedCosts):
        return 0
    return REQUEST_NS.get(str(costs.calibration.made_for.get("engine")), 0)
