"""A model's step as measured operations: what its rows take, its attention, and its head.

The rules, each of them stated in `docs/measured-operations.md`:
- a layer is its matrix products, its attention or latent attention, its experts, five small kernels, and with
  tensor parallelism two all-reduces;
- a small kernel takes 3 us and its bytes at 0.8 of the GPU's bandwidth (the published data's own rule), 1 us
  on TensorRT-LLM;
- a layer with routed experts has two small kernels more, top-k and the scaling of its weights, for the
  published times of experts begin after them;
- decode attention streams the contexts from memory: it takes no less than they do at the published bandwidth
  (published times of large batches do, for part of what they read was in the cache);
- the head is a 16-bit product over the rows that emit a token, with three passes over their logits in fp32.
"""

from __future__ import annotations

import numpy as np
from pagecast.sim.costs.families import fa2, fa3
from pagecast.sim.costs.families.fa3 import FLASH_ATTENTION_3, imbalance_cap, tail_tokens
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.costs.measured.attention import AttentionHeads, DecodeAttention, PromptAttention
from pagecast.sim.costs.measured.delta import DeltaRule
from pagecast.sim.costs.measured.experts import ExpertShape, ExpertTimes
from pagecast.sim.costs.measured.grid import completed, extended
from pagecast.sim.costs.measured.latent import LatentAttention
from pagecast.sim.costs.measured.missing import NotMeasured
from pagecast.sim.costs.measured.products import BF16, Products
from pagecast.sim.costs.measured.tables import MeasuredTable
from pagecast.sim.costs.measured.tables import table as find_table
from pagecast.sim.machine.block_layout import block_layout
from pagecast.sim.machine.gpus import Gpu
from pagecast.sim.machine.matrix import Linear
from pagecast.sim.machine.model_facts import ModelFacts
from pagecast.traces.arrays import Floats

KERNEL_S, KERNEL_BANDWIDTH = 3e-6, 0.8
# TensorRT-LLM starts a kernel while the one before it ends: of 3, 2 and 1 us the one that fits the teaching
# half of tests/benchmarks/public_truth.py best.
OVERLAPPED_KERNEL_S = 1e-6
ROUTING_KERNELS = 2
GRAPH = "graph"
# GPUs on which vLLM computes prompts and decoding requests in one launch of FlashAttention, and its tiles.
_TILES = {
    "H100 SXM": fa3.TILES,
    "H200": fa3.TILES,
    "A100 80GB": fa2.TILES,
    "L40S": fa2.TILES,
    "RTX PRO 6000": fa2.TILES,
}


class Operations:
    """A model on `tp` GPUs, experts spread over `ep` GPUs of `dp` such ranks.

    `link_bytes_per_s`: what a GPU sends to its peers, if that is given. Errors: NotMeasured.
    """

    def __init__(
        self,
        table: MeasuredTable,
        model: ModelFacts,
        gpu: Gpu,
        *,
        tp: int = 1,
        ep: int = 1,
        dp: int = 1,
        kv_dtype: str = BF16,
        link_bytes_per_s: float | None = None,
    ) -> None:
        self.table, self.model, self.gpu = table, model, gpu
        self.tp, self.ep, self.dp = tp, ep, dp
        self.link = link_bytes_per_s
        self._products = Products(table)
        self.rows = self._products.rows
        self._linears = model.linears(tp)
        self.latent = self._latent(kv_dtype)
        self.delta = DeltaRule(table, model.recurrent, tp) if model.recurrent else None
        groups = () if self.latent else model.kv_groups(tp)
        tiles = _TILES.get(gpu.name) if table.engine == "vllm" else None
        self._decode: list[tuple[int, int, float, DecodeAttention]] = []
        self._packed = tiles is not None and tiles.packed
        self.prompt: list[tuple[int, int, PromptAttention]] = []
        for group in groups:
            a = model.attention
            heads = AttentionHeads(
                kv_dtype, a.heads // tp, model.local_kv_heads(tp), a.head_dim, group.window
            )
            kv_bytes = 2 * heads.kv_heads * a.head_dim * model.kv_element_bytes(kv_dtype)
            decode = DecodeAttention(table.family("decode"), heads)
            self._decode.append((group.layers, group.window, kv_bytes / gpu.hbm_bytes_per_s, decode))
            prompt = PromptAttention(table.family("context"), heads, tiles, gpu.sms)
            self.prompt.append((group.layers, group.window, prompt))

    # -- attention

    @property
    def windowed(self) -> bool:
        """Whether some layers attend to a window alone."""
        return any(window for _, window, _, _ in self._decode)

    @property
    def selective(self) -> bool:
        """Whether some layers keep a state, or choose the tokens that they attend to."""
        return self.delta is not None or self.model.attention.indexer is not None

    @property
    def kv_groups(self) -> int:
        """Groups of KV blocks that the host plans for a request, as vLLM forms them; 1 for other engines."""
        if self.table.engine != "vllm":
            return 1
        return block_layout(self.model.kv_groups(self.tp), 1, 1).groups

    def decode_seconds(self, n: int, contexts: Floats) -> Floats:
        """Attention of `n` decoding requests in all layers, at each mean context."""
        total = np.zeros(len(contexts))
        for layers, window, token_s, attention in self._decode:
            read = np.minimum(contexts, window) if window else contexts
            total += layers * np.maximum(attention.seconds(n, contexts), n * read * token_s)
        if self.latent:
            total += self.model.layers * self.latent.decode_seconds(n, contexts)
        if self.delta:
            total += self._recurrent_layers * self.delta.decode_seconds(n)
        return total

    def raggedness(self, n: int) -> tuple[float, float]:
        """Two bounds on the time that unequal contexts of `n` requests add where FlashAttention 3 idles SMs.

        At most the first as a share of their attention, and no more than the second, in context tokens, for
        each token by which the longest context exceeds the mean (`families.fa3`).
        """
        if not self._packed or self.windowed:
            return 0.0, 0.0
        kv_heads = self.model.local_kv_heads(self.tp)
        group = max(1, self.model.attention.heads // self.tp // kv_heads)
        shape = TileShape(FLASH_ATTENTION_3.name, kv_heads, group, self.gpu.sms, ())
        return imbalance_cap(shape, n), tail_tokens(shape)

    def chunk_seconds(self, tokens: int, context: int) -> float:
        """Attention of a prompt chunk in all layers, above that of the smallest launch."""
        total = sum(layers * attention.seconds(tokens, context) for layers, _, attention in self.prompt)
        if self.latent:
            total += self.model.layers * self.latent.seconds(tokens, context)
        if self.delta:
            total += self._recurrent_layers * self.delta.seconds(tokens)
        return total

    @property
    def _recurrent_layers(self) -> int:
        return self.model.recurrent.layers if self.model.recurrent else 0

    # -- rows

    def row_seconds(self) -> Floats:
        """Everything but attention and head for each number of tokens in `rows`."""
        total = self._small_kernels_s() + self._communication_s()
        for linear in self._linears:
            if linear.name.startswith("expert_"):
                continue
            if self.latent and linear.name in _IN_LATENT:
                continue
            total += linear.layers * self._linear_s(linear)
        if self.model.moe:
            total += self.model.moe.layers * self._experts_s()
        if self.latent:
            total += self.model.layers * self.latent.row_seconds(self.rows)
        return np.asarray(total)

    def reading_seconds(self, row_times: Floats) -> Floats:
        """Of `row_seconds`, what reads weights: all of one row, and the experts that more rows touch."""
        read = np.full(len(row_times), row_times[0])
        if self.model.moe:
            experts = ExpertTimes(self.table, self.gpu)
            shape = self._expert_shape(experts)
            each = experts.streaming(shape, self.model.weight_dtype, self.rows * self.dp)
            read += self.model.moe.layers * (each - each[0])
        return np.asarray(np.minimum(read, row_times))

    def head_seconds(self) -> Floats:
        """The head and sampling for each number of emitting rows in `rows`."""
        m = self.model
        product = self._products.seconds(BF16, m.hidden, -(-m.vocab // self.tp))
        logits = 12.0 * self.rows * m.vocab / (self.gpu.hbm_bytes_per_s * KERNEL_BANDWIDTH)
        return np.asarray(product + logits)

    def _linear_s(self, linear: Linear) -> Floats:
        m = self.model
        plain = m.linear_bits(linear) == 8.0 * m.dtype_bytes
        dtype = BF16 if plain else self._products.dtype(m.weight_dtype, m.model_type)
        return self._products.seconds(dtype, linear.inputs, linear.outputs)

    def _experts_s(self) -> Floats:
        m = self.model
        assert m.moe
        experts = ExpertTimes(self.table, self.gpu)
        shape = self._expert_shape(experts)
        rows = self.rows * self.dp  # other ranks compute as many tokens
        times = extended(rows, experts.tokens, experts.seconds(shape, m.weight_dtype))
        # Rows are gathered before the experts and summed after them: together an all-reduce.
        return times if self.dp == 1 else times + self._all_reduce_s(rows, self.dp)

    def _expert_shape(self, experts: ExpertTimes) -> ExpertShape:
        m = self.model
        assert m.moe
        tp = 1 if self.ep > 1 else self.tp * self.dp
        return experts.shape(m.hidden, m.moe, m.weight_dtype, tp, self.ep)

    def _small_kernels_s(self) -> Floats:
        """Norms, rotary positions, KV store and activation: bytes that they read and write."""
        m, tp = self.model, self.tp
        a, moe = m.attention, m.moe
        width = a.heads // tp * a.head_dim + 2 * m.local_kv_heads(tp) * a.head_dim
        mlp = moe.shared_intermediate // tp if moe else m.intermediate // tp
        values = 8 * m.hidden + 2 * width + 3 * mlp
        kernels = 5
        if self.latent:
            values, kernels = 8 * m.hidden + 3 * mlp, 3
        per_token = values * m.dtype_bytes / (self.gpu.hbm_bytes_per_s * KERNEL_BANDWIDTH)
        kernel_s = OVERLAPPED_KERNEL_S if self.table.engine == "trtllm" else KERNEL_S
        routing = moe.layers * ROUTING_KERNELS * kernel_s if moe else 0.0
        return np.asarray(m.layers * (kernels * kernel_s + per_token * self.rows) + routing)

    def _communication_s(self) -> Floats:
        """Two all-reduces of the hidden rows in each layer."""
        if self.tp == 1:
            return np.zeros(len(self.rows))
        return np.asarray(2 * self.model.layers * self._all_reduce_s(self.rows, self.tp))

    def _all_reduce_s(self, rows: Floats, gpus: int) -> Floats:
        """An all-reduce of hidden rows over `gpus` GPUs.

        Over a link that is slower than the published one, each GPU sends 2 (gpus - 1) / gpus of the rows
        after the least all-reduce's time.
        """
        if "all_reduce" not in self.table:
            raise NotMeasured("all-reduces were not measured")
        family = self.table.family("all_reduce")
        times = family.of(gpus, GRAPH)
        if times is None:
            raise NotMeasured(f"all-reduces over {gpus} GPUs were not measured")
        elements = family.axes["elements"]
        once = extended(rows * self.model.hidden, elements, completed(times, elements))
        if self.link is not None:
            sent = 2 * (gpus - 1) / gpus * rows * self.model.hidden * self.model.dtype_bytes
            once = np.maximum(once, once[0] + sent / self.link)
        return np.asarray(once)

    def _latent(self, kv_dtype: str) -> LatentAttention | None:
        m = self.model
        if m.attention.mla is None:
            return None
        table = self.table
        if ("sparse_decode" if m.attention.indexer else "mla_decode") not in table:
            table = find_table(self.gpu.name, "vllm") or table
        plain = (
            m.linear_bits(next(each for each in self._linears if each.name == "kv_a")) >= 8.0 * m.dtype_bytes
        )
        return LatentAttention(
            table, m, (kv_dtype, BF16 if plain else "fp8_block", m.attention.heads // self.tp)
        )


_IN_LATENT = ("q", "q_a", "q_b", "kv_a", "kv_b", "o", "index_q", "index_k", "index_weights")
