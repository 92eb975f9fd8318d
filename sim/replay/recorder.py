"""Record of a replay: rows of numbers, held flat in memory or written to disk on the way."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pagecast.sim.core.events import Event, run_length
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.replay.kv_event_file import KvEventFile
from pagecast.sim.replica.observer import Observer
from pagecast.traces.arrays import Ints

STEP_COLUMNS = (
    "step",
    "steps",
    "start_ns",
    "end_ns",
    "decode_n",
    "decode_ctx",
    "decode_max",
    "prefill_n",
    "prefill_tokens",
    "running",
    "waiting",
    "used_blocks",
)
COUNT_COLUMNS = (
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "external_tokens",
    "disk_tokens",
    "partial_tokens",
    "reused_tokens",
    "recomputed_tokens",
    "preemptions",
    "queue_depth",
)
REQUEST_COLUMNS = (
    "row",
    "arrival_ns",
    "admitted_ns",
    "first_token_ns",
    "finished_ns",
    *COUNT_COLUMNS,
    "state",
)
STATES = (State.FINISHED, State.CANCELLED, State.REJECTED)
_FLUSH_ROWS = 1 << 16


class Recorder(Observer):
    """Collects requests, steps and events of one replica.

    `out`: a folder that gets `steps.parquet` in pieces while the replay goes on, and `events.parquet` and
    `kv_events.jsonl` where `scheduler` has a log and a stream of KV events. `keep_steps`: hold the steps in
    memory as well. Requests are always held, 128 bytes each.
    """

    def __init__(
        self, *, keep_steps: bool = False, out: Path | None = None, scheduler: Scheduler | None = None
    ) -> None:
        self.peak_used_blocks = 0
        self.most_tokens = 0  # in one step
        self.most_requests = 0  # decoding at once
        self.most_running = 0
        self.step_count = 0
        self.request_count = 0  # that have ended
        self.reasons: dict[int, str] = {}
        self._requests = array("q")
        self._steps = array("q")
        self._written = 0  # how much of it the file has, where both are kept
        self._keep = keep_steps
        self._step_file = _Rows(out / "steps.parquet", STEP_COLUMNS) if out else None
        self._notes_steps = keep_steps or out is not None
        self._events = None if scheduler is None else scheduler.events  # emptied here
        self._event_file: _Events | None = None
        self._kv_events: KvEventFile | None = None
        if out is not None and scheduler is not None:
            self._event_file = _Events(out / "events.parquet")
            if scheduler.log.kv is not None:
                self._kv_events = KvEventFile(out / "kv_events.jsonl", scheduler.log.kv)

    def step(self, plan: StepPlan, outcome: Outcome, start_ns: int, end_ns: int) -> None:
        """Notes a step, or a fast-forwarded row of them, from its plan to the device's end."""
        used = plan.used_blocks
        if used > self.peak_used_blocks:
            self.peak_used_blocks = used
        self.step_count += plan.steps
        tokens = n = plan.decode_n
        for computed, _ in plan.prefill:
            tokens += computed
        if tokens > self.most_tokens:
            self.most_tokens = tokens
        if n > self.most_requests:
            self.most_requests = n
        if plan.running > self.most_running:
            self.most_running = plan.running
        if self._notes_steps:
            self._steps.extend(
                (
                    plan.step,
                    plan.steps,
                    start_ns,
                    end_ns,
                    n,
                    plan.decode_ctx,
                    plan.decode_max,
                    len(plan.prefill),
                    tokens - n,
                    plan.running,
                    plan.waiting,
                    used,
                )
            )
            if self._step_file is not None:
                self._write_away()

    def stopped(self, used_blocks: int) -> None:
        """Notes the blocks that requests hold where the replica is lost."""
        self.peak_used_blocks = max(self.peak_used_blocks, used_blocks)

    def _write_away(self) -> None:
        """Writes steps and events to their files where there are many, and KV events."""
        if len(self._steps) - self._written >= _FLUSH_ROWS * len(STEP_COLUMNS):
            self._flush_steps()
        if self._events is not None and len(self._events) >= _FLUSH_ROWS:
            self._flush_events()
        if self._kv_events is not None:
            self._kv_events.flush()

    def ended(self, request: Request, now: int) -> None:
        """Notes a request that has ended, whichever way."""
        self.request_count += 1
        self._requests.extend(
            (
                request.index,
                request.arrival_ns,
                request.admitted_ns,
                request.first_token_ns,
                request.finished_ns,
                request.prompt_tokens,
                request.output_tokens,
                request.cached_tokens,
                request.external_tokens,
                request.disk_tokens,
                request.partial_tokens,
                request.reused_tokens,
                request.recomputed_tokens,
                request.preemptions,
                request.queue_depth,
                STATES.index(request.state),
            )
        )
        if request.reason:
            self.reasons[request.index] = request.reason

    def requests(self) -> pd.DataFrame:
        """Every request that ended, in the trace's order; times in nanoseconds, -1 for never."""
        rows = self.request_rows()
        return request_frame(rows[np.argsort(rows[:, 0], kind="stable")])

    def request_rows(self) -> Ints:
        """Every request that ended, in that order, with the columns `REQUEST_COLUMNS`."""
        return np.frombuffer(self._requests, dtype=np.int64).reshape(-1, len(REQUEST_COLUMNS))

    def steps(self) -> pd.DataFrame:
        """The steps held in memory, in order."""
        rows = np.frombuffer(self._steps, dtype=np.int64).reshape(-1, len(STEP_COLUMNS))
        return pd.DataFrame(dict(zip(STEP_COLUMNS, rows.T.copy(), strict=True)), copy=False)

    def close(self) -> None:
        """Writes away what is left and closes the files."""
        if self._step_file is not None:
            self._flush_steps()
            self._step_file.close()
        if self._event_file is not None:
            self._flush_events()
            self._event_file.close()
        if self._kv_events is not None:
            self._kv_events.close()

    def _flush_steps(self) -> None:
        assert self._step_file is not None
        rows = np.array(self._steps[self._written :], dtype=np.int64).reshape(-1, len(STEP_COLUMNS))
        self._step_file.write(rows)
        if self._keep:
            self._written = len(self._steps)
        else:
            self._steps = array("q")

    def _flush_events(self) -> None:
        assert self._event_file is not None
        if self._events:
            self._event_file.write(self._events)
            self._events.clear()


def request_frame(rows: Ints) -> pd.DataFrame:
    """Rows of `Recorder.request_rows` as a table."""
    return pd.DataFrame(dict(zip(REQUEST_COLUMNS, rows.T.copy(), strict=True)), copy=False)


class _Rows:
    """A parquet file of whole-number columns, written a row group at a time."""

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self._writer = pq.ParquetWriter(path, pa.schema([(name, pa.int64()) for name in columns]))

    def write(self, rows: Any) -> None:
        if len(rows):
            self._writer.write_table(pa.table(dict(zip(self.columns, rows.T.copy(), strict=True))))

    def close(self) -> None:
        self._writer.close()


class _Events:
    """A parquet file of events: step, kind, request, run-length coded blocks, detail, KV group."""

    def __init__(self, path: Path) -> None:
        text = pa.dictionary(pa.int32(), pa.string())
        self._schema = pa.schema(
            [
                ("step", pa.int64()),
                ("kind", text),
                ("request", pa.string()),
                ("blocks", pa.string()),
                ("detail", pa.string()),
                ("group", pa.int32()),
            ]
        )
        self._writer = pq.ParquetWriter(path, self._schema)

    def write(self, events: list[Event]) -> None:
        table = pa.table(
            {
                "step": [event.step for event in events],
                "kind": pa.array([event.kind.value for event in events]).dictionary_encode(),
                "request": [event.request for event in events],
                "blocks": [run_length(event.blocks) for event in events],
                "detail": [event.detail for event in events],
                "group": [event.group for event in events],
            },
            schema=self._schema,
        )
        self._writer.write_table(table)

    def close(self) -> None:
        self._writer.close()
