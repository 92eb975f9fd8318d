"""Step costs from first principles: a model's shapes, a GPU's published rates, stated efficiencies.

`Roofline` needs no measurement. Each matrix product takes the blend of the time to stream its weights and
the time to do its arithmetic; attention streams the KV cache (decode) or does its arithmetic (prefill); small
kernels cost a fixed time each; the host's work is counted apart. `Efficiencies` holds every constant that
is no datasheet figure, with where it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.decode_line import FEMTO, DecodeLine
from pagecast.sim.costs.pieces import WindowLine
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.machine.gpus import Gpu
from pagecast.sim.machine.graphs import GRAPH_LARGEST
from pagecast.sim.machine.matrix import Linear
from pagecast.sim.machine.model_facts import KvGroup, ModelFacts, attended_pairs
from pagecast.sim.note import Note

_FS = 1e15  # femtoseconds in a second
# Signed errors in percent on recorded runs of Qwen3-8B (vLLM 0.24, one H200): of summed step time
# (tests/sim/costs/test_roofline.py), and of replays of the same runs.
MEASURED_ERRORS = {
    "decode_steps_percent": (-2, 5),
    "prompt_steps_percent": (0, 9),
    "tpot_percent": (0, 16),
    "e2e_percent": (0, 13),
    "ttft_percent": (-1, 9),
    "saturated_ttft_percent": 50,
}
# The same of replays of three recorded runs of a mixture of experts (Qwen3-30B-A3B, vLLM 0.24, one H200); the
# time to launch a layer of experts comes from the warm-up before them.
MIXTURE_ERRORS = {"tpot_percent": (-18, -1), "ttft_percent": (-18, -10), "saturated_ttft_percent": -96}
LATENT_TILE = 64  # query heads of a tile of sparse latent attention in prompts
UNCHECKED_PERCENT = 25  # to allow for on other models and GPUs
_CHOSEN_PERCENT = (
    45  # with recurrent or sparse layers: nine in ten public rows of docs/measured-operations.md
)


def unchecked_percent(model: ModelFacts) -> int:
    """The error to allow for in step times, in percent, where nothing like them was recorded."""
    return _CHOSEN_PERCENT if model.recurrent or model.attention.indexer else UNCHECKED_PERCENT


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Fractions of published rates, and fixed times, that real kernels and a real host reach.

    `weight_stream`, `kv_stream`: of HBM bandwidth, for thin matrix products and for paged decode attention.
    `matmul`, `prefill_attention`: of the FLOP/s that the GPU's best matrix product reaches, for the products
    of a large step and for causal attention. `blend`: exponent p that joins the two times of a product,
    (a**p + b**p)**(1/p); 1 adds them, infinity takes the greater. `product_s`: what a product costs beside
    them (gap, ramp, tail); `kernel_s`: a small kernel with its gap. `launch_layer_s`: host time to launch a
    layer of a step that is not one CUDA graph (one with prompt chunks): a step is never faster than its
    launches; `launch_experts_s` is more of a layer with routed experts, where no CUDA graph has so many
    tokens. `host_step_s`, `host_request_s`: host time of a step, and of each request in it, that nothing
    overlaps in synchronous scheduling. `arrival_s`: host work for an arriving request. `link`: of published
    link bandwidth; the latencies are of one all-reduce.

    Sources: the fractions lie within what public kernels reach (on an H200, FlashAttention 3's paged decode
    4.1 of 4.8 TB/s and its prefill 380 to 630 TFLOP/s, cuBLAS 690 to 800). They and the fixed times were set
    on steady shapes of Qwen3-8B in vLLM 0.24 on one H200 and rounded; host times by comparing the same load
    with and without asynchronous scheduling.
    """

    weight_stream: float = 0.83
    kv_stream: float = 0.86
    matmul: float = 0.85
    prefill_attention: float = 0.77
    blend: float = 1.25
    product_s: float = 5.0e-6
    kernel_s: float = 3.0e-6
    launch_layer_s: float = 180e-6
    launch_experts_s: float = 0.86e-3
    host_step_s: float = 0.6e-3
    host_request_s: float = 10e-6
    arrival_s: float = 0.35e-3
    link: float = 0.70
    nvlink_latency_s: float = 10e-6
    pcie_latency_s: float = 30e-6


class Roofline(StepCosts):
    """Costs of `model` on `tensor_parallel_size` GPUs.

    `misfits`: calibrations that do not fit, by name with the reason, None where none was looked for;
    `unmeasured`: why measured operations do not cover the set-up. Errors: `BadInput` for a tensor-parallel
    size or a KV dtype that the model can't have.
    """

    def __init__(
        self,
        model: ModelFacts,
        gpu: Gpu,
        *,
        tensor_parallel_size: int = 1,
        kv_cache_dtype: str = "auto",
        efficiencies: Efficiencies | None = None,
        misfits: tuple[tuple[str, str], ...] | None = None,
        unmeasured: str | None = None,
    ) -> None:
        if tensor_parallel_size < 1:
            raise BadInput(f"tensor_parallel_size is {tensor_parallel_size}; it must be at least 1")
        if model.untimed:
            raise BadInput(
                f"steps of {model.name} can't be timed: costs of {model.untimed} are not known; "
                "its memory and block counts are (pagecast memory)"
            )
        self.name = "roofline"
        self._misfits, self._unmeasured = misfits, unmeasured
        self.model, self.gpu, self.tensor_parallel_size = model, gpu, tensor_parallel_size
        self.efficiencies = e = efficiencies or Efficiencies()
        self._linears = model.linears(tensor_parallel_size)
        self._bandwidth = gpu.hbm_bytes_per_s
        self._kv_bytes = model.kv_element_bytes(kv_cache_dtype)
        self._fixed_s = self._gaps_s()
        self._launch_fs = round(model.layers * e.launch_layer_s * _FS)
        sparse = model.moe.layers if model.moe else 0
        self._experts_fs = round(sparse * e.launch_experts_s * _FS)
        self._attention_flops_s = gpu.matmul_flops("bf16") * e.prefill_attention
        self._groups = model.kv_groups(tensor_parallel_size, kv_cache_dtype)
        self._per_ctx, self._windows = self._decode_slopes()
        # A step reads and writes the recurrent states of each of its requests.
        states = 2 * model.state_bytes(tensor_parallel_size)
        self._states_fs = round(states / (self._bandwidth * e.kv_stream) * _FS)
        self._rows: dict[int, int] = {}
        self._heads: dict[int, int] = {}
        self._attention: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {}
        self._lines: dict[int, DecodeLine] = {}
        self._chunks: dict[tuple[int, int], int] = {}
        self._host_step_ns = round(e.host_step_s * 1e9)
        self._host_request_ns = round(e.host_request_s * 1e9)
        self._arrival_ns = round(e.arrival_s * 1e9)

    # -- the interface ---------------------------------------------------------------------------

    def device_ns(self, batch: Batch) -> int:
        """Device time of a step with prompt chunks: all rows in one pass, attention by kind."""
        decode_n, decode_ctx, _, prefill, _ = batch
        rows = decode_n
        total = 0
        for chunk in prefill:
            rows += chunk[0]
            cost = self._chunks.get(chunk)
            total += self._chunk_fs(chunk) if cost is None else cost
        requests = decode_n + len(prefill)
        total += self._rows_fs(rows) + self._head_fs(requests) + requests * self._states_fs
        if decode_n:
            per_ctx, windows = self._decode_attention(decode_n)
            total += decode_ctx * per_ctx
            for window, slope in windows:
                total += min(decode_ctx, window * decode_n) * slope
        if not prefill:
            return total // FEMTO
        launching = self._launch_fs + (self._experts_fs if rows > GRAPH_LARGEST else 0)
        return max(total, launching) // FEMTO

    def launch_ns(self, batch: Batch) -> int:
        # Launching is taken for hidden.
        return 0

    def decode_line(self, n: int) -> DecodeLine:
        """Device time of a pure decode step of `n` requests; kept once computed."""
        line = self._lines.get(n)
        if line is None:
            per_ctx, windows = self._decode_attention(n)
            fixed = self._rows_fs(n) + self._head_fs(n) + n * self._states_fs
            line = DecodeLine(n, fixed, per_ctx, 0)
            for window, slope in windows:
                line = WindowLine.over(line, window, slope)
            self._lines[n] = line
        return line

    def host_ns(self, requests: int) -> int:
        """CPU time a step of `requests` requests adds when nothing overlaps it."""
        return self._host_step_ns + requests * self._host_request_ns

    def arrival_ns(self, input_tokens: int) -> int:
        """CPU time between steps for one arriving request."""
        return self._arrival_ns

    def expected_error(self) -> Note:
        """Errors on recorded runs, and the calibrations that do not fit."""
        return Note(
            "roofline_costs",
            misfits=self._misfits,
            unmeasured=self._unmeasured,
            **MEASURED_ERRORS,
            unchecked_percent=unchecked_percent(self.model),
            mixture=MIXTURE_ERRORS if self.model.moe else None,
            windows=bool(self._windows),
        )

    # -- the parts -------------------------------------------------------------------------------

    def _rows_fs(self, rows: int) -> int:
        """Everything but attention and the head for `rows` tokens, in femtoseconds."""
        time_fs = self._rows.get(rows)
        if time_fs is None:
            seconds = self._fixed_s + self._elementwise_s(rows) + self._communication_s(rows)
            seconds += sum(self._linear_s(linear, rows) for linear in self._linears)
            time_fs = self._rows[rows] = round(seconds * _FS)
        return time_fs

    def _head_fs(self, rows: int) -> int:
        """The output projection and sampling for `rows` rows that emit a token, in femtoseconds."""
        time_fs = self._heads.get(rows)
        if time_fs is None:
            time_fs = self._heads[rows] = round(self._head_s(rows) * _FS)
        return time_fs

    def _decode_attention(self, n: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Femtoseconds a context token of `n` requests' decode attention: without limit, and by window."""
        times = self._attention.get(n)
        if times is None:
            stretch = self._stretch(n)
            windows = tuple((window, round(slope * stretch)) for window, slope in self._windows)
            times = self._attention[n] = (round(self._per_ctx * stretch), windows)
        return times

    def _linear_s(self, linear: Linear, rows: int) -> float:
        """One kind of matrix product over all layers."""
        e = self.efficiencies
        bits = self.model.linear_bits(linear)
        matrix = linear.inputs * linear.outputs
        touched, work = 1.0, float(rows)
        if linear.experts > 1:
            share = linear.active / linear.experts
            touched = linear.experts * (1.0 - (1.0 - share) ** rows)
            work = max(rows * linear.active, 16 * touched)  # an expert's rows are padded to a tile
        stream = touched * matrix * bits / 8 / (self._bandwidth * e.weight_stream)
        eight = self.model.weight_dtype in ("fp8", "int8") and bits < 9
        flops = self.gpu.matmul_flops("fp8" if eight else "bf16") * e.matmul
        return linear.layers * self._blend(stream, 2.0 * work * matrix / flops)

    def _head_s(self, rows: int) -> float:
        """The output projection and the sampler's passes over fp32 logits (write, read, read)."""
        m, e = self.model, self.efficiencies
        matrix = -(-m.vocab // self.tensor_parallel_size) * m.hidden
        stream = matrix * m.dtype_bytes / (self._bandwidth * e.weight_stream)
        work = 2.0 * rows * matrix / (self.gpu.matmul_flops("bf16") * e.matmul)
        return self._blend(stream, work) + 12.0 * rows * m.vocab / (self._bandwidth * e.kv_stream)

    def _elementwise_s(self, rows: int) -> float:
        """Norms, rotary positions, activation and KV store: bytes of what they read and write."""
        m, tp = self.model, self.tensor_parallel_size
        a = m.attention
        width = a.heads // tp * a.head_dim + m.local_kv_heads(tp) * (a.head_dim + a.v_head_dim)
        moe = m.moe
        mlp = (moe.intermediate * moe.active + moe.shared_intermediate if moe else m.intermediate) // tp
        values = m.layers * (8 * m.hidden + 3 * width + 3 * mlp)
        return rows * values * m.dtype_bytes / (self._bandwidth * self.efficiencies.kv_stream)

    def _communication_s(self, rows: int) -> float:
        """Two all-reduces of the hidden rows per layer, and one all-gather of logits left out as small."""
        tp, e = self.tensor_parallel_size, self.efficiencies
        if tp == 1:
            return 0.0
        latency = e.pcie_latency_s if self.gpu.link == "PCIe" else e.nvlink_latency_s
        volume = 2.0 * (tp - 1) / tp * rows * self.model.hidden * self.model.dtype_bytes
        return 2 * self.model.layers * (latency + volume / (self.gpu.link_bytes_per_s * e.link))

    def _gaps_s(self) -> float:
        """Gaps and small kernels of a step: norms, rotary positions, KV store, attention, activation."""
        m, e = self.model, self.efficiencies
        products = 1 + sum(linear.layers for linear in self._linears if linear.name != "router")
        routing = 6 * m.moe.layers if m.moe else 0  # choose, sort, permute and weigh experts
        return products * e.product_s + (6 * m.layers + routing + 20) * e.kernel_s

    def _stretch(self, n: int) -> float:
        """How much longer decode attention of `n` requests takes for not filling the multiprocessors.

        A tile of work is one request and KV head (for MLA: 64 query heads), split along its context where
        there are fewer tiles than multiprocessors. The last round of tiles is part full; half of what it
        leaves idle is lost, since fewer tiles get more bandwidth each.
        """
        a, sms, tp = self.model.attention, self.gpu.sms, self.tensor_parallel_size
        tiles = n * (max(1, a.heads // tp // 64) if a.mla else self.model.local_kv_heads(tp))
        tiles *= max(1, -(-sms * 10 // (11 * tiles)))
        return 0.5 + 0.5 * sms * -(-tiles // sms) / tiles

    def _decode_slopes(self) -> tuple[float, tuple[tuple[int, float], ...]]:
        """Femtoseconds of decode attention for one context token: of full layers, and of each window's."""
        a, e, tp = self.model.attention, self.efficiencies, self.tensor_parallel_size
        mla = a.mla
        wide = 2 * mla.kv_lora_rank + mla.rope_dim if mla else 0
        full, windows = 0.0, []
        bandwidth = self._bandwidth * e.kv_stream
        for group in self._groups:
            stream = group.elements_per_token * self._kv_bytes / bandwidth
            flops = 2.0 * wide * (a.heads // tp) if mla else group.pair_flops / tp
            layer = max(stream, flops / self._attention_flops_s) * _FS
            if group.window:
                windows.append((group.window, group.layers * layer))
                continue
            full += (group.layers - group.sparse_layers) * layer + group.index_bytes / bandwidth * _FS
            if group.chosen:
                windows.append((group.chosen, group.sparse_layers * layer))
        return full, tuple(windows)

    def _chunk_fs(self, chunk: tuple[int, int]) -> int:
        """Attention of one prompt chunk `(tokens, context)`: its arithmetic, or reading its context."""
        tokens, context = chunk
        flops = 0
        size = sparse_s = 0.0
        for group in self._groups:
            for layers, window in (
                (group.layers - group.sparse_layers, group.window),
                (group.sparse_layers, group.chosen),
            ):
                visible = min(context, window) if window else context
                size += layers * group.elements_per_token * self._kv_bytes * visible
            full = group.layers - group.sparse_layers
            flops += full * group.pair_flops * attended_pairs(tokens, context, group.window)
            if group.chosen:
                sparse_s += self._sparse_s(group, tokens, context)
            size += group.index_bytes * context
        flops //= self.tensor_parallel_size
        read = size / (self._bandwidth * self.efficiencies.kv_stream)
        cost = round(max(flops / self._attention_flops_s + sparse_s, read) * _FS)
        if len(self._chunks) < 1 << 16:
            self._chunks[chunk] = cost
        return cost

    def _sparse_s(self, group: KvGroup, tokens: int, context: int) -> float:
        """Arithmetic of a chunk's sparse layers: the indexers' scores of every pair, and the chosen pairs.

        Latents are attended to as they are stored, by whole tiles of query heads (vLLM's flashmla_sparse.py).
        """
        mla, tp = self.model.attention.mla, self.tensor_parallel_size
        pair = group.pair_flops / tp
        if mla:
            heads = -(-self.model.attention.heads // tp // LATENT_TILE) * LATENT_TILE
            pair = 2.0 * (2 * mla.kv_lora_rank + mla.rope_dim) * heads
        chosen = group.sparse_layers * pair * attended_pairs(tokens, context, group.chosen)
        scored = group.score_flops * attended_pairs(tokens, context)
        rate = self.gpu.matmul_flops("fp8" if mla else "bf16") * self.efficiencies.prefill_attention
        return float(chosen / self._attention_flops_s + scored / rate)

    def _blend(self, a: float, b: float) -> float:
        p = self.efficiencies.blend
        return float((a**p + b**p) ** (1.0 / p))
