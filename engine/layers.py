"""Layers that one of several GPUs holds a share of, with neighbouring projections fused into one product.

A `ColumnLinear` splits its outputs among the GPUs, a `RowLinear` its inputs, and adds the partial results
up: one sum for attention and one for the MLP is all that tensor parallelism costs. With one GPU a share
is everything, and nothing is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shard:
    """Which share of the layers is here: number `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def share(self, value: Tensor, dim: int, whole: int) -> Tensor:
        """What this share holds of dimension `dim` of `value`; `size` divides its length `whole`.

        Errors: ValueError where it has another length.
        """
        if value.shape[dim] != whole:
            raise ValueError(f"needs {whole} in dimension {dim}, has shape {tuple(value.shape)}")
        part = whole // self.size
        return value.narrow(dim, self.rank * part, part)

    def sum(self, partial: Tensor) -> Tensor:
        """Adds up every share's partial result."""
        if self.size > 1:
            torch.distributed.all_reduce(partial)
        return partial


WHOLE = Shard()


def fill(target: Tensor, value: Tensor) -> None:
    """Copies `value` over `target`. Errors: ValueError where their shapes differ."""
    if target.shape != value.shape:
        raise ValueError(f"needs shape {tuple(target.shape)}, has {tuple(value.shape)}")
    target.copy_(value)


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter that is never trained."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class ColumnLinear(nn.Module):
    """Several projections of one input as one product; each one's outputs are split among the shards."""

    def __init__(self, inputs: int, outputs: Sequence[int], *, bias: bool, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.shard = shard
        self.outputs = tuple(outputs)
        width = sum(outputs) // shard.size
        self.weight = parameter(width, inputs)
        self.bias = parameter(width) if bias else None

    def load(self, part: int, name: str, value: Tensor) -> None:
        """Fills in this shard's rows of projection number `part` of the parameter `name`."""
        whole = self.outputs[part]
        first = sum(self.outputs[:part]) // self.shard.size
        target = getattr(self, name)
        fill(target[first : first + whole // self.shard.size], self.shard.share(value, 0, whole))

    def forward(self, x: Tensor) -> Tensor:
        """This GPU's share of the output columns: [tokens, columns / GPUs]."""
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """A projection whose inputs are split among the shards; the results are added up."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.shard = shard
        self.inputs = inputs
        self.weight = parameter(outputs, inputs // shard.size)
        self.bias = parameter(outputs) if bias else None

    def load(self, part: int, name: str, value: Tensor) -> None:
        """Fills in this shard's columns of the weight, or the bias, which only the first shard adds."""
        if name == "bias":
            assert self.bias is not None
            fill(self.bias, value if self.shard.rank == 0 else torch.zeros_like(value))
            return
        fill(self.weight, self.shard.share(value, 1, self.inputs))

    def forward(self, x: Tensor) -> Tensor:
        """The whole product, summed over the GPUs: [tokens, columns]."""
        return self.shard.sum(F.linear(x, self.weight, self.bias))


class ExpertColumns(nn.Module):
    """`ColumnLinear` of two projections, the gate and what it gates, for each of several experts."""

    def __init__(self, experts: int, inputs: int, width: int, *, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.shard, self.width = shard, width
        self.weight = parameter(experts, 2 * (width // shard.size), inputs)

    def load(self, part: int, name: str, value: Tensor) -> None:
        """Fills in this shard's rows of one expert: `part` is twice its number, plus one for the second."""
        expert, second = divmod(part, 2)
        own = self.width // self.shard.size
        fill(self.weight[expert, second * own : (second + 1) * own], self.shard.share(value, 0, self.width))


class ExpertRows(nn.Module):
    """`RowLinear` for each of several experts; the sum over shards is left to what uses it."""

    def __init__(self, experts: int, width: int, outputs: int, *, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.shard, self.width = shard, width
        self.weight = parameter(experts, outputs, width // shard.size)

    def load(self, part: int, name: str, value: Tensor) -> None:
        """Fills in this shard's columns of expert number `part`."""
        fill(self.weight[part], self.shard.share(value, 1, self.width))


class Router(nn.Module):
    """Scores of the experts for each token, whole on every shard."""

    def __init__(self, inputs: int, experts: int) -> None:
        super().__init__()
        self.weight = parameter(experts, inputs)

    def load(self, part: int, name: str, value: Tensor) -> None:
        """Fills in the weight."""
        fill(self.weight, value)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the experts: [tokens, experts]."""
        return F.linear(x, self.weight)


class Norm(nn.Module):
    """The weight of an RMS norm, whole on every shard; the arithmetic is in `ops`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = parameter(width)

    def load(self, part: int, name: str, value: Tensor) -> None:
        """Fills in the weight."""
        fill(self.weight, value)


class Embedding(nn.Module):
    """Rows of a vocabulary, whole on every shard; also the output projection."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.weight = parameter(vocab, width)

    def load(self, part: int, name: str, value: Tensor) -> None:
        """Fills in the weight."""
        fill(self.weight, value)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of token ids: [tokens, hidden]."""
        return F.embedding(tokens, self.weight)
