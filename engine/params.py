"""Sampling parameters of a request, and the conditions that end it."""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.core.errors import BadInput


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Temperature, then the `top_k` likeliest tokens (0: all), then the fewest with `top_p` together.

    `temperature` 0 takes the likeliest token. `seed`: the same seed and prompt give the same text, in
    whatever company (None: a new one each time). `n` texts are made from one prompt. `max_tokens` None:
    as many as the model's length allows. A text ends at the model's end token, unless `ignore_eos`, and
    at any of `stop_token_ids`.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def check(self) -> None:
        """Errors: BadInput naming the first field that is out of range."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadInput(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise BadInput(f"temperature is {self.temperature}; it must be a finite number of at least 0")
        if self.top_k < 0:
            raise BadInput(f"top_k is {self.top_k}; it must be at least 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p is {self.top_p}; it must lie above 0 and at most 1")
        if self.n < 1:
            raise BadInput(f"n is {self.n}; it must be at least 1")

    @property
    def filtered(self) -> bool:
        """Whether some tokens are ruled out before one is drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)
