"""KV bytes of whole sequences."""

from __future__ import annotations

import numpy as np
from pagecast.sim.machine.model_facts import ModelFacts
from pagecast.sim.scenario import Scenario


def bytes_per_sequence(lengths: list[int], scenario: Scenario) -> float:
    """Mean KV bytes of sequences of these many tokens at their end, over all GPUs of the replica."""
    model = scenario.facts()
    tp = scenario.tensor_parallel_size
    if not lengths:
        return 0.0
    size = scenario.block_tokens
    whole, counts = np.unique(-(-np.array(lengths) // size) * size, return_counts=True)
    each = [_sequence_bytes(model, tokens, scenario) for tokens in whole.tolist()]
    return float(np.dot(each, counts)) * tp / len(lengths) / scenario.context_ranks


def _sequence_bytes(model: ModelFacts, tokens: int, scenario: Scenario) -> int:
    """KV bytes of a sequence on one GPU: windowed layers keep their window, or every token if told so."""
    dtype, tp = scenario.kv_cache_dtype, scenario.tensor_parallel_size
    if scenario.disable_hybrid_kv_cache_manager and model.recurrent is None:
        return model.kv_bytes_per_token(dtype, tp) * tokens
    return model.kv_bytes_of_sequence(tokens, dtype, tp)
