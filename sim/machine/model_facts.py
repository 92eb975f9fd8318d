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
from pagecast.sim.machine.compressed import CompressedCaches
from pagecast.sim.machine.indexer import Indexer
from pagecast.sim.machine.matrix import Linear, Matrix
from pagecast.sim.machine.recurrent import RecurrentLayers

__all__ = ["AttentionShape", "KvGroup", "Linear", "Mla", "ModelFacts", "Moe", "attended_pairs"]

# Bits a stored weight takes, scales and zero points included (group of 128 for int4; blocks of 128 x 128
# for fp8; OCP microscaling formats for mxfp4; 16-value blocks for nvfp4).
WEIGHT_BITS = {
    "fp32": 32.0,
    "bf16": 16.0,
    "fp16": 16.0,
    "fp8": 8.002,
    "int8": 8.002,
    "int4": 4.156,
    "mxfp8": 8.25,
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
    "nvfp4": 1,
    "fp8_ds_mla": 1,
    "nvfp4_ds_mla": 1,
}
# What a token's keys and values of one head have beside them in these dtypes: two scales of 4 bytes.
_SCALED = ("fp8_per_token_head", "int8_per_token_head")
_SCALE_BYTES = 8
# A latent of 512 values with a rotary key of 64, packed: values of 8 or 4 bits, their scales, and the rotary
# key in 16 bits. (vllm/v1/attention/backends/mla/flashmla_sparse.py, 0.33)
_PACKED_LATENT_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_PACKED_LATENT, _PACKED_KEYS = 512, (64, 0)  # where there is no key its place stays empty
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
    head_gated: bool = False  # one gate for each head's output
    shared_kv: bool = False  # keys serve as values: there is no projection of values
    indexer: Indexer | None = None  # it chooses the tokens that a query attends to
    compressed: CompressedCaches | None = None  # caches of compressed tokens, in place of keys and values


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
    latent: int = 0  # width that experts work on, where it is not the hidden state's


class KvGroup(NamedTuple):
    """Layers that keep the same tokens: `window` 0 keeps all of them, otherwise the newest `window`.

    Of kind `CHUNK` they keep those of the current chunk of `window` tokens.
    """

    window: int
    layers: int
    elements_per_token: float  # of one layer, on one GPU
    kind: KvKind = KvKind.FULL
    index_bytes: float = 0.0  # of one token in all layers: keys of an indexer, and a draft model's KV
    pair_flops: int = 0  # of one (query, key) pair in one layer, all heads
    chosen: int = 0  # tokens that a query attends to at most in `sparse_layers` of the layers
    sparse_layers: int = 0
    score_flops: float = 0.0  # of one (query, key) pair in all indexers


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A transformer's text decoder, and the parameters of its towers. Sizes in elements.

    `weight_dtype` is how most of its matrices are stored; `weight_bits` has the bits of a weight by the name
    of the matrix, where a checkpoint's own description tells them. `kv_dtype`: the KV dtype that the
    checkpoint asks for ("auto": none). `checkpoint_bytes`: the checkpoint's size where its index says it.
    `untimed`: why steps can't be timed, if so. `draft_layers`: those that the checkpoint has beside for
    drafting, which engines load only then (`drafting`): with a window or without, with an ordinary MLP where
    `draft_dense`, in the model's own dtype where `draft_plain`. `draft_model`: a model that is loaded and
    cached beside this one.
    """

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
    more_attention: tuple[AttentionShape, ...] = ()  # layers with other heads than those of `attention`
    dense_layers: int | None = None  # with an ordinary MLP; None: those without experts
    more_matrices: tuple[Matrix, ...] = ()
    more_small: int = 0
    tower_params: int = 0
    dtype: str = "bf16"
    weight_dtype: str = "bf16"
    quantized: str = "all"  # "all" matrices but embedding and head, "experts" only, or "some" of them
    weight_bits: tuple[tuple[str, float], ...] = ()
    kv_dtype: str = "auto"
    checkpoint_bytes: int | None = None
    untimed: str = ""
    draft_layers: int = 0
    draft_window: bool = False
    draft_dense: bool = False
    draft_plain: bool = False
    draft_model: ModelFacts | None = None
    notes: tuple[str, ...] = ()

    # -- parameters ------------------------------------------------------------------------------

    def linears(self, tensor_parallel_size: int = 1) -> tuple[Linear, ...]:
        """The decoder layers' matrix products as one of `tensor_parallel_size` GPUs runs them."""
        tp = tensor_parallel_size
        self.check_tensor_parallel(tp)
        recurrent = self.recurrent.matrices if self.recurrent else ()
        return (
            *(linear for shape in self.attentions for linear in self._attention_linears(shape, tp)),
            *(matrix.on_one_of(tp) for matrix in (*recurrent, *self.more_matrices)),
            *self._mlp_linears(tp),
        )

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        """The shapes of attention, each with the layers that have it."""
        return (self.attention, *self.more_attention)

    def _attention_linears(self, a: AttentionShape, tp: int) -> list[Linear]:
        h, n = self.hidden, len(a.windows)
        if a.compressed:
            return [matrix.on_one_of(tp) for matrix in a.compressed.matrices]
        heads = a.heads // tp
        o = Linear("o", heads * a.v_head_dim, h, n)
        extra = [matrix.on_one_of(tp) for matrix in a.indexer.matrices] if a.indexer else []
        if a.head_gated:
            extra.append(Linear("head_gate", h, heads, n))
        if a.mla is None:
            kv_heads = local_heads(a.kv_heads, tp)
            kv = kv_heads * (a.head_dim + (0 if a.shared_kv else a.v_head_dim))
            queries = heads * (a.head_dim + (a.v_head_dim if a.gated else 0))
            return [Linear("qkv", h, queries + kv, n), o, *extra]
        m = a.mla
        q_width = heads * (m.nope_dim + m.rope_dim)
        kv_a = Linear("kv_a", h, m.kv_lora_rank + m.rope_dim, n)
        kv_b = Linear("kv_b", m.kv_lora_rank, heads * (m.nope_dim + a.v_head_dim), n)
        if a.gated:
            extra.append(Linear("gate", h, heads * a.v_head_dim, n))
        if m.q_lora_rank is None:
            return [Linear("q", h, q_width, n), kv_a, kv_b, o, *extra]
        q = [Linear("q_a", h, m.q_lora_rank, n), Linear("q_b", m.q_lora_rank, q_width, n)]
        return [*q, kv_a, kv_b, o, *extra]

    def _mlp_linears(self, tp: int) -> list[Linear]:
        h, twice = self.hidden, 2 if self.gated else 1
        moe = self.moe
        dense = self.dense_mlps
        layers: list[Linear] = []
        if dense:
            layers.append(Linear("up", h, twice * self.intermediate // tp, dense))
            layers.append(Linear("down", self.intermediate // tp, h, dense))
        if moe:
            layers.append(Linear("router", h, moe.experts, moe.layers))
            width, inner = -(-moe.intermediate // tp), moe.latent or h
            if moe.latent:
                layers.append(Linear("latent_in", h, inner, moe.layers))
                layers.append(Linear("latent_out", inner, h, moe.layers))
            layers.append(Linear("expert_up", inner, twice * width, moe.layers, moe.experts, moe.active))
            layers.append(Linear("expert_down", width, inner, moe.layers, moe.experts, moe.active))
            if moe.shared_intermediate:
                shared = moe.shared_intermediate // tp
                layers.append(Linear("shared_up", h, twice * shared, moe.layers))
                layers.append(Linear("shared_down", shared, h, moe.layers))
        return layers

    @property
    def dense_mlps(self) -> int:
        """Layers with an ordinary MLP."""
        if self.dense_layers is not None:
            return self.dense_layers
        return self.layers - (self.moe.layers if self.moe else 0)

    def small_params(self) -> int:
        """Norms, biases, router corrections and sinks: what is in no matrix product."""
        h, moe = self.hidden, self.moe
        norm = h * (2 if self.norm_bias else 1)
        total = sum(_small_of_attention(shape, h) * len(shape.windows) for shape in self.attentions)
        total += sum(a.indexer.small * a.indexer.layers for a in self.attentions if a.indexer)
        total += self.norms_per_layer * norm * self.layers + norm + self.more_small
        if self.recurrent:
            total += self.recurrent.layers * self.recurrent.small
        twice = 2 if self.gated else 1
        if self.mlp_bias:
            total += self.dense_mlps * (twice * self.intermediate + h)
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
        """All parameters: those of the text decoder are exact, those of towers are added."""
        matrices = sum(linear.params for linear in self.linears())
        vocabulary = self.embedding_params + self.head_params
        return vocabulary + matrices + self.small_params() + self.tower_params

    @property
    def active_params(self) -> int:
        """Parameters that a token of text touches: no towers, and of routed experts those it is sent to."""
        idle = sum(ln.params * (ln.experts - ln.active) // ln.experts for ln in self.linears())
        return self.params - idle - self.tower_params

    def weight_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Bytes of the weights on one GPU. Vocabulary matrices are split too; norms are on every GPU.

        Where the checkpoint's size is known, so that one GPU alone has all of it.
        """
        return self._counted_bytes(tensor_parallel_size) + self.uncounted_bytes // tensor_parallel_size

    @property
    def uncounted_bytes(self) -> int:
        """What the checkpoint has more than the matrices and vectors that are counted here, or less."""
        return 0 if self.checkpoint_bytes is None else self.checkpoint_bytes - self._counted_bytes(1)

    def _counted_bytes(self, tensor_parallel_size: int) -> int:
        tp = tensor_parallel_size
        bits = sum(self.linear_bits(ln) * ln.params for ln in self.linears(tp))
        vocab = -(-self.vocab // tp) * self.hidden
        plain = vocab * (1 if self.tied else 2) + self.learned_positions * self.hidden + self.small_params()
        return int(bits / 8) + (plain + -(-self.tower_params // tp)) * self.dtype_bytes

    def linear_bits(self, linear: Linear) -> float:
        """Bits a weight of `linear` is stored in."""
        if self.weight_bits:
            return dict(self.weight_bits).get(linear.name, 8.0 * self.dtype_bytes)
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
        return local_heads(self.attention.kv_heads, tensor_parallel_size)

    def kv_groups(self, tensor_parallel_size: int = 1, kv_cache_dtype: str = "auto") -> tuple[KvGroup, ...]:
        """Layers by what they keep, in the order of their first layers. MLA keeps one latent on every GPU.

        With scales beside the values, these count as elements of one byte.
        """
        dtype = self._kv_dtype(kv_cache_dtype)
        groups: list[KvGroup] = []
        for a in self.attentions:
            if a.compressed:
                groups += [
                    KvGroup(c.window, c.layers, c.token_bytes, c.kind)
                    for c in a.compressed.caches
                    if c.layers
                ]
                continue
            elements = _elements_of_token(a, dtype, tensor_parallel_size)
            for window, n in Counter(a.windows).items():
                group = KvGroup(window, n, elements, _kv_kind(a, window), pair_flops=_pair_flops(a))
                groups.append(_indexed(group, a.indexer))
        if self.draft_model is None:
            return tuple(groups)
        beside = self.draft_model.kv_bytes_per_token(kv_cache_dtype, tensor_parallel_size)
        full = next((i for i, group in enumerate(groups) if not group.window), 0)
        groups[full] = groups[full]._replace(index_bytes=groups[full].index_bytes + beside)
        return tuple(groups)

    def kv_bytes_per_token(self, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
        """Bytes that one token adds to every layer's cache on one GPU, while within all windows."""
        size = self.kv_element_bytes(kv_cache_dtype)
        groups = self.kv_groups(tensor_parallel_size, kv_cache_dtype)
        return round(sum(g.layers * g.elements_per_token * size + g.index_bytes for g in groups))

    def kv_bytes_of_sequence(
        self, tokens: int, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1
    ) -> int:
        """Bytes of KV and states that a sequence of `tokens` needs at least.

        Windowed layers keep their window.
        """
        size = self.kv_element_bytes(kv_cache_dtype)
        return self.state_bytes(tensor_parallel_size) + round(
            sum(
                (g.layers * g.elements_per_token * size + g.index_bytes)
                * (min(tokens, g.window) if g.window else tokens)
                for g in self.kv_groups(tensor_parallel_size, kv_cache_dtype)
            )
        )

    def state_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Bytes of one sequence's recurrent states on one GPU, in all layers."""
        r = self.recurrent
        return r.layers * r.bytes_of_state(tensor_parallel_size, self.dtype_bytes) if r else 0

    def kv_element_bytes(self, kv_cache_dtype: str = "auto") -> int:
        """Bytes of one stored KV element; `auto` is what the checkpoint asks for, or the model's dtype."""
        if self.attention.compressed:
            return 1  # its caches are counted in bytes
        dtype = self._kv_dtype(kv_cache_dtype)
        if dtype == "auto":
            return self.dtype_bytes
        size = _KV_BYTES.get(dtype)
        if size is None:
            raise BadInput(
                f"kv_cache_dtype {kv_cache_dtype!r} is unknown; use auto, bf16, fp16, fp8, int8, nvfp4, "
                "fp8_per_token_head, int8_per_token_head, fp8_ds_mla or nvfp4_ds_mla"
            )
        if dtype in _PACKED_LATENT_BYTES:
            mla = self.attention.mla
            if mla is None or mla.kv_lora_rank != _PACKED_LATENT or mla.rope_dim not in _PACKED_KEYS:
                raise BadInput(
                    f"kv_cache_dtype {kv_cache_dtype!r} packs latents of 512 values with a rotary key of 64, "
                    f"which {self.name} does not have; use auto, bf16 or fp8"
                )
        return size

    def _kv_dtype(self, kv_cache_dtype: str) -> str:
        dtype = kv_cache_dtype.lower()
        return self.kv_dtype if dtype == "auto" else dtype

    # -- arithmetic ------------------------------------------------------------------------------

    def matmul_flops_per_token(self) -> int:
        """FLOPs of the decoder layers' matrix products for one token (2 a weight; active experts only)."""
        return sum(2 * ln.inputs * ln.outputs * ln.active * ln.layers for ln in self.linears())

    def attention_flops(self, tokens: int, context: int) -> int:
        """FLOPs of causal attention for a chunk of `tokens` over `context` earlier tokens, all layers."""
        return sum(
            n * attended_pairs(tokens, context, window) * _pair_flops(a)
            for a in self.attentions
            for window, n in Counter(a.windows).items()
        )

    def check_tensor_parallel(self, tensor_parallel_size: int) -> None:
        """Errors: `BadInput` where the heads can't be divided among that many GPUs."""
        tp, a = tensor_parallel_size, self.attention
        if tp < 1 or a.heads % tp:
            raise BadInput(
                f"tensor_parallel_size {tp} does not divide the {a.heads} attention heads of {self.name}"
            )
        if a.mla is None and any(a.kv_heads % tp and tp % a.kv_heads for a in self.attentions):
            raise BadInput(
                f"tensor_parallel_size {tp} neither divides nor is a multiple of the {a.kv_heads} KV heads "
                f"of {self.name}"
            )
        if -(-self.vocab // _VOCAB_STEP) * _VOCAB_STEP % tp:
            raise BadInput(
                f"tensor_parallel_size {tp} does not divide the vocabulary of {self.name}, which has "
                f"{self.vocab} tokens and is padded to a multiple of {_VOCAB_STEP}"
            )

    def check_context_ranks(self, tensor_parallel_size: int, ranks: int) -> None:
        """Errors: `BadInput` where so many of the GPUs cannot share a sequence's tokens.

        As vLLM has it (config/parallel.py; config/model.py, `verify_with_parallel_config`).
        """
        tp, a = tensor_parallel_size, self.attention
        start = f"decode_context_parallel_size {ranks}"
        if tp % ranks:
            raise BadInput(f"{start} does not divide tensor_parallel_size {tp}")
        if a.mla is not None:
            return
        if tp // a.kv_heads < ranks:
            raise BadInput(
                f"{start} needs a tensor_parallel_size of at least {ranks * a.kv_heads}, as {self.name} has "
                f"{a.kv_heads} KV heads; it is {tp}"
            )
        if a.heads // a.kv_heads % ranks:
            raise BadInput(
                f"{start} does not divide the {a.heads // a.kv_heads} query heads per KV head of {self.name}"
            )


def local_heads(heads: int, tensor_parallel_size: int) -> int:
    """KV heads on one of so many GPUs: each has one at least."""
    return max(1, heads // tensor_parallel_size)


def _indexed(group: KvGroup, indexer: Indexer | None) -> KvGroup:
    """The group with what an indexer keeps and chooses; indexers have no windows beside them."""
    if indexer is None or group.window:
        return group
    return group._replace(
        index_bytes=indexer.layers * indexer.token_bytes,
        chosen=indexer.chosen,
        sparse_layers=min(indexer.sparse_layers, group.layers),
        score_flops=indexer.layers * indexer.score_flops / indexer.pool,
    )


def _elements_of_token(a: AttentionShape, dtype: str, tp: int) -> float:
    """Stored elements of one token in one layer, on one GPU."""
    if a.mla:
        packed = _PACKED_LATENT_BYTES.get(dtype)
        return packed if packed else a.mla.kv_lora_rank + a.mla.rope_dim
    width = a.head_dim + a.v_head_dim
    scales = _SCALE_BYTES if dtype in _SCALED else 0
    # Of nvfp4, values of 4 bits and a scale of 8 bits for 16 of them: 9 bytes.
    each = width * 9 / 16 if dtype == "nvfp4" else width + scales
    return local_heads(a.kv_heads, tp) * each


def _kv_kind(a: AttentionShape, window: int) -> KvKind:
    if window:
        return KvKind.CHUNK if a.chunked else KvKind.WINDOW
    return KvKind.LATENT if a.mla else KvKind.FULL


def _pair_flops(a: AttentionShape) -> int:
    return 2 * a.heads * (a.head_dim + a.v_head_dim)


def _small_of_attention(a: AttentionShape, hidden: int) -> int:
    """Biases, norms and sinks of one layer's attention."""
    q_width, kv_width = a.heads * a.head_dim, a.kv_heads * a.head_dim
    layer = 0
    if a.compressed:
        layer += a.compressed.small
    elif a.mla:
        layer += a.mla.kv_lora_rank + (a.mla.q_lora_rank or 0)
    elif a.qkv_bias:
        layer += q_width + kv_width + a.kv_heads * a.v_head_dim
    layer += hidden if a.o_bias else 0
    layer += {"": 0, "head": 2 * a.head_dim, "full": q_width + kv_width}[a.qk_norm]
    return layer + (a.heads if a.sinks else 0)


def attended_pairs(tokens: int, context: int, window: int = 0) -> int:
    """Pairs of (query, key) in a causal chunk of `tokens` after `context` tokens; window 0 is none."""
    if not window:
        return tokens * context + tokens * (tokens + 1) // 2
    free = max(0, min(tokens, window - context))  # queries that still see everything before them
    return free * context + free * (free + 1) // 2 + (tokens - free) * window
