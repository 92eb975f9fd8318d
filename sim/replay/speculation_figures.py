"""Figures of replicas whose requests speculate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pagecast.sim.replay.metrics import statistics
from pagecast.sim.speculation.speculation import Speculation, draft_figures


def speculation_figures(parts: Sequence[Speculation]) -> dict[str, Any]:
    """Figures of one replica that speculates, or of several together; none without any.

    `itl_s` pools the times between outputs, `speculation` adds up what was drafted and accepted.
    """
    if not parts:
        return {}
    gaps_s = np.concatenate([part.gaps_s() for part in parts])
    return {"itl_s": statistics(gaps_s), "speculation": draft_figures(parts)}
