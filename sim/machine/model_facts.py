"""Facts of a model, and the arithmetic on them: parameters, bytes, KV per token, FLOPs.

A `ModelFacts` describes the text decoder of one transformer. Everything else is derived from it: the
list of its matrix products for any tensor-parallel size, the exact parameter count, what its weights and
its KV cache take, and how much arithmetic a token costs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import KvKind
from pagecast.sim.machine.recurrent import RecurrentLayers

# Bits a stored weight takes, scales and zero points included (group of 128 for int4; blocks of 128 x 128
# for fp8; OCP microscaling formats for mxfp4; 16-value blocks for nvfp4).
WEIGHT_BITS = {
    "fp32": 32.0,
    "bf16": 16.0,
    "fp16": 16.0,
    "fp8": 8.002,
    "int8": 8.002,
    "int4": 4.156,
    "mxfp4": 4.25,
    "nvfp4": 4.5,
}
_KV_BYTES = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "bfloat16": 2,
    "float16": 2,
    "float": 4,
    "float32": 4,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "int8": 1,
    "fp8_per_token_head": 1,
    "int8_per_token_head": 1,
}
# What a token's keys and values of one head have beside them in these dtypes: two scales of 4 bytes.
_SCALED = ("fp8_per_token_head", "int8_per_token_head")
_SCALE_BYTES = 8
_VOCAB_STEP = 64  # engines pad the vocabulary to a multiple of this, and split it evenly


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention: one latent and one rotary key per token, shared by all heads."""

    kv_lora_rank: int
    rope_dim: int
    nope_dim: int
    q_lora_rank: int | None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and what hangs on them; `windows` has one entry per layer, 0 for full attention."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    windows: tuple[int, ...]
    chunked: bool = False  # the windows are chunks: a token attends to those of its own chunk
    gated: bool = False  # queries come with a gate of the same width for the output
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str = ""  # "head": over one head's width; "full": over all heads'
    sinks: bool = False
    mla: Mla | None = None


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts in `layers` of the layers; a shared expert runs for every token."""

    layers: int
    experts: int
    active: int
    intermediate: int
    shared_intermediate: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False


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


class KvGroup(NamedTuple):
    """Layers that keep the same tokens: `window` 0 keeps all of them, otherwise the newest `window`.

    Of kind `CHUNK` they keep those of the current chunk of `window` tokens.
    """

    window: int
    layers: int
    elements_per_token: int  # of one layer, on one GPU
    kind: KvKind = KvKind.FULL


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A transformer's text decoder. Sizes in elements; `weight_dtype` is how its matrices are stored."""

    name: str
    model_type: str
    hidden: int
    layers: int
    vocab: int
    intermediate: int
    attention: AttentionShape
    tied: bool
    max_position: int
    gated: bool = True
    mlp_bias: bool = False
    norms_per_layer: int = 2
    norm_bias: bool = False
    learned_positions: int = 0
    moe: Moe | None = None
    recurrent: RecurrentLayers | None = None
    dtype: str = "bf16"
    weight_dtype: str = "bf16"
    quantized: str = "all"  # "all" matrices but embedding and head, or "experts" only
    notes: tuple[str, ...] = ()

    # -- parameters ------------------------------------------------------------------------------

    def linears(self, tensor_parallel_size: int = 1) -> tuple[Linear, ...]:
        """The decoder layers' matrix products as one of `tensor_parallel_size` GPUs runs them."""
        tp = tensor_parallel_size
        self.check_tensor_parallel(tp)
        return (*self._attention_linears(tp), *self._recurrent_linears(tp), *self._mlp_linears(tp))

    def _recurrent_linears(self, tp: int) -> list[Linear]:
        r, h = self.recurrent, self.hidden
        if r is None:
            return []
        return [
            Linear("recurrent_in", h, (2 * r.keys + 2 * r.values) // tp, r.layers),
            Linear("recurrent_gates", h, 2 * r.value_heads // tp, r.layers),
            Linear("recurrent_out", r.values // tp, h, r.layers),
        ]

    def _attention_linears(self, tp: int) -> list[Linear]:
        a, h, n = self.attention, self.hidden, len(self.attention.windows)
        heads = a.heads // tp
        o = Linear("o", heads * a.v_head_dim, h, n)
        if a.mla is None:
            kv = self.local_kv_heads(tp) * (a.head_dim + a.v_head_dim)
            return [Linear("qkv", h, heads * a.head_dim * (2 if a.gated else 1) + kv, n), o]
        m = a.mla
        q_width = heads * (m.nope_dim + m.rope_dim)
        kv_a = Linear("kv_a", h, m.kv_lora_rank + m.rope_dim, n)
        kv_b = Linear("kv_b", m.kv_lora_rank, heads * (m.nope_dim + a.v_head_dim), n)
        if m.q_lora_rank is None:
            return [Linear("q", h, q_width, n), kv_a, kv_b, o]
        return [Linear("q_a", h, m.q_lora_rank, n), Linear("q_b", m.q_lora_rank, q_width, n), kv_a, kv_b, o]

    def _mlp_linears(self, tp: int) -> list[Linear]:
        h, twice = self.hidden, 2 if self.gated else 1
        moe = self.moe
        dense = self.layers - (moe.layers if moe else 0)
        layers: list[Linear] = []
        if dense:
            layers.append(Linear("up", h, twice * self.intermediate // tp, dense))
            layers.append(Linear("down", self.intermediate // tp, h, dense))
        if moe:
            layers.append(Linear("router", h, moe.experts, moe.layers))
            width = -(-moe.intermediate // tp)
            layers.append(Linear("expert_up", h, twice * width, moe.layers, moe.experts, moe.active))
            layers.append(Linear("expert_down", width, h, moe.layers, moe.experts, moe.active))
            if moe.shared_intermediate:
                shared = moe.shared_intermediate // tp
                layers.append(Linear("shared_up", h, twice * shared, moe.layers))
                layers.append(Linear("shared_down", shared, h, moe.layers))
        return layers

    def small_params(self) -> int:
        """Norms, biases, router corrections and sinks: what is in no matrix product."""
        a, h, moe = self.attention, self.hidden, self.moe
        norm = h * (2 if self.norm_bias else 1)
        layer = 0
        q_width, kv_width = a.heads * a.head_dim, a.kv_heads * a.head_dim
        if a.mla:
            layer += a.mla.kv_lora_rank + (a.mla.q_lora_rank or 0)
        elif a.qkv_bias:
            layer += q_width + kv_width + a.kv_heads * a.v_head_dim
        layer += h if a.o_bias else 0
        layer += {"": 0, "head": 2 * a.head_dim, "full": q_width + kv_width}[a.qk_norm]
        layer += a.heads if a.sinks else 0
        total = layer * len(a.windows) + self.norms_per_layer * norm * self.layers + norm
        if self.recurrent:
            total += self.recurrent.layers * self.recurrent.small_params()
        twice = 2 if self.gated else 1
        if self.mlp_bias:
            total += (self.layers - (moe.layers if moe else 0)) * (twice * self.intermediate + h)
        if moe:
            total += moe.layers * (moe.experts if moe.router_bias else 0)
            total += moe.layers * (h if moe.shared_gate else 0)
            if moe.expert_bias:
                total += moe.layers * moe.experts * (twice * moe.intermediate + h)
        return total

    @property
    def embedding_params(self) -> int:
        """Parameters of the token embedding and of learned positions."""
        return self.vocab * self.hidden + self.learned_positions * self.hidden

    @property
    def head_params(self) -> int:
        """The output projection's own parameters: none if it is the embedding."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All parameters of the text decoder, exact."""
        matrices = sum(linear.params for linear in self.linears())
        return self.embedding_params + self.head_params + matrices + self.small_params()

    @property
    def active_params(self) -> int:
        """Parameters that one token touches: of the routed experts only those it is sent to."""
        idle = sum(ln.params * (ln.experts - ln.active) // ln.experts for ln in self.linears())
        return self.params - idle

    def weight_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Bytes of the weights on one GPU. Vocabulary matrices are split too; norms are on every GPU."""
        tp = tensor_parallel_size
        bits = sum(self.linear_bits(ln) * ln.params for ln in self.linears(tp))
        vocab = -(-self.vocab // tp) * self.hidden
        plain = vocab * (1 if self.tied else 2) + self.learned_positions * self.hidden + self.small_params()
        return int(bits / 8) + plain * self.dtype_bytes

    def linear_bits(self, linear: Linear) -> float:
        """Bits a weight of `linear` is stored in."""
        whole = self.quantized == "all" or linear.name.startswith("expert_")
        if linear.name == "router" or not whole:
            return 8.0 * self.dtype_bytes
        return WEIGHT_BITS[self.weight_dtype]

    @property
    def dtype_bytes(self) -> int:
        """Bytes per value of the model's own dtype."""
        return 4 if self.dtype == "fp32" else 2

    # -- the KV cache ----------------------------------------------------------------------------

    def local_kv_heads(self, tensor_parallel_size: int) -> int:
        """KV heads on one GPU: replicated where there are more GPUs than heads."""
        return max(1, self.attention.kv_heads // tensor_parallel_size)

    def kv_groups(self, tensor_parallel_size: int = 1, kv_cache_dtype: str = "auto") -> tuple[KvGroup, ...]:
        """Layers by what they keep, in the order of their first layers. MLA keeps one latent on every GPU.

        With scales for each token and head, these count as elements of one byte.
        """
        a = self.attention
        if a.mla:
            elements = a.mla.kv_lora_rank + a.mla.rope_dim
        else:
            scales = _SCALE_BYTES if kv_cache_dtype.lower() in _SCALED else 0
            elements = self.local_kv_heads(tensor_parallel_size) * (a.head_dim + a.v_head_dim + scales)
        counts = Counter(a.windows)
        return tuple(KvGroup(window, n, elements, self._kv_kind(window)) for window, n in counts.items())

    def _kv_kind(self, window: int) -> KvKind:
        if window:
            return KvKind.CHUNK if self.attention.chunked else KvKind.WINDOW
        return KvKind.LATENT if self.attention.mla else KvKind.FULL

    def kv_bytes_per_token(self, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
        """Bytes that one token adds to every layer's KV cache on one GPU, while within all windows."""
        size = self.kv_element_bytes(kv_cache_dtype)
        groups = self.kv_groups(tensor_parallel_size, kv_cache_dtype)
        return sum(g.layers * g.elements_per_token for g in groups) * size

    def kv_bytes_of_sequence(
        self, tokens: int, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1
    ) -> int:
        """Bytes of KV and states that a sequence of `tokens` needs at least.

        Windowed layers keep their window.
        """
        size = self.kv_element_bytes(kv_cache_dtype)
        return self.state_bytes(tensor_parallel_size) + size * sum(
            g.layers * g.elements_per_token * (min(tokens, g.window) if g.window else tokens)
            for g in self.kv_groups(tensor_parallel_size, kv_cache_dtype)
        )

    def state_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Bytes of one sequence's recurrent states on one GPU, in all layers."""
        r = self.recurrent
        return r.layers * r.state_elements(tensor_parallel_size) * self.dtype_bytes if r else 0

    def kv_element_bytes(self, kv_cache_dtype: str = "auto") -> int:
        """Bytes of one stored KV element; `auto` is the model's own dtype."""
        if kv_cache_dtype == "auto":
            return self.dtype_bytes
        size = _KV_BYTES.get(kv_cache_dtype.lower())
        if size is None:
            raise BadInput(
                f"kv_cache_dtype {kv_cache_dtype!r} is unknown; use auto, bf16, fp16, fp8, int8, "
                "fp8_per_token_head or int8_per_token_head"
            )
        return size

    # -- arithmetic ------------------------------------------------------------------------------

    def matmul_flops_per_token(self) -> int:
        """FLOPs of the decoder layers' matrix products for one token (2 a weight; active experts only)."""
        return sum(2 * ln.inputs * ln.outputs * ln.active * ln.layers for ln in self.linears())

    def attention_flops(self, tokens: int, context: int) -> int:
        """FLOPs of causal attention for a chunk of `tokens` over `context` earlier tokens, all layers."""
        counts = Counter(self.attention.windows)
        pairs = sum(n * attended_pairs(tokens, context, window) for window, n in counts.items())
        return self.attention_pair_flops() * pairs

    def attention_pair_flops(self) -> int:
        """FLOPs of one (query, key) pair in all heads of a layer: 2 per dimension of keys and of values."""
        a = self.attention
        return 2 * a.heads * (a.head_dim + a.v_head_dim)

    def check_tensor_parallel(self, tensor_parallel_size: int) -> None:
        """Errors: `BadInput` where the heads can't be divided among that many GPUs."""
        tp, a = tensor_parallel_size, self.attention
        if tp < 1 or a.heads % tp:
            raise BadInput(
                f"tensor_parallel_size {tp} does not divide the {a.heads} attention heads of {self.name}"
            )
        if a.mla is None and a.kv_heads % tp and tp % a.kv_heads:
            raise BadInput(
                f"tensor_parallel_size {tp} neither divides nor is a multiple of the {a.kv_heads} KV heads "
                f"of {self.name}"
            )
        if -(-self.vocab // _VOCAB_STEP) * _VOCAB_STEP % tp:
            raise BadInput(
                f"tensor_parallel_size {tp} does not divide the vocabulary of {self.name}, which has "
                f"{self.vocab} tokens and is padded to a multiple of {_VOCAB_STEP}"
            )


def attended_pairs(tokens: int, context: int, window: int = 0) -> int:
    """Pairs of (query, key) in a causal chunk of `tokens` after `context` tokens; window 0 is none."""
    if not window:
        return tokens * context + tokens * (tokens + 1) // 2
    free = max(0, min(tokens, window - context))  # queries that still see everything before them
    return free * context + free * (free + 1) // 2 + (tokens - free) * window
