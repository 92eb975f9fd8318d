"""The decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3) over a paged KV cache.

Tokens of all requests lie one after another; attention is the only place that knows whose they are, and it
is given as a function of (layer, qkv, turn).
"""

from __future__ import annotations

from collections.abc import Callable

from pagecast.engine import ops
from pagecast.engine.layers import WHOLE, ColumnLinear, Embedding, Norm, RowLinear, Shard
from pagecast.engine.spec import ModelSpec
from torch import Tensor, nn

Attend = Callable[[int, Tensor, ops.Turn], Tensor]
"""(layer, qkv [tokens, heads + 2 * kv heads, head_dim], turn of q and k) to [tokens, heads, head_dim]."""


class Attention(nn.Module):
    """Projections, norms and rotation around the attention that is given."""

    def __init__(self, spec: ModelSpec, layer: int, shard: Shard) -> None:
        super().__init__()
        a, hidden = spec.facts.attention, spec.facts.hidden
        self.layer, self.eps = layer, spec.norm_eps
        self.heads, self.kv_heads, self.head_dim = a.heads // shard.size, a.kv_heads // shard.size, a.head_dim
        widths = (a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim)
        self.qkv = ColumnLinear(hidden, widths, bias=a.qkv_bias, shard=shard)
        self.o = RowLinear(widths[0], hidden, bias=a.o_bias, shard=shard)
        self.q_norm = Norm(a.head_dim) if a.qk_norm else None
        self.k_norm = Norm(a.head_dim) if a.qk_norm else None

    def forward(self, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """x [tokens, hidden] to the same shape."""
        qkv = self.qkv(x).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        out = attend(self.layer, qkv, ops.Turn(angles, q_norm, k_norm, self.eps))
        return self.o(out.flatten(1))


class Mlp(nn.Module):
    """The gated MLP: gate and up are one product."""

    def __init__(self, spec: ModelSpec, shard: Shard) -> None:
        super().__init__()
        facts = spec.facts
        widths = (facts.intermediate, facts.intermediate)
        self.gate_up = ColumnLinear(facts.hidden, widths, bias=facts.mlp_bias, shard=shard)
        self.down = RowLinear(facts.intermediate, facts.hidden, bias=facts.mlp_bias, shard=shard)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(ops.silu_mul(self.gate_up(x)))


class Layer(nn.Module):
    """Attention and MLP, each after a norm and added to what came before."""

    def __init__(self, spec: ModelSpec, layer: int, shard: Shard) -> None:
        super().__init__()
        self.eps = spec.norm_eps
        self.attention_norm = Norm(spec.facts.hidden)
        self.attention = Attention(spec, layer, shard)
        self.mlp_norm = Norm(spec.facts.hidden)
        self.mlp = Mlp(spec, shard)

    def forward(
        self, x: Tensor, residual: Tensor | None, angles: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """x and what is still to be added to it, so that the sum is part of the next norm."""
        x, residual = ops.add_rms_norm(x, residual, self.attention_norm.weight, self.eps)
        x = self.attention(x, angles, attend)
        x, residual = ops.add_rms_norm(x, residual, self.mlp_norm.weight, self.eps)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Tokens to final states, and these to logits. `weights.load` or `weights.randomise` fills it."""

    def __init__(self, spec: ModelSpec, shard: Shard = WHOLE) -> None:
        super().__init__()
        facts = spec.facts
        self.spec = spec
        self.embedding = Embedding(facts.vocab, facts.hidden)
        self.layers = nn.ModuleList(Layer(spec, i, shard) for i in range(facts.layers))
        self.norm = Norm(facts.hidden)
        self.head = self.embedding if facts.tied else Embedding(facts.vocab, facts.hidden)

    def forward(
        self, tokens: Tensor, angles: Tensor, attend: Attend, sampled: Tensor | None = None
    ) -> Tensor:
        """Final states [rows, hidden] of the tokens numbered `sampled`, or of each of `tokens` [n].

        `angles` is float32 [n, head_dim], a row of the rotary table for each token.
        """
        x, residual = self.embedding(tokens), None
        for layer in self.layers:
            x, residual = layer(x, residual, angles, attend)
        assert residual is not None
        if sampled is not None:
            x, residual = x.index_select(0, sampled), residual.index_select(0, sampled)
        return ops.add_rms_norm(x, residual, self.norm.weight, self.spec.norm_eps)[0]

    def logits(self, states: Tensor) -> Tensor:
        """Final states [rows, hidden] to logits [rows, vocab]."""
        return nn.functional.linear(states, self.head.weight)
