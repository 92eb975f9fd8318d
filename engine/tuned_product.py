"""A matrix product whose algorithm was chosen by timing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pagecast.kernels.cublas_lt import Algorithm, cublas_lt, takes
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TunedProduct:
    """The algorithm of cuBLASLt for products of at least `least` tokens with weights of one shape."""

    least: int
    algorithm: Algorithm

    def multiply(self, x: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor | None:
        """x [tokens, inputs] times the transposed weight [outputs, inputs], added to `onto` where that is
        given; None where the product is left to the caller."""
        if len(x) < self.least or not takes(x, weight):
            return None
        out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device) if onto is None else onto
        done = cublas_lt(x.device).multiply(self.algorithm, x, weight, out, add=onto is not None)
        return out if done else None
