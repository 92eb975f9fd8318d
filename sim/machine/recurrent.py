"""Recurrent layers: gated delta-rule attention, which keeps a state of fixed size instead of a KV cache.

A layer's state has two parts: the last inputs of its convolution, and a matrix of keys by values per head.

Source: Qwen3-Next's modelling code; vllm/model_executor/layers/mamba/mamba_utils.py (0.24).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """`layers` recurrent layers. `key_dim` and `value_dim` are per head; `kernel` is the convolution's width.

    `leads`: the model's first layer is one of them.
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    leads: bool = True

    @property
    def keys(self) -> int:
        """Width of all heads' keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all heads' values."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    def small_params(self) -> int:
        """Of one layer: the convolution, decay and step of each head, and the norm over a head's values."""
        return self.convolved * self.kernel + 2 * self.value_heads + self.value_dim

    def state_elements(self, tensor_parallel_size: int = 1) -> int:
        """Elements of one sequence's state in one layer, on one of so many GPUs."""
        tp = tensor_parallel_size
        convolution = self.convolved // tp * (self.kernel - 1)
        return convolution + self.value_heads // tp * self.key_dim * self.value_dim
