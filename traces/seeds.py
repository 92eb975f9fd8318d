"""Seeds of random draws: the least that any may be."""

from __future__ import annotations

from pagecast.sim.core.errors import BadInput

LEAST_SEED = 0  # numpy's generators take none below


def checked_seed(seed: int) -> int:
    """The seed itself. Errors: BadInput for one below `LEAST_SEED`."""
    if seed < LEAST_SEED:
        raise BadInput(f"seed is {seed}; it must be at least {LEAST_SEED}")
    return seed
