"""The terms that fitted step costs are sums of, and the curve of matrix work over a step's tokens.

    time = matrix work (a curve over the step's tokens) + terms x their coefficients

The curve is piecewise linear over `knots`; its value at a token count is the cost of everything that each
token passes through, weights included, with the fixed cost of a step. Tokens are padded to CUDA graph
sizes where graphs exist. All other terms are counts, with coefficients in nanoseconds.

A new term needs a line in `TERMS`, a column in `fitting/features.py` (with its place in `EXPENDABLE`, and in
`HOST_TERMS` where the host spends it), its time in `CalibratedCosts`, and a ratio in `transfer.py` where it
differs between GPUs or models. `Fit.predict` and `CalibratedCosts` must give equal times:
`test_costs_are_what_was_fitted`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TERMS: dict[str, str] = {
    "request": "a request in the step: scheduling, sampling, handing out its token",
    "prompt_step": "a step with prompt chunks, of which no full CUDA graph runs from sampling to sampling",
    "ungraphed_step": "a step with more tokens than any CUDA graph",
    "prompt_chunk": "a prompt chunk",
    "request_beside_prompt": "a decoding request in a step with prompt chunks",
    "token_after_prompts": "a token in a step with prompts right after another: a GPU run hot",
    "decode_after_prompts": "a decode step soon after prompts: root of their tokens, fading step by step",
    "kv_token": "a context token read by decode attention, with the time of SMs left idle",
    "first_kv_token": "a context token among a step's first, until memory streams",
    "shared_token": "a context token that another decoding request reads too: less, by what a cache spares",
    "short_shared_token": "the same of a prefix short enough to stay in the cache: less again",
    "prompt_tile": "a tile x key block of prompt attention, as many as an SM takes",
    "light_prompt_tile": "the same of a step with few tokens, which leaves a GPU its clocks",
    "prompt_kv_token": "a context token that a prompt chunk reads, for all its tiles together",
    "longest_prompt_tile": "a key block of the longest prompt tile",
    "launch_floor": "launching a step with prompts, which its device time can't go below",
    "arrival": "a request that arrived since the last step",
    "arriving_token": "a prompt token of those",
}
# A GPU that has just done much arithmetic runs at lower clocks. Each decode step after it loses `COOLING`
# times what the one before lost (seen after prompts of 256 to 8,192 tokens on an H200). A replay charges the
# losses of four steps to the first: `COOLING_STEPS` times its own.
COOLING = 0.75
COOLING_STEPS = (1 - COOLING**4) / (1 - COOLING)


def padded(tokens: Ints, sizes: tuple[int, ...]) -> Floats:
    """Tokens up to the next CUDA graph size where there is one."""
    if not sizes:
        return tokens.astype(np.float64)
    table = np.array(sizes)
    slot = np.minimum(np.searchsorted(table, tokens), len(table) - 1)
    return np.where(tokens <= table[-1], table[slot], tokens).astype(np.float64)


def curve_weights(tokens: Floats, knots: tuple[int, ...]) -> Floats:
    """Weight of each knot's value at the given tokens; beyond the last knot the last slope goes on."""
    table = np.array(knots, np.float64)
    weights = np.zeros((len(tokens), len(table)))
    if len(table) == 1:
        weights[:, 0] = 1.0
        return weights
    inside = np.maximum(tokens, table[0])
    left = np.clip(np.searchsorted(table, inside, side="right") - 1, 0, len(table) - 2)
    share = (inside - table[left]) / (table[left + 1] - table[left])
    rows = np.arange(len(tokens))
    weights[rows, left] = 1.0 - share
    weights[rows, left + 1] = share
    return weights
