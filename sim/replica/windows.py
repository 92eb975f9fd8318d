"""Conversion between blocks of the core and blocks of an engine with sliding windows.

Where the core keeps one block table per sequence, a model whose layers have different windows has several,
and those of windowed layers stop growing. A block of the core then stands for the mean number of the engine's
blocks per block of the workload's sequences. That is exact in total, not for each sequence.
"""

from __future__ import annotations

import numpy as np
from pagecast.sim.core.group_spec import unit_tokens
from pagecast.sim.replica.workload import Workload
from pagecast.sim.scenario import Scenario


def blocks_per_block(workload: Workload, scenario: Scenario) -> float:
    """Mean number of the engine's blocks per block of a sequence; 1 for plain models."""
    layout = scenario.layout()
    if layout.plain:
        return 1.0
    lengths = workload.lengths
    # Lengths that need the same number of units need the same number of blocks.
    unit = unit_tokens(layout.specs)
    unique, counts = np.unique(-(-lengths // unit), return_counts=True)
    total_blocks = sum(layout.blocks_of(int(n) * unit) * int(k) for n, k in zip(unique, counts, strict=True))
    whole = int((-(-lengths // scenario.block_tokens)).sum())
    return total_blocks / whole
