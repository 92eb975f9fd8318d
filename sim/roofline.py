"""Step costs from first principles: a model's shapes, a GPU's published rates, stated efficiencies.

`Roofline` needs no measurement. Each matrix product takes the blend of the time to stream its weights and
the time to do its arithmetic; attention streams the KV cache (decode) or does its arithmetic (prefill); small
kernels cost a fixed time each; the host's work is counted apart. `Efficiencies` holds every constant that
is no datasheet figure, with where it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs import FEMTO, Batch, DecodeLine
from pagecast.sim.gpus import Gpu
from pagecast.sim.model_facts import Linear, ModelFacts

_FS = 1e15  # femtoseconds in a second
SHORT_WINDOW = 2048  # windows up to this are taken as full in decode; longer ones as having no limit


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Fractions of published rates, and fixed times, that real kernels and a real host reach.

    `weight_stream`, `kv_stream`: of HBM bandwidth, for thin matrix products and for paged decode attention.
    `matmul`, `prefill_attention`: of dense FLOP/s, for large shapes. `blend`: exponent p that joins the two
    times of a product, (a**p + b**p)**(1/p): 1 adds them, infinity takes the greater. `kernel_s`: what a
    small kernel costs with its gap inside a CUDA graph. `launch_layer_s`: host time to launch one layer of a
    step that is not one CUDA graph (prefill); a step can't be faster than its launches. `host_step_s`,
    `host_request_s`: host time of a step, and of each request in it, that nothing overlaps in synchronous
    scheduling. `arrival_s`: host work for an arriving request. `link`: of published link bandwidth.
    """

    weight_stream: float = 0.80
    kv_stream: float = 0.86
    matmul: float = 0.68
    prefill_attention: float = 0.60
    blend: float = 1.5
    kernel_s: float = 2.0e-6
    launch_layer_s: float = 180e-6
    host_step_s: float = 0.6e-3
    host_request_s: float = 10e-6
    arrival_s: float = 0.35e-3
    link: float = 0.70
    nvlink_latency_s: float = 10e-6
    pcie_latency_s: float = 30e-6


class Roofline:
    """Costs of `model` on `tensor_parallel_size` GPUs; implements `StepCosts`.

    Errors: `BadInput` for a tensor-parallel size or a KV dtype that the model can't have.
    """

    def __init__(
        self,
        model: ModelFacts,
        gpu: Gpu,
        *,
        tensor_parallel_size: int = 1,
        kv_cache_dtype: str = "auto",
        efficiencies: Efficiencies | None = None,
    ) -> None:
        if tensor_parallel_size < 1:
            raise BadInput(f"tensor_parallel_size is {tensor_parallel_size}; it must be at least 1")
        self.name = "roofline"
        self.model, self.gpu, self.tensor_parallel_size = model, gpu, tensor_parallel_size
        self.efficiencies = e = efficiencies or Efficiencies()
        self._linears = model.linears(tensor_parallel_size)
        self._bandwidth = gpu.hbm_bytes_per_s
        self._kv_bytes = model.kv_element_bytes(kv_cache_dtype)
        self._fixed_s = self._kernels() * e.kernel_s
        self._launch_fs = round(model.layers * e.launch_layer_s * _FS)
        self._attention_flops_s = gpu.peak_flops("bf16") * e.prefill_attention
        self._per_ctx, self._per_request = self._decode_slopes()
        self._rows: dict[tuple[int, int], int] = {}
        self._lines: dict[int, DecodeLine] = {}
        self._chunks: dict[tuple[int, int], int] = {}
        self._host_step_ns = round(e.host_step_s * 1e9)
        self._host_request_ns = round(e.host_request_s * 1e9)
        self._arrival_ns = round(e.arrival_s * 1e9)

    # -- the interface ---------------------------------------------------------------------------

    def device_ns(self, batch: Batch) -> int:
        """Device time of a step with prompt chunks: all rows in one pass, attention by kind."""
        decode_n, decode_ctx, _, prefill = batch
        rows = decode_n
        attention = 0
        for chunk in prefill:
            rows += chunk[0]
            cost = self._chunks.get(chunk)
            attention += self._chunk_fs(chunk) if cost is None else cost
        total = self._rows_fs(rows, decode_n + len(prefill)) + attention
        if decode_n:
            total += decode_n * self._per_request + decode_ctx * self._per_ctx
        return max(total, self._launch_fs) // FEMTO if prefill else total // FEMTO

    def decode_line(self, n: int) -> DecodeLine:
        """Device time of a pure decode step of `n` requests; kept once computed."""
        line = self._lines.get(n)
        if line is None:
            line = DecodeLine(n, self._rows_fs(n, n) + n * self._per_request, self._per_ctx, 0)
            self._lines[n] = line
        return line

    def host_ns(self, requests: int) -> int:
        """CPU time a step of `requests` requests adds when nothing overlaps it."""
        return self._host_step_ns + requests * self._host_request_ns

    def arrival_ns(self, input_tokens: int) -> int:
        """CPU time between steps for one arriving request."""
        return self._arrival_ns

    def expected_error(self) -> str:
        """One sentence: what error to expect."""
        return "Roofline costs are estimates from published rates; they have not been compared yet."

    # -- the parts -------------------------------------------------------------------------------

    def _rows_fs(self, rows: int, emitting: int) -> int:
        """Everything but attention for `rows` tokens of which `emitting` need logits, in femtoseconds."""
        key = (rows, emitting)
        found = self._rows.get(key)
        if found is None:
            seconds = sum(self._linear_s(linear, rows) for linear in self._linears)
            seconds += self._head_s(emitting) + self._elementwise_s(rows) + self._communication_s(rows)
            found = self._rows[key] = round((seconds + self._fixed_s) * _FS)
        return found

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
        flops = self.gpu.peak_flops("fp8" if eight else "bf16") * e.matmul
        return linear.layers * self._blend(stream, 2.0 * work * matrix / flops)

    def _head_s(self, rows: int) -> float:
        """The output projection and the sampler's passes over fp32 logits (write, read, read)."""
        m, e = self.model, self.efficiencies
        matrix = -(-m.vocab // self.tensor_parallel_size) * m.hidden
        stream = matrix * m.dtype_bytes / (self._bandwidth * e.weight_stream)
        work = 2.0 * rows * matrix / (self.gpu.peak_flops("bf16") * e.matmul)
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
        """Two all-reduces of the hidden rows a layer, and one all-gather of logits left out as small."""
        tp, e = self.tensor_parallel_size, self.efficiencies
        if tp == 1:
            return 0.0
        latency = e.pcie_latency_s if self.gpu.link == "PCIe" else e.nvlink_latency_s
        volume = 2.0 * (tp - 1) / tp * rows * self.model.hidden * self.model.dtype_bytes
        return 2 * self.model.layers * (latency + volume / (self.gpu.link_bytes_per_s * e.link))

    def _kernels(self) -> int:
        """Kernels a step launches: what each layer has beside its products, attention and sampling."""
        layers = sum(ln.layers for ln in self._linears if ln.name != "router")
        moe_layers = self.model.moe.layers if self.model.moe else 0
        return layers + self.model.layers * 6 + moe_layers * 6 + 20

    def _decode_slopes(self) -> tuple[int, int]:
        """Femtoseconds of decode attention for one context token, and for one request's short windows."""
        a, e, tp = self.model.attention, self.efficiencies, self.tensor_parallel_size
        mla = a.mla
        wide = 2 * mla.kv_lora_rank + mla.rope_dim if mla else a.head_dim + a.v_head_dim
        flops = 2.0 * wide * (a.heads // tp)
        full = short = 0.0
        for group in self.model.kv_groups(tp):
            stream = group.elements_per_token * self._kv_bytes / (self._bandwidth * e.kv_stream)
            cost = group.layers * max(stream, flops / self._attention_flops_s)
            if group.window and group.window <= SHORT_WINDOW:
                short += cost * group.window
            else:
                full += cost
        return round(full * _FS), round(short * _FS)

    def _chunk_fs(self, chunk: tuple[int, int]) -> int:
        """Attention of one prompt chunk `(tokens, context)`: its arithmetic, or reading its context."""
        tokens, context = chunk
        tp = self.tensor_parallel_size
        flops = self.model.attention_flops(tokens, context) / tp
        kv_bytes = (
            sum(g.layers * g.elements_per_token for g in self.model.kv_groups(tp)) * self._kv_bytes * context
        )
        read = kv_bytes / (self._bandwidth * self.efficiencies.kv_stream)
        cost = round(max(flops / self._attention_flops_s, read) * _FS)
        if len(self._chunks) < 1 << 16:
            self._chunks[chunk] = cost
        return cost

    def _blend(self, a: float, b: float) -> float:
        p = self.efficiencies.blend
        return float((a**p + b**p) ** (1.0 / p))
