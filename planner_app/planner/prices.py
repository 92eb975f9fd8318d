"""Prices of GPUs, in USD per GPU-hour, and the cost of tokens that follows from them.

    >>> from pagecast.planner_app.planner.prices import read_prices, usd_per_million_tokens
    >>> prices = read_prices(["H200=3.5", "L40S=1.2"])
    >>> round(usd_per_million_tokens(prices["H200"], tokens_per_s=2779), 2)
    0.35

No price is built in: prices are the user's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from pagecast.planner_app.options import Flag
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import gpu as find_gpu
from pydantic import BeforeValidator


def read_prices(texts: Iterable[str] | Mapping[str, float]) -> dict[str, float]:
    """Reads `H200=3.5`; a mapping has been read. Errors: BadInput."""
    if isinstance(texts, Mapping):
        return dict(texts)
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


Prices = Annotated[dict[str, float], BeforeValidator(read_prices), Flag(kind=list[str])]
"""The field of prices by GPU: `price={"H200": 3.5}`, or as texts."""


def priced(prices: Mapping[str, float], gpus: Iterable[str]) -> dict[str, float]:
    """The prices by the GPUs' full names.

    Errors: BadInput for a GPU that is not known, a price that is not above 0, and, where any price is given,
    for one of `gpus` (full names) without one.
    """
    by_name = {find_gpu(name).name: price for name, price in prices.items()}
    if bad := [name for name, price in by_name.items() if not 0 < price < float("inf")]:
        raise BadInput(f"--price {bad[0]}={by_name[bad[0]]}: a price is above 0, in USD per GPU-hour")
    if missing := [gpu for gpu in gpus if by_name and gpu not in by_name]:
        raise BadInput(f"no price for {missing[0]}; add --price '{missing[0]}=USD_PER_GPU_HOUR'")
    return by_name


def usd_per_million_tokens(usd_per_hour: float, tokens_per_s: float) -> float | None:
    """USD per million tokens of a replica that costs `usd_per_hour`; None where it makes no tokens."""
    return usd_per_hour / 3600 / tokens_per_s * 1e6 if tokens_per_s > 0 else None
