"""Conversion between blocks of the core and blocks of an engine with sliding windows.

Where the core keeps one block table per sequence, a model whose layers have different windows has several,
and those of windowed layers stop growing. A block of the core then stands for the mean number of the engine's
blocks per block of the trace's sequences. That is exact in total, not for each sequence.
"""

from __future__ import annotations

import numpy as np
from pagecast.sim.core.group_spec import unit_tokens
from pagecast.sim.machine.model_facts import ModelFacts
from pagecast.sim.machine.models import model as find_model
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace


def blocks_per_block(trace: Trace, scenario: Scenario) -> float:
    """Mean number of the engine's blocks per block of a sequence, over the trace; 1 for plain models."""
    layout = scenario.layout()
    if layout.plain:
        return 1.0
    lengths = (trace.requests["input_tokens"] + trace.requests["output_tokens"] - 1).to_numpy(np.int64)
    # Lengths that need the same number of units need the same number of blocks.
    unit = unit_tokens(layout.specs)
    unique, counts = np.unique(-(-lengths // unit), return_counts=True)
    total_blocks = sum(layout.blocks_of(int(n) * unit) * int(k) for n, k in zip(unique, counts, strict=True))
    whole = int((-(-lengths // scenario.block_size)).sum())
    return total_blocks / whole


def bytes_per_sequence(lengths: list[int], scenario: Scenario) -> float:
    """Mean KV bytes of sequences of these many tokens at their end, over all GPUs of the replica."""
    model = find_model(scenario.model)
    tp = scenario.tensor_parallel_size
    if not lengths:
        return 0.0
    unique, counts = np.unique(np.array(lengths), return_counts=True)
    size = scenario.block_size
    total = 0.0
    for n, count in zip(unique.tolist(), counts.tolist(), strict=True):
        whole = -(-n // size) * size
        total += _sequence_bytes(model, whole, scenario) * count
    return total * tp / len(lengths)


def _sequence_bytes(model: ModelFacts, tokens: int, scenario: Scenario) -> int:
    """KV bytes of a sequence on one GPU: windowed layers keep their window, or every token if told so."""
    dtype, tp = scenario.kv_cache_dtype, scenario.tensor_parallel_size
    if scenario.disable_hybrid_kv_cache_manager and model.recurrent is None:
        return model.kv_bytes_per_token(dtype, tp) * tokens
    return model.kv_bytes_of_sequence(tokens, dtype, tp)
