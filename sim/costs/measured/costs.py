"""`MeasuredCosts`: step costs composed of measured operations."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.decode_line import FEMTO, DecodeLine
from pagecast.sim.costs.measured.corrections import MEASURED, Corrections
from pagecast.sim.costs.measured.grid import extended
from pagecast.sim.costs.measured.host import HOST, HostTimes
from pagecast.sim.costs.measured.known_errors import KNOWN, like_of
from pagecast.sim.costs.measured.lines import ContextPieces
from pagecast.sim.costs.measured.operations import Operations
from pagecast.sim.costs.measured.ragged import RaggedPieces
from pagecast.sim.costs.measured.spread import KNOWN_HOST, UNKNOWN_HOST, spread_of
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.machine.graphs import capture_sizes
from pagecast.sim.note import CautionNote, Note
from pagecast.traces.arrays import Floats

# The errors of mean TPOT, E2E and TTFT in two recorded runs of a model with sliding windows, in percent.
WINDOWED_PERCENTS = {"tpot_percent": 32, "e2e_percent": 30, "ttft_percent": 26}
_FS = 1e15  # femtoseconds in a second
_TABLE = 16384  # token counts whose time is looked up
_MOST_CHUNKS = 1 << 16
_SUSTAINED = 2048  # rows; products of more were measured at a GPU's power limit
# Mean contexts between which decode time is a line.
_CONTEXTS = np.array([0, *(2**power - 1 for power in range(7, 18))], np.float64)


class MeasuredCosts(StepCosts):
    """Costs of a model composed of `operations`; beyond the measured sizes they are extrapolated in a line.

    `pipeline_depth` 1 hides the host's time. Steps of up to the last of `graph_sizes` tokens are padded to
    these. `misfits`: calibrations that do not fit, by name with the reason. `corrections`, where they were
    fitted, stretch the device time and add to each step. `host_known`: `host` was measured where it is used.
    """

    def __init__(
        self,
        operations: Operations,
        *,
        pipeline_depth: int = 0,
        host: HostTimes = HOST,
        graph_sizes: tuple[int, ...] = tuple(capture_sizes(256)),
        misfits: tuple[tuple[str, str], ...] | None = None,
        corrections: Corrections | None = None,
        host_known: bool = False,
    ) -> None:
        self.name = corrections.name if corrections else MEASURED
        self.corrections = corrections
        self.spread = spread_of(
            operations.table.engine,
            operations.gpu,
            operations.tp,
            link_known=operations.link is not None,
            selective=operations.selective,
        )
        self.host_spread = KNOWN_HOST if host_known else UNKNOWN_HOST
        self._host_known = host_known
        self.operations, self.pipeline_depth, self.host = operations, pipeline_depth, host
        self._misfits = misfits
        self._prompt = corrections.prompt if corrections else 1.0
        self._added_fs = round(corrections.step_s * _FS) if corrections else 0
        self._sizes = np.array(graph_sizes)
        self._sizes_end = graph_sizes[-1] if graph_sizes else 0
        model, gpus = operations.model, operations.tp
        layers = model.layers
        exposed = 0.0 if pipeline_depth else 1.0
        self._prompt_step_fs = round(exposed * host.prompt_step * _FS)
        self._ungraphed_fs = round(exposed * host.ungraphed_layer * layers * _FS)
        sparse = model.moe.layers if model.moe else 0
        # The host launches nothing while it prepares a step with prompts, and the head runs after all layers.
        engine = operations.table.engine
        alone = engine == "vllm" and gpus == 1
        least = pipeline_depth > 0 and alone
        self._apart = least and not sparse  # launches of experts were measured with the rest of a step
        launch_s = host.launch_s(engine, layers, sparse, gpus, least=self._apart)
        self._launch_ns = round((launch_s + exposed * host.prompt_step) * 1e9)
        graphed_s = layers * host.graphed_layer + exposed * host.prompt_step
        self._graphed_ns = round(graphed_s * 1e9) if alone else 0
        self._least_ns = round(host.ahead * 1e9) if least else 0
        self._hot = host.hot
        self._busy = host.busy if pipeline_depth else 0.0
        self._host_step_ns = round(host.step_s(gpus) * 1e9)
        self._host_request_ns = round(host.request_s(gpus, operations.kv_groups) * 1e9)
        self._row_times, self._head_times = operations.row_seconds(), operations.head_seconds()
        every = np.arange(_TABLE + 1)
        self._rows: list[int] = self._femtoseconds(self._padded(every), self._row_times)
        self._reading: list[int] = self._femtoseconds(every, operations.reading_seconds(self._row_times))
        self._heads: list[int] = self._femtoseconds(every, self._head_times)
        each = np.array(self._rows[_SUSTAINED:]) / every[_SUSTAINED:]
        self._best_fs: list[float] = np.minimum.accumulate(each).tolist()
        self._lines: dict[int, ContextPieces] = {}
        self._whole_lines: dict[int, ContextPieces] = {}
        self._chunks: dict[tuple[int, int], int] = {}
        self._tiles()

    def _tiles(self) -> None:
        """Femtoseconds of decoding requests beside prompts, in a kernel that computes both."""
        prompt = self.operations.prompt
        self._least_fs = round(sum(layers * p.least_s for layers, _, p in prompt) * _FS)
        full = [(layers, p) for layers, window, p in prompt if not window]
        self._exposed = max((p.exposed for _, _, p in prompt), default=0.0)
        self._tile_fs = round(sum(layers * p.tile_seconds(1) for layers, p in full) * _FS)
        self._span_fs = round(sum(layers * p.span_seconds(1) for layers, p in full) * _FS)
        self._window_tiles = [
            (window, round(layers * p.tile_seconds(1) * _FS)) for layers, window, p in prompt if window
        ]
        self._narrow = min((p.narrow for _, _, p in prompt), default=0)
        self._narrow_share = max((p.narrow_share for _, _, p in prompt), default=1.0)

    def corrected(self, corrections: Corrections | None) -> MeasuredCosts:
        """The same with other corrections."""
        return self._with(self.host, corrections)

    def on_host(self, factor: float) -> MeasuredCosts:
        """The same on a host that takes `factor` times as long for a synchronous step."""
        return self._with(self.host.slower(factor), self.corrections)

    def on_drawn_host(self, factor: float) -> MeasuredCosts:
        """The same on a host that takes `factor` times as long for all that it does."""
        return self._with(self.host.slower(factor).launching(factor), self.corrections)

    def _with(self, host: HostTimes, corrections: Corrections | None) -> MeasuredCosts:
        return MeasuredCosts(
            self.operations,
            pipeline_depth=self.pipeline_depth,
            host=host,
            graph_sizes=tuple(self._sizes.tolist()),
            misfits=self._misfits,
            corrections=corrections,
            host_known=self._host_known,
        )

    # -- the interface ---------------------------------------------------------------------------

    def device_ns(self, batch: Batch) -> int:
        """Device time of a step with prompt chunks: all rows in one pass, attention by kind."""
        n, ctx, longest, prefill, after = batch
        tokens, attention, widest, read, chunks = n, 0, 0, 0, self._chunks
        for chunk in prefill:
            size, context = chunk
            tokens += size
            cost = chunks.get(chunk)
            attention += self._chunk_fs(size, context) if cost is None else cost
            if size > widest:
                widest = size
            if size + context > longest:
                longest = size + context
        span = self._span_fs * longest
        if n:
            read, tiles = self._decode_fs(n, ctx), self._tile_fs * ctx
            for window, tile in self._window_tiles:
                tiles += tile * min(ctx, window * n)
            if widest <= self._narrow:
                tiles, span = round(tiles * self._narrow_share), round(span * self._narrow_share)
            attention += max(read, tiles) + round(self._exposed * min(read, tiles))
        else:
            attention += self._least_fs
        total = max(attention, span)
        rows = self._rows_fs(tokens)
        if after:
            total += round(rows * self._hot * min(after / tokens, 1.0))
        total += rows + self._heads_fs(n + len(prefill))
        # Lower clocks slow arithmetic down, but neither the reading of weights nor that of contexts.
        read += self._reading[min(tokens, _TABLE)]
        slower = round(max(total - read, 0) * self._busy)
        total += max(slower - self._held_fs(tokens), 0) + self._prompt_step_fs
        if tokens > self._sizes_end:
            total += self._ungraphed_fs
        if self.corrections is not None:
            total = max(round(total * self._prompt) + self._added_fs, 0)
        return total // FEMTO

    def launch_ns(self, batch: Batch) -> int:
        """Time to launch a step with prompts: kernel by kernel, or attention alone between CUDA graphs."""
        tokens, requests = batch.decode_n, batch.decode_n + len(batch.prefill)
        for chunk in batch.prefill:
            tokens += chunk[0]
        least_ns = self._host_least_ns(requests)
        if tokens <= self._sizes_end:
            return least_ns + self._graphed_ns
        return self._apart * least_ns + self._launch_ns + self._heads_fs(requests) // FEMTO

    def _host_least_ns(self, requests: int) -> int:
        """Least time of a step that is planned ahead, but for launches of layers; 0 where it is not known."""
        return self._least_ns and self._least_ns + requests * self._host_request_ns

    def decode_line(self, n: int) -> DecodeLine:
        """Device time of a pure decode step of `n` requests; kept once computed."""
        return self._whole_lines.get(n) or self._make_whole_line(n)

    def host_ns(self, requests: int) -> int:
        """CPU time a step of `requests` requests adds when nothing overlaps it."""
        return self._host_step_ns + requests * self._host_request_ns

    def arrival_ns(self, input_tokens: int) -> int:
        """CPU time between steps for one arriving request."""
        return round((self.host.arrival + self.host.arriving_token * input_tokens) * 1e9)

    def expected_error(self) -> Note:
        """Errors on runs that fitted nothing, and the calibrations that do not fit; or what corrects them."""
        table = self.operations.table
        if self.corrections is not None:
            corrections = self.corrections
            return Note(
                "corrected_costs",
                engine=table.engine,
                engine_version=table.version,
                gpu=table.gpu,
                sources=tuple(str(source["name"]) for source in corrections.sources),
                requests=sum(int(source["requests"]) for source in corrections.sources),
            )
        like = like_of(self.operations)
        known = KNOWN.get(like)
        kind = CautionNote if self.operations.windowed and known is None else Note
        return kind(
            "measured_costs",
            misfits=self._misfits,
            engine=table.engine,
            engine_version=table.version,
            gpu=table.gpu,
            like=tuple(like),
            known=None if known is None else tuple(known),
            windowed=self.operations.windowed,
            **(WINDOWED_PERCENTS if self.operations.windowed else {}),
        )

    # -- the parts -------------------------------------------------------------------------------

    def _padded(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens up to the next CUDA graph size where there is one."""
        if not len(self._sizes):
            return tokens
        slot = np.minimum(np.searchsorted(self._sizes, tokens), len(self._sizes) - 1)
        return np.where(tokens <= self._sizes[-1], self._sizes[slot], tokens)

    def _femtoseconds(self, tokens: np.ndarray, times: Floats) -> list[int]:
        seconds = extended(tokens, self.operations.rows, times)
        whole: list[int] = np.rint(seconds * _FS).astype(np.int64).tolist()
        return whole

    def _rows_fs(self, tokens: int) -> int:
        if tokens <= _TABLE:
            return self._rows[tokens]
        return self._femtoseconds(np.array([tokens]), self._row_times)[0]

    def _held_fs(self, tokens: int) -> int:
        """The part of published times of so many rows that lower clocks cause."""
        if tokens <= _SUSTAINED:
            return 0
        return self._rows_fs(tokens) - round(tokens * self._best_fs[min(tokens, _TABLE) - _SUSTAINED])

    def _heads_fs(self, rows: int) -> int:
        if rows <= _TABLE:
            return self._heads[rows]
        return self._femtoseconds(np.array([rows]), self._head_times)[0]

    def _chunk_fs(self, tokens: int, context: int) -> int:
        cost = round(self.operations.chunk_seconds(tokens, context) * _FS)
        if len(self._chunks) < _MOST_CHUNKS:
            self._chunks[tokens, context] = cost
        return cost

    def _decode_fs(self, n: int, ctx: int) -> int:
        """Decode attention alone."""
        line = self._lines.get(n) or self._make_line(n)
        piece = line.pieces[bisect_right(line.starts, ctx) - 1]
        return piece.base + piece.per_ctx * ctx - self._fixed_fs(n)

    def _fixed_fs(self, n: int) -> int:
        return self._rows_fs(n) + self._heads_fs(n)

    def _make_whole_line(self, n: int) -> ContextPieces:
        line = self._lines.get(n) or self._make_line(n)
        if self.corrections is not None:
            line = line.scaled(self.corrections.decode).longer(self._added_fs)
        if self._least_ns:
            line = line.at_least(self._host_least_ns(n) * FEMTO)
        self._whole_lines[n] = line
        return line

    def _make_line(self, n: int) -> ContextPieces:
        times = self.operations.decode_seconds(n, _CONTEXTS) * _FS
        slopes = np.diff(times) / np.diff(_CONTEXTS)
        bases = times[:-1] - slopes * _CONTEXTS[:-1]
        fixed = self._fixed_fs(n)
        pieces = [
            DecodeLine(n, fixed + round(base), round(slope / n), 0)
            for base, slope in zip(bases.tolist(), slopes.tolist(), strict=True)
        ]
        starts = [int(context) * n for context in _CONTEXTS[:-1]]
        line = ContextPieces.of(starts, pieces)
        cap, tail = self.operations.raggedness(n)
        if cap:
            line = RaggedPieces.around(line, cap, tail)
        self._lines[n] = line
        return line
