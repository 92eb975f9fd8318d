"""`CalibratedCosts`: step costs as fitted from recorded runs; implements `StepCosts`."""

from __future__ import annotations

from math import sqrt

import numpy as np
import numpy.typing as npt
from pagecast.sim.core.plan import counts_as_decode
from pagecast.sim.costs.calibration import attention_work, trust
from pagecast.sim.costs.calibration.file import MEASURED, Calibration
from pagecast.sim.costs.calibration.line import UnevenLine
from pagecast.sim.costs.calibration.terms import COOLING_STEPS, curve_weights, padded
from pagecast.sim.costs.pieces import WindowLine
from pagecast.sim.costs.step_costs import FEMTO, Batch, DecodeLine
from pagecast.sim.note import Note

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_TABLE = 16384  # token counts whose matrix work is looked up


class CalibratedCosts:
    """The costs of a calibration, or of one of its replicates.

    A step takes host and device time one after the other; their sum is what was fitted. At pipeline depth 1
    the host's part disappears behind the device, and steps with prompts change as `Host` says.
    """

    def __init__(
        self, calibration: Calibration, values: tuple[float, ...] | None = None, *, pipeline_depth: int = 0
    ) -> None:
        c = self.calibration = calibration
        self.pipeline_depth = pipeline_depth
        self.name = c.name
        self._values = values or (*c.curve_ns, *c.terms_ns.values())
        count = len(c.knots)
        self._curve = np.array(self._values[:count])
        self._terms = dict(zip(c.terms_ns, self._values[count:], strict=True))
        self._host_step = round(c.host.step_ns)
        self._host_request = round(c.host.request_ns)
        self._hidden = c.host.launch_ns if pipeline_depth else 0.0
        self._busy = 1.0 + (c.host.busy if pipeline_depth else 0.0)
        self._arrival = self._terms.get("arrival", 0.0)
        self._arriving = self._terms.get("arriving_token", 0.0)
        sizes = c.shape.graph_sizes
        self._prompt_sizes = c.shape.padded_prompts
        every = np.arange(_TABLE + 1)
        self._matrix: list[float] = self._matrix_ns(every, sizes).tolist()
        self._prompt_matrix: list[float] = self._matrix_ns(every, self._prompt_sizes).tolist()
        self._lines: dict[int, DecodeLine] = {}
        self._chunks: dict[tuple[int, int], float] = {}
        self._caps: dict[int, float] = {}
        self._spans: dict[tuple[tuple[int, int], ...], float] = {}
        self._prompt_terms()

    def _prompt_terms(self) -> None:
        """Flat copies of what `device_ns` needs, since it runs for every step with prompts.

        `_eager`: steps with more tokens than any graph are launched kernel by kernel. `_share`: KV heads per
        SM, which turns key blocks on one KV head into key blocks of each SM. `_busy` and `_hidden` are what
        planning ahead changes (see `Host`).
        """
        t, shape = self._terms, self.calibration.shape
        self._sizes_end = self._prompt_sizes[-1] if self._prompt_sizes else 0
        self._request = t.get("request", 0.0)
        self._chunk = t.get("prompt_chunk", 0.0)
        host = self.calibration.host
        planned = host.single_ns if self.pipeline_depth else 0.0
        self._launch = planned or t.get("launch_floor", 0.0)
        self._launch_chunk = 0.0 if planned else self._chunk
        self._eager = not shape.prompt_graphs
        self._beside = t.get("request_beside_prompt", 0.0)
        self._hot = t.get("token_after_prompts", 0.0)
        self._kv = t.get("kv_token", 0.0)
        self._warm = t.get("decode_after_prompts", 0.0) * COOLING_STEPS
        self._first_kv = t.get("first_kv_token", 0.0)
        self._first = attention_work.first_tokens(shape)
        self._shared = t.get("shared_token", 0.0)
        self._short = t.get("short_shared_token", 0.0)
        self._tile = t.get("prompt_tile", 0.0)
        self._light_tile = t.get("light_prompt_tile", self._tile)
        self._prompt_kv = t.get("prompt_kv_token", 0.0)
        self._last_tile = t.get("longest_prompt_tile", 0.0) / attention_work.BLOCK
        self._share = shape.kv_heads / shape.sms
        self._tail = attention_work.tail_tokens(shape)

    # -- the interface ---------------------------------------------------------------------------

    def device_ns(self, batch: Batch) -> int:
        """Device time of a step with prompt chunks."""
        if self._eager:
            batch = _single_tokens_decoding(batch)
            if not batch.prefill:
                return self.decode_line(batch.decode_n).ns(batch.decode_ctx, batch.decode_max)
        n, ctx, longest, prefill, after = batch
        tokens, tiles, keys, largest, chunks = n, 0.0, 0, 0, len(prefill)
        known = self._chunks
        for chunk in prefill:
            cost = known.get(chunk)
            tiles += self._chunk_tiles(chunk) if cost is None else cost
            size = chunk[0]
            tokens += size
            largest = max(largest, size)
            keys = max(keys, size + chunk[1])
        if tokens <= _TABLE:
            total = self._prompt_matrix[tokens]
        else:
            total = float(self._matrix_ns(np.array([tokens]), self._prompt_sizes)[0])
        total += self._prompt_step(tokens, n + chunks) + self._beside * n
        total += self._hot * min(tokens, after)
        # Attention of the decoding requests, then of the prompts (`work`: key blocks of an SM).
        work = tiles * self._share
        if n:
            total += self._kv * (ctx + attention_work.BLOCK / 2 * n + self._spread(n, ctx, longest))
            total += self._first_kv * min(ctx, self._first)
        if self.calibration.shape.tile_schedule and not self._splits(largest):
            read = (ctx / attention_work.BLOCK + n / 2) * self._share
            work += max(0.0, max(longest, keys) / attention_work.BLOCK - work - read)
        elif self._eager:
            work = self._span(prefill)
            light = attention_work.light_share(tokens) * work
            total += (self._light_tile - self._tile) * light
            total += self._prompt_kv * sum([chunk[1] for chunk in prefill])
        total += self._tile * work + self._last_tile * keys
        total += self._chunk * chunks
        return max(round(total * self._busy - self._hidden) - self.host_ns(n + chunks), 0)

    def launch_ns(self, batch: Batch) -> int:
        """Time to launch a step with prompts kernel by kernel; 0 where CUDA graphs are replayed."""
        chunks = sum([chunk[0] > 1 for chunk in batch.prefill])
        tokens = batch.decode_n + sum([chunk[0] for chunk in batch.prefill])
        if not self._launch or not chunks or tokens <= self._sizes_end:
            return 0
        rows = batch.decode_n + len(batch.prefill)
        return max(round(self._launch + self._launch_chunk * chunks) - self.host_ns(rows), 0)

    def decode_line(self, n: int) -> DecodeLine:
        """Device time of a pure decode step of `n` requests; kept once computed."""
        line = self._lines.get(n)
        if line is None:
            line = self._lines[n] = self._make_line(n)
        return line

    def warm_ns(self, after: int) -> int:
        """What the first decode steps after a step with prompts of `after` tokens take more, together."""
        return round(self._warm * sqrt(after))

    def shared_ns(self, tokens: int, requests: int) -> int:
        """Device time that a step saves by context tokens of which others of its requests read the same."""
        each = self._shared
        if self._short:
            each += self._short * attention_work.short_share(self.calibration.shape, tokens, requests)
        # A context that several read is not cheaper than none.
        return round(min(each, self._kv) * tokens)

    def host_ns(self, requests: int) -> int:
        """CPU time a step of `requests` requests adds when nothing overlaps it."""
        return self._host_step + requests * self._host_request

    def arrival_ns(self, input_tokens: int) -> int:
        """CPU time between steps for one arriving request."""
        return round(self._arrival + self._arriving * input_tokens)

    def expected_error(self) -> Note:
        """What was fitted, and the error on a run left out of the fit."""
        not_ahead = bool(self.pipeline_depth) and self.calibration.host.source == MEASURED
        return trust.expected_error(self.calibration, not_ahead=not_ahead)

    def outside(
        self, longest_context: int, most_tokens: int, most_requests: int, block_size: int
    ) -> Note | None:
        """Where a replay left what was fitted; None where it did not.

        What the replay had at most: `longest_context` tokens in a request, `most_tokens` computed in a step,
        `most_requests` decoding in a step; and its block size in tokens.
        """
        return trust.outside(self.calibration, longest_context, most_tokens, most_requests, block_size)

    # -- the parts -------------------------------------------------------------------------------

    def _matrix_ns(self, tokens: Ints, sizes: tuple[int, ...]) -> Floats:
        weights = curve_weights(padded(tokens, sizes), self.calibration.knots)
        return np.asarray(weights @ self._curve, np.float64)

    def _prompt_step(self, tokens: int, requests: int) -> float:
        """What a step with prompts adds by how it is launched."""
        if self._eager and tokens > self._sizes_end:
            return 0.0
        total = self._terms.get("prompt_step", 0.0) + self._request * requests
        if tokens > self._sizes_end > 0:
            total += self._terms.get("ungraphed_step", 0.0)
        return total

    def _splits(self, largest: int) -> bool:
        return bool(attention_work.splits_beside(self.calibration.shape, largest))

    def _spread(self, n: int, ctx: int, longest: int) -> float:
        if not self.calibration.shape.tile_schedule:
            return 0.0
        cap = self._caps.get(n)
        if cap is None:
            cap = float(attention_work.imbalance_cap(self.calibration.shape, np.array(float(n))))
            self._caps[n] = cap
        return min(cap * ctx, self._tail * (longest - ctx / n))

    def _span(self, prefill: tuple[tuple[int, int], ...]) -> float:
        span = self._spans.get(prefill)
        if span is None:
            span = attention_work.prompt_span(self.calibration.shape, prefill)
            if len(self._spans) < 1 << 16:
                self._spans[prefill] = span
        return span

    def _chunk_tiles(self, chunk: tuple[int, int]) -> float:
        tiles = attention_work.chunk_tiles(self.calibration.shape, float(chunk[0]), float(chunk[1]))
        if len(self._chunks) < 1 << 16:
            self._chunks[chunk] = tiles
        return tiles

    def _make_line(self, n: int) -> DecodeLine:
        shape = self.calibration.shape
        known = n <= _TABLE
        matrix = self._matrix[n] if known else float(self._matrix_ns(np.array([n]), shape.graph_sizes)[0])
        fixed = matrix + self._request * n - self.host_ns(n)
        rounding = self._kv * attention_work.BLOCK / 2 * n

        def line(base: float, per_ctx: float, per_max: float) -> DecodeLine:
            return DecodeLine(n, max(round(base * FEMTO), 0), round(per_ctx * FEMTO), round(per_max * FEMTO))

        if not shape.tile_schedule:
            plain = line(fixed + rounding, self._kv, 0.0)
            slope = round(self._first_kv * FEMTO)
            return WindowLine.over(plain, self._first // n, slope) if slope and n <= self._first else plain
        waves = attention_work.even_waves(shape, n)
        even = line(fixed + rounding * waves, self._kv * waves, 0.0)
        cap = float(attention_work.imbalance_cap(shape, np.array(float(n))))
        capped = line(fixed + rounding, self._kv * (1 + cap), 0.0)
        if cap == 0.0:
            return UnevenLine.of(capped, capped, even, attention_work.EVEN_TOKENS)
        tail = line(fixed + rounding, self._kv * (1 - self._tail / n), self._kv * self._tail)
        return UnevenLine.of(tail, capped, even, attention_work.EVEN_TOKENS)


def _single_tokens_decoding(batch: Batch) -> Batch:
    """The batch with each prompt chunk of one token as the decode that it is to a GPU."""
    n, ctx, longest, prefill, after = batch
    contexts = [context for tokens, context in prefill if counts_as_decode(tokens)]
    if not contexts:
        return batch
    chunks = tuple([chunk for chunk in prefill if chunk[0] > 1])
    return Batch(n + len(contexts), ctx + sum(contexts), max(longest, *contexts), chunks, after)
