"""Prices of GPUs, in USD per GPU-hour, and the cost of tokens that follows from them.

    >>> from pagecast.planner_app.planner.prices import read_prices, usd_per_million_tokens
    >>> prices = read_prices(["H200=3.5", "L40S=1.2"])
    >>> round(usd_per_million_tokens(prices["H200"], tokens_per_s=2779), 2)
    0.35

No price is built in: prices are the user's own.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagecast.sim.core.errors import BadInput


def read_prices(texts: Iterable[str]) -> dict[str, float]:
    """Reads `H200=3.5`. Errors: BadInput."""
    by_gpu: dict[str, float] = {}
    for text in texts:
        name, equals, amount = text.rpartition("=")
        try:
            if not equals or not name.strip() or name.strip() in by_gpu:
                raise ValueError
            by_gpu[name.strip()] = float(amount)
        except ValueError:
            raise BadInput(f"--price {text}: write GPU=USD_PER_GPU_HOUR, each GPU once") from None
    return by_gpu


def usd_per_million_tokens(usd_per_hour: float, tokens_per_s: float) -> float | None:
    """USD per million tokens of a replica that costs `usd_per_hour`; None where it makes no tokens."""
    return usd_per_hour / 3600 / tokens_per_s * 1e6 if tokens_per_s > 0 else None
