"""New-token ratio: which part of their longest output SGLang reserves for running requests.

It begins high, falls with every decode step that needs no retraction, and jumps up with each that does.

Source: SGLang 0.5.23, srt/managers/scheduler_components/new_token_ratio_tracker.py.
"""

from __future__ import annotations

_INIT = 0.7
_LEAST_FACTOR = 0.14
_DECAY_STEPS = 600
RETRACT_STEPS = 20
"""For so many decode steps of those that stay, retraction makes room (SGLANG_RETRACT_DECODE_STEPS)."""


class NewTokenRatio:
    """`current` is the ratio now. `conservativeness` scales where it begins and ends."""

    def __init__(self, conservativeness: float) -> None:
        self.first = min(_INIT * conservativeness, 1.0)
        self.least = min(self.first * _LEAST_FACTOR, 1.0)
        self.decay = (self.first - self.least) / _DECAY_STEPS
        self.current = self.first

    def decode(self, steps: int = 1) -> None:
        """Takes note of decode steps without a retraction."""
        current = self.current
        for _ in range(steps):
            if current <= self.least:
                break
            current = max(current - self.decay, self.least)
        self.current = current

    def retract(self, generated: int, requests: int, longest: int) -> None:
        """Takes note of a retraction that left `requests`, which have `generated` of `longest` tokens."""
        self.current = min(1.0, (generated + RETRACT_STEPS * requests) / (longest + 1))

    def reset(self) -> None:
        """Begins again: the server is idle."""
        self.current = self.first
