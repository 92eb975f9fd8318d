"""Layers split among GPUs (tensor parallelism), with neighbouring projections fused into one product.

A `ColumnLinear` splits its outputs among the GPUs. A `RowLinear` splits its inputs and sums the partial
results. A step needs one sum per attention, one per MLP and one for the embedding. With one GPU nothing is
split or summed. `load` takes a whole tensor, of the shape that `shape` gives, and stores this GPU's share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pagecast.engine import ops
from pagecast.engine.fp8_weights import GROUP, Fp8Weights, stored_parts, weight_of
from pagecast.engine.ops import Product
from pagecast.engine.shard import WHOLE, Shard
from torch import Tensor, nn


def fill(target: Tensor, value: Tensor) -> None:
    """Copies `value` over `target`. Errors: ValueError where their shapes differ."""
    if target.shape != value.shape:
        raise ValueError(f"needs shape {tuple(target.shape)}, has {tuple(value.shape)}")
    target.copy_(value)


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter that is never trained."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class ColumnLinear(nn.Module):
    """Several projections of one input as one product; each one's outputs are split among the shards.

    `units`: the most parts that each projection's outputs can be split into (its heads; 0: any number). With
    more shards than that, several hold the same part.
    """

    def __init__(
        self,
        inputs: int,
        outputs: Sequence[int],
        *,
        bias: bool,
        shard: Shard = WHOLE,
        units: Sequence[int] | None = None,
        fp8: Fp8Weights | None = None,
    ) -> None:
        super().__init__()
        self.shard = shard
        self.inputs = inputs
        self.outputs = tuple(outputs)
        self._copies = [shard.copies(n) if n else 1 for n in units or [0] * len(self.outputs)]
        pairs = zip(self.outputs, self._copies, strict=True)
        self._widths = [whole * copies // shard.size for whole, copies in pairs]
        self.weight, self.scales = weight_of(self._widths, inputs, fp8)
        self.bias = parameter(sum(self._widths)) if bias else None

    def shape(self, part: int, name: str) -> tuple[int, ...]:
        """The whole parameter `name` of projection number `part`."""
        return (self.outputs[part], self.inputs) if name == "weight" else (self.outputs[part],)

    def load(self, part: int, name: str, value: Tensor) -> None:
        """Fills in this shard's rows of projection number `part` of the parameter `name`.

        Where the layer is fp8 and the given weight is not, the weight is quantised here.
        """
        if name == "bias":
            self._load(getattr(self, name), part, value, 1)
            return
        parts = stored_parts(name, value, self.outputs[part], self.inputs, self.weight, self.scales)
        for kind, (tensor, rows) in parts.items():
            self._load(getattr(self, kind), part, tensor, rows)

    def _load(self, parameter: Tensor, part: int, value: Tensor, rows: int) -> None:
        """Fills in a parameter that has one row for each `rows` outputs."""
        first, width = sum(self._widths[:part]) // rows, self._widths[part] // rows
        share = self.shard.share(value, 0, self.outputs[part] // rows, self._copies[part])
        fill(parameter[first : first + width], share)

    @property
    def product(self) -> Product:
        """What inputs are multiplied by on this GPU."""
        return Product(self.weight, self.scales, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """This GPU's share of the output columns: [tokens, columns / GPUs]."""
        return ops.linear(x, self.product)

    def gated(self, x: Tensor, eps: float | None = None) -> Tensor:
        """silu of the first projection times the second: this GPU's share, [tokens, width / GPUs].

        With `eps`, x are states whose norm is folded.
        """
        return ops.gated_linear(x, self.product, eps)


class RowLinear(nn.Module):
    """A projection whose inputs are split among the shards; the results are added up."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        shard: Shard = WHOLE,
        fp8: Fp8Weights | None = None,
    ) -> None:
        super().__init__()
        self.shard = shard
        self.inputs, self.outputs = inputs, outputs
        self.weight, self.scales = weight_of([outputs], inputs // shard.size, fp8)
        self.bias = parameter(outputs) if bias else None

    def shape(self, part: int, name: str) -> tuple[int, ...]:
        """The whole parameter `name`."""
        return (self.outputs, self.inputs) if name == "weight" else (self.outputs,)

    def load(self, part: int, name: str, value: Tensor) -> None:
        """Fills in this shard's columns of the weight, or the bias, which only the first shard adds."""
        if name == "bias":
            assert self.bias is not None
            fill(self.bias, value if self.shard.rank == 0 else torch.zeros_like(value))
            return
        parts = stored_parts(name, value, self.outputs, self.inputs, self.weight, self.scales)
        for kind, (tensor, _) in parts.items():
            fill(getattr(self, kind), self.shard.share(tensor, 1, _columns(kind, self.inputs)))

    @property
    def product(self) -> Product:
        """What inputs are multiplied by on this GPU."""
        return Product(self.weight, self.scales, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The whole product, summed over the GPUs: [tokens, columns], or as `ops.linear_sums` leaves it."""
        if self.shard.link is None:
            return ops.linear_sums(x, self.product)
        return self.shard.sum(ops.linear(x, self.product))

    def add_to(self, states: Tensor, x: Tensor) -> None:
        """Adds the product to `states` [tokens, columns] in place; on one GPU, without scales and bias."""
        ops.add_linear(states, x, self.product)


class ExpertColumns(nn.Module):
    """The gate and up projections of several experts, fused per expert.

    A shard holds a part of each expert's width or, with expert parallelism, some experts whole.
    """

    def __init__(
        self, experts: int, inputs: int, width: int, *, shard: Shard = WHOLE, fp8: Fp8Weights | None = None
    ) -> None:
        super().__init__()
        self.inputs, self.width = inputs, width
        self.shard, count = _shared_experts(experts, shard)
        own = width // self.shard.size
        self.weight, self.scales = weight_of([own, own], inputs, fp8, count)

    def shape(self, part: int, name: str) -> tuple[int, ...]:
        """One expert's whole projection."""
        return self.width, self.inputs

    def load(self, part: int, name: str, value: Tensor) -> None:
        """Fills in this shard's rows of one of its experts. `part` is twice the expert's number on this
        shard, plus one for the up projection."""
        expert, second = divmod(part, 2)
        parts = stored_parts(name, value, self.width, self.inputs, self.weight, self.scales)
        for kind, (tensor, rows) in parts.items():
            own = self.width // self.shard.size // rows
            target = getattr(self, kind)[expert, second * own : (second + 1) * own]
            fill(target, self.shard.share(tensor, 0, self.width // rows))


class ExpertRows(nn.Module):
    """The down projections of several experts. The caller sums over the shards."""

    def __init__(
        self, experts: int, width: int, outputs: int, *, shard: Shard = WHOLE, fp8: Fp8Weights | None = None
    ) -> None:
        super().__init__()
        self.width, self.outputs = width, outputs
        self.shard, count = _shared_experts(experts, shard)
        self.weight, self.scales = weight_of([outputs], width // self.shard.size, fp8, count)

    def shape(self, part: int, name: str) -> tuple[int, ...]:
        """One expert's whole projection."""
        return self.outputs, self.width

    def load(self, part: int, name: str, value: Tensor) -> None:
        """Fills in this shard's columns of its expert number `part`."""
        parts = stored_parts(name, value, self.outputs, self.width, self.weight, self.scales)
        for kind, (tensor, _) in parts.items():
            fill(getattr(self, kind)[part], self.shard.share(tensor, 1, _columns(kind, self.width)))


def _columns(kind: str, inputs: int) -> int:
    """Columns of a projection's weight or of its scales."""
    return inputs if kind == "weight" else inputs // GROUP


def _shared_experts(experts: int, shard: Shard) -> tuple[Shard, int]:
    """The shard that splits an expert's width, and the number of experts on this GPU."""
    return (WHOLE, experts // shard.size) if shard.by_expert else (shard, experts)


class ExpertRouter(nn.Module):
    """Scores of the experts for each token, whole on every shard."""

    def __init__(self, inputs: int, experts: int) -> None:
        super().__init__()
        self.weight = parameter(experts, inputs)

    def shape(self, part: int, name: str) -> tuple[int, ...]:
        """The whole weight."""
        return tuple(self.weight.shape)

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

    def shape(self, part: int, name: str) -> tuple[int, ...]:
        """The whole weight."""
        return tuple(self.weight.shape)

    def load(self, part: int, name: str, value: Tensor) -> None:
        """Fills in the weight."""
        fill(self.weight, value)


class Embedding(nn.Module):
    """Rows of a vocabulary, shared out among the shards; also the output projection.

    All shards have the same number of rows. This one uses `used` of them, for the tokens from `first` on.
    """

    def __init__(self, vocab: int, width: int, *, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.shard, self.vocab, self.width = shard, vocab, width
        self.first, self.used, _ = shard.part(vocab)
        self.weight = parameter(-(-vocab // shard.size), width)

    def shape(self, part: int, name: str) -> tuple[int, ...]:
        """The whole weight."""
        return self.vocab, self.width

    def load(self, part: int, name: str, value: Tensor) -> None:
        """Fills in this shard's rows of the weight."""
        if tuple(value.shape) != self.shape(part, name):
            raise ValueError(f"needs shape {self.shape(part, name)}, has {tuple(value.shape)}")
        self.weight[self.used :] = 0
        fill(self.weight[: self.used], value[self.first : self.first + self.used])

    @property
    def product(self) -> Product:
        """What final states are multiplied by."""
        return Product(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of token ids: [tokens, hidden]."""
        if self.shard.size == 1 and not tokens.is_cuda:
            return F.embedding(tokens, self.weight)
        return self.shard.sum(ops.embed_share(tokens, self.weight, self.first))
