"""The decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3) and its mixtures of experts (Mixtral,
Qwen3-MoE) over a paged KV cache.

Tokens of all requests lie one after another; attention is the only place that knows whose they are, and it
is given as a function of (layer, qkv, turn).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pagecast.engine import ops
from pagecast.engine.layers import (
    ColumnLinear,
    Embedding,
    ExpertColumns,
    ExpertRouter,
    ExpertRows,
    Norm,
    RowLinear,
)
from pagecast.engine.shard import WHOLE, Shard
from pagecast.engine.spec import ModelSpec
from pagecast.sim.machine.model_facts import Moe
from torch import Tensor, nn

# Folded norms were measured to be faster in steps of Qwen3-8B with so many tokens, not in smaller ones.
_LEAST_FOLDED_TOKENS = 97

Attend = Callable[[int, Tensor, ops.Turn], Tensor]
"""(layer, qkv [tokens, heads + 2 * kv heads, head_dim], turn of q and k) to [tokens, heads, head_dim]."""


class Attention(nn.Module):
    """Projections, norms and rotation around the attention that is given."""

    def __init__(self, spec: ModelSpec, layer: int, shard: Shard) -> None:
        super().__init__()
        a, hidden = spec.facts.attention, spec.facts.hidden
        self.layer, self.eps = layer, spec.norm_eps
        self.heads, self.head_dim = a.heads // shard.size, a.head_dim
        self.kv_heads = spec.facts.local_kv_heads(shard.size)
        widths = (a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim)
        units = (a.heads, a.kv_heads, a.kv_heads)
        self.qkv = ColumnLinear(hidden, widths, bias=a.qkv_bias, shard=shard, units=units, fp8=spec.fp8)
        self.o = RowLinear(widths[0], hidden, bias=a.o_bias, shard=shard, fp8=spec.fp8)
        self.q_norm = Norm(a.head_dim) if a.qk_norm else None
        self.k_norm = Norm(a.head_dim) if a.qk_norm else None

    def forward(self, x: Tensor, angles: Tensor, attend: Attend, kept: Tensor | None) -> Tensor:
        """x [tokens, hidden] to the outputs of the tokens numbered `kept` (None: all), [kept, hidden]."""
        out = self._attended(x, angles, attend, normed=True)
        if kept is not None:
            out = out.index_select(0, kept)
        return self.o(out.flatten(1))

    def add_to(self, states: Tensor, angles: Tensor, attend: Attend) -> None:
        """Norms states [tokens, hidden], whose norm is folded, and adds the outputs to them in place."""
        out = self._attended(states, angles, attend, normed=False)
        self.o.add_to(states, out.flatten(1))

    def _attended(self, x: Tensor, angles: Tensor, attend: Attend, *, normed: bool) -> Tensor:
        """Attention's output for x [tokens, hidden] before the last projection."""
        qkv = self.qkv(x).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        turn = ops.Turn(angles, q_norm, k_norm, self.eps, states=None if normed else x)
        return attend(self.layer, qkv, turn)


class Mlp(nn.Module):
    """The gated MLP: gate and up are one product."""

    def __init__(self, spec: ModelSpec, shard: Shard) -> None:
        super().__init__()
        facts = spec.facts
        widths = (facts.intermediate, facts.intermediate)
        shared: Any = {"bias": facts.mlp_bias, "shard": shard, "fp8": spec.fp8}
        self.gate_up = ColumnLinear(facts.hidden, widths, **shared)
        self.down = RowLinear(facts.intermediate, facts.hidden, **shared)

    def forward(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """The gated MLP of each token: [tokens, hidden]."""
        return self.down(self.gate_up.gated(x))

    def add_to(self, states: Tensor, eps: float) -> None:
        """Norms states [tokens, hidden], whose norm is folded, and adds the outputs to them in place."""
        self.down.add_to(states, self.gate_up.gated(states, eps))


class Mixture(nn.Module):
    """A mixture of experts: each token goes through the few that its router prefers.

    Every shard has its share of each expert's width, or of the experts. `counts` is the kernels' workspace,
    zero between steps.
    """

    def __init__(self, spec: ModelSpec, moe: Moe, shard: Shard) -> None:
        super().__init__()
        hidden = spec.facts.hidden
        self.shard = shard
        self.active, self.normalised = moe.active, spec.mixtures.normalised
        self.router = ExpertRouter(hidden, moe.experts)
        self.gate_up = ExpertColumns(moe.experts, hidden, moe.intermediate, shard=shard, fp8=spec.fp8)
        self.down = ExpertRows(moe.experts, moe.intermediate, hidden, shard=shard, fp8=spec.fp8)
        here = len(self.down.weight)
        self.first = shard.rank * here if shard.by_expert else 0
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(here, dtype=torch.int32), persistent=False)

    def forward(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """The weighted sum of each token's experts: [tokens, hidden]."""
        up, down = self.gate_up, self.down
        scales = None if up.scales is None else (up.scales, down.scales)
        experts = ops.Experts(
            up.weight, down.weight, self.counts, self.active, self.normalised, self.first, scales
        )
        return self.shard.sum(ops.mixture(x, self.router(x), experts, slots))


class Layer(nn.Module):
    """Attention and MLP, each after a norm and added to what came before."""

    def __init__(self, spec: ModelSpec, layer: int, shard: Shard) -> None:
        super().__init__()
        self.eps = spec.norm_eps
        self.attention_norm = Norm(spec.facts.hidden)
        self.attention = Attention(spec, layer, shard)
        self.mlp_norm = Norm(spec.facts.hidden)
        moe = spec.facts.moe if layer in spec.mixtures.layers else None
        self.mlp = Mlp(spec, shard) if moe is None else Mixture(spec, moe, shard)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        angles: Tensor,
        attend: Attend,
        slots: Tensor | None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x and what is still to be added to it, so that the sum is part of the next norm.

        `kept` numbers the tokens that are needed after attention; None: all.
        """
        x, residual = ops.add_rms_norm(x, residual, self.attention_norm.weight, self.eps)
        x = self.attention(x, angles, attend, kept)
        if kept is not None:
            residual = residual.index_select(0, kept)
            slots = None if slots is None else slots.index_select(0, kept)
            if not len(kept):  # both are empty
                return residual, residual
        x, residual = ops.add_rms_norm(x, residual, self.mlp_norm.weight, self.eps)
        return self.mlp(x, slots), residual

    def add_to(self, states: Tensor, angles: Tensor, attend: Attend) -> None:
        """`forward` with folded norms: adds attention's and the MLP's outputs to states [tokens, hidden]."""
        assert isinstance(self.mlp, Mlp)
        self.attention.add_to(states, angles, attend)
        self.mlp.add_to(states, self.eps)

    def fold_norms(self) -> None:
        """Multiplies the norms' weights into the products that follow, and sets them to one."""
        assert isinstance(self.mlp, Mlp)
        for norm, product in (
            (self.attention_norm, self.attention.qkv),
            (self.mlp_norm, self.mlp.gate_up),
        ):
            product.weight.mul_(norm.weight)
            norm.weight.fill_(1.0)


class Decoder(nn.Module):
    """Tokens to final states, and these to logits. `weights.load` or `weights.randomise` fills it."""

    def __init__(self, spec: ModelSpec, shard: Shard = WHOLE) -> None:
        super().__init__()
        facts = spec.facts
        self.spec, self.shard = spec, shard
        self.folded = False
        self.embedding = Embedding(facts.vocab, facts.hidden, shard=shard)
        self.layers = nn.ModuleList(Layer(spec, i, shard) for i in range(facts.layers))
        self.norm = Norm(facts.hidden)
        self.head = self.embedding if facts.tied else Embedding(facts.vocab, facts.hidden, shard=shard)

    def forward(
        self,
        tokens: Tensor,
        angles: Tensor,
        attend: Attend,
        sampled: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Final states [rows, hidden] of the tokens numbered `sampled`, or of each of `tokens` [n].

        `angles` is float32 [n, head_dim], a row of the rotary table for each token. A token with a negative
        one of `slots` [n] is padding, which no expert computes.
        """
        x, residual = self.embedding(tokens), None
        *layers, last = self.layers
        if (
            self.folded
            and len(tokens) >= _LEAST_FOLDED_TOKENS
            and ops.by_library(x, last.attention.qkv.product)
        ):
            for layer in layers:
                layer.add_to(x, angles, attend)
        else:
            for layer in layers:
                x, residual = layer(x, residual, angles, attend, slots)
        x, residual = last(x, residual, angles, attend, slots, sampled)
        return ops.add_rms_norm(x, residual, self.norm.weight, self.spec.norm_eps)[0]

    @torch.inference_mode()
    def fold_norms(self) -> None:
        """Folds norms into the products that follow, where these have no bias, shards or fp8 weights.

        A norm divides a token by its root mean square and multiplies it by a weight. The weight becomes part
        of the product. The division comes after it, with the next operation, as each number of a token is
        divided by the same. So a product reads what has been added up so far, and the next product adds to
        it: no kernel is needed between them for a norm or a sum. fp16 could overflow before the division.
        """
        a, facts = self.spec.facts.attention, self.spec.facts
        biases = a.qkv_bias or a.o_bias or facts.mlp_bias
        whole = self.shard.size == 1 and self.spec.fp8 is None and facts.moe is None
        if biases or not whole or self.dtype == torch.float16:
            return
        self.folded = True
        for layer in self.layers:
            layer.fold_norms()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that activations have."""
        return self.embedding.weight.dtype

    def logits(self, states: Tensor) -> Tensor:
        """Final states [rows, hidden] to this shard's columns of the logits, [rows, vocab / shards]."""
        return ops.linear(states, self.head.product)
