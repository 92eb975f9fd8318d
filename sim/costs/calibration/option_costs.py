"""Costs of options beside a step's own: speculation by n-grams and offloading to the host.

A calibration has them where runs with these options were among those it was made from.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

_MOST = {"load_bytes_per_s": 1e15, "store_bytes_per_s": 1e15, "lookup_sd": 10.0}
_MOST_NS = 1e12


@dataclass(frozen=True, slots=True)
class OptionCosts:
    """Host times in nanoseconds and rates in bytes per second; None where no run shows them.

    `lookup_ns`: per request of a step, to look up n-grams and lay out a step that verifies them;
    `lookup_prompt_ns`: more in a step with prompts; `lookup_sd`: of the natural logarithm of both.
    `load_bytes_per_s`, `store_bytes_per_s`: of copies from and to host memory. `offloading_step_ns` is added
    to every step with a host tier, `offloading_block_ns` for each block of a transfer that is submitted.
    """

    lookup_ns: float | None = None
    lookup_prompt_ns: float | None = None
    lookup_sd: float | None = None
    load_bytes_per_s: float | None = None
    store_bytes_per_s: float | None = None
    offloading_step_ns: float | None = None
    offloading_block_ns: float | None = None

    def as_dict(self) -> dict[str, float]:
        """Those that are known, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def with_lookup_level(self, deviations: float) -> OptionCosts:
        """Look-ups that many standard deviations longer."""
        if self.lookup_ns is None or not self.lookup_sd:
            return self
        level = math.exp(deviations * self.lookup_sd)
        return replace(
            self, lookup_ns=self.lookup_ns * level, lookup_prompt_ns=(self.lookup_prompt_ns or 0.0) * level
        )

    @classmethod
    def read(cls, fields: dict[str, Any]) -> OptionCosts:
        """The costs of a calibration's file. Raises TypeError or ValueError for what is none."""
        values = {str(name): float(value) for name, value in fields.items()}
        for name, value in values.items():
            most = _MOST.get(name, _MOST_NS)
            least = 1.0 if name.endswith("_per_s") else 0.0
            if not math.isfinite(value) or not least <= value <= most:
                raise ValueError(f"options: {name} is {value:g}, must be from {least:g} to {most:g}")
        return cls(**values)


UNKNOWN = OptionCosts()
