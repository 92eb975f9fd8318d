"""Matrices of a model's layers: whole, and as one GPU of several runs them."""

from __future__ import annotations

from typing import NamedTuple


class Linear(NamedTuple):
    """One matrix product of `layers` layers as one GPU runs it: inputs x outputs, `experts` of them.

    `active` experts run for a token (1 of 1 for an ordinary product).
    """

    name: str
    inputs: int
    outputs: int
    layers: int
    experts: int = 1
    active: int = 1

    @property
    def params(self) -> int:
        """Number of weights, over all experts and layers."""
        return self.inputs * self.outputs * self.experts * self.layers


class Matrix(NamedTuple):
    """One matrix of `layers` layers. `split`: what tensor parallelism divides, "outputs", "inputs", or ""."""

    name: str
    inputs: int
    outputs: int
    layers: int
    split: str = ""

    def on_one_of(self, tensor_parallel_size: int) -> Linear:
        """The part that one of so many GPUs holds."""
        inputs, outputs = self.inputs, self.outputs
        if self.split == "outputs":
            outputs = -(-outputs // tensor_parallel_size)
        elif self.split == "inputs":
            inputs = -(-inputs // tensor_parallel_size)
        return Linear(self.name, inputs, outputs, self.layers)
