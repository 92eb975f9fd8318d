"""Share of a model that one of several GPUs holds, and its link to the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.model_facts import ModelFacts
from torch import Tensor


class Collectives(Protocol):
    """Collective operations: every GPU calls them in the same order, with tensors of one shape."""

    kind: str
    """What carries them: `peer` (own kernels over peer memory), `nccl` or `gloo`."""

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of every GPU's `partial`, the same bits everywhere; may overwrite it."""
        ...

    def gather(self, own: Tensor) -> Tensor:
        """Every GPU's `own`, in order: [GPUs, *own.shape]."""
        ...

    def least(self, value: int) -> int:
        """The least of every GPU's `value`."""
        ...

    def abort(self) -> None:
        """Ends operations under way, here, whatever the other GPUs do; the link is of no more use."""
        ...

    def close(self) -> None:
        """Lets go of the group."""
        ...


class VocabPart(NamedTuple):
    """Tokens whose logits are on one GPU: `used` of `vocab`, from number `first` on."""

    first: int
    used: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Which share of the layers is here, number `rank` of `size`. `by_expert`: experts are shared whole."""

    rank: int = 0
    size: int = 1
    link: Collectives | None = None
    by_expert: bool = False

    @property
    def kind(self) -> str | None:
        """The link that carries sums of partial results; None: there are none."""
        return None if self.link is None else self.link.kind

    def share(self, value: Tensor, dim: int, whole: int, copies: int = 1) -> Tensor:
        """The part that this share holds of dimension `dim` of `value`, whose length is `whole`.

        Neighbouring shares hold the same part, `copies` of them. Errors: ValueError for another length.
        """
        if value.shape[dim] != whole:
            raise ValueError(f"needs {whole} in dimension {dim}, has shape {tuple(value.shape)}")
        part = whole * copies // self.size
        return value.narrow(dim, self.rank // copies * part, part)

    def copies(self, units: int) -> int:
        """How many shares hold the same of `units` parts that can't be divided (heads)."""
        return max(1, self.size // units)

    def part(self, vocab: int) -> VocabPart:
        """This share of a vocabulary: every share has as many tokens, save the last."""
        rows = -(-vocab // self.size)
        return VocabPart(self.rank * rows, min(rows, vocab - self.rank * rows), vocab)

    def sum(self, partial: Tensor) -> Tensor:
        """Adds up every share's partial result."""
        return partial if self.link is None else self.link.sum(partial)

    def gather(self, own: Tensor) -> Tensor:
        """Every share's `own`: [size, *own.shape]."""
        return own[None] if self.link is None else self.link.gather(own)

    def least(self, value: int) -> int:
        """The least of every share's `value`."""
        return value if self.link is None else self.link.least(value)


WHOLE = Shard()


def check_shards(facts: ModelFacts, size: int, *, by_expert: bool) -> None:
    """Errors: BadInput where the model's layers can't be divided among `size` GPUs."""
    facts.check_tensor_parallel(size)
    moe = facts.moe
    widths = {"intermediate_size": facts.intermediate} if moe is None or moe.layers < facts.layers else {}
    if moe is not None:
        widths |= {"num_experts": moe.experts} if by_expert else {"moe_intermediate_size": moe.intermediate}
    for name, width in widths.items():
        if width % size:
            raise BadInput(f"tensor_parallel_size {size} does not divide {name} {width} of {facts.name}")
