"""Recorded runs: what a real engine did, step by step. Calibration and validation speak this format.

A run is a folder of four files (`events.jsonl.gz` and `transfers.jsonl.gz` may stand beside them):

- `meta.json`: engine, version, GPU, model, configuration, `usable_blocks`; `format` (1 where absent).
- `inputs.jsonl.gz`: a request per line: `arrival_s`, `input_tokens`, `output_tokens`, perhaps `priority`; a
  prompt that shares content has `block_ids` with `block_ids_tokens` (equal id: equal tokens; the prompt is
  their concatenation, cut) or, where blocks can't say it, `spans` of [content, offset, length].
- `requests.csv.gz`: one request per row: when it was submitted, got its first token and finished.
- `steps.jsonl.gz`: one step per line: when it ran and what it computed; `run` names a section with its own
  clock. A line without decodes and prompt chunks is a plan that found nothing to compute.
- `transfers.jsonl.gz`: the transfers to and from a host tier, in the order in which the scheduler was told
  of their ends (see `transfers.py`).

A run of steady shapes, made to calibrate from, has no requests and lacks the two files.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.documents import read_json
from pagecast.sim.runs.journal import segments, unfold
from pagecast.sim.runs.recorded_requests import HUGE, LATEST_S, has, lines, read_requests
from pagecast.sim.runs.transfers import FILE as TRANSFERS
from pagecast.sim.runs.transfers import RecordedTransfer, read_transfers
from pagecast.traces.arrays import Floats, Ints
from pagecast.traces.schema import Spans, Trace

FORMAT = 1

_MOST_META_BYTES = 16 << 20
_LATE_S = 1.0  # tokens may be handed out a little after their step's end
_ROUNDING = 1e-9
_TIMES = ("start_s", "end_s", "sched_s")
_COUNTS = ("decode_n", "decode_ctx", "decode_max", "running", "waiting")
_STEP_KEYS = (*_TIMES, *_COUNTS, "prefill", "kv_usage")


@dataclass(frozen=True)
class Steps:
    """Steps as columns, one element a step; times in nanoseconds of the section's clock.

    Chunk `j` of step `i`'s prefill is row `prefill_start[i] + j` of `prefill_tokens` (computed in the
    step) and `prefill_ctx` (already there). `section[i]` numbers `sections`, runs with clocks of their
    own; a run without sections has the one section "".
    """

    start_ns: Ints
    end_ns: Ints
    sched_ns: Ints
    decode_n: Ints
    decode_ctx: Ints
    decode_max: Ints
    running: Ints
    waiting: Ints
    kv_usage: Floats
    prefill_start: Ints
    prefill_tokens: Ints
    prefill_ctx: Ints
    section: Ints
    sections: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.start_ns)

    def take(self, rows: Ints) -> Steps:
        """The steps of the given rows, in that order."""
        counts = np.diff(self.prefill_start)[rows]
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        chunks = np.repeat(self.prefill_start[rows] - start[:-1], counts) + np.arange(start[-1])
        columns = {name: value for name, value in vars(self).items() if name != "sections"}
        columns |= {name: columns[name][rows] for name in columns if not name.startswith("prefill_")}
        columns["prefill_start"] = start
        columns["prefill_tokens"] = self.prefill_tokens[chunks]
        columns["prefill_ctx"] = self.prefill_ctx[chunks]
        return Steps(sections=self.sections, **columns)

    def prefill(self, index: int) -> tuple[tuple[int, int], ...]:
        """The prompt chunks of one step, in the order recorded."""
        a, b = int(self.prefill_start[index]), int(self.prefill_start[index + 1])
        return tuple(zip(self.prefill_tokens[a:b].tolist(), self.prefill_ctx[a:b].tolist(), strict=True))

    def batch(self, index: int) -> Batch:
        """The shape of one step, as cost models take it."""
        counts = (self.decode_n[index], self.decode_ctx[index], self.decode_max[index])
        before = self.prefill(index - 1) if index and self.section[index] == self.section[index - 1] else ()
        after = int(self.decode_n[index - 1]) + sum(chunk[0] for chunk in before) if before else 0
        return Batch(int(counts[0]), int(counts[1]), int(counts[2]), self.prefill(index), after)


@dataclass(frozen=True)
class RecordedRun:
    """One recorded run. `requests` has the columns of `recorded_requests` and perhaps more; `inputs` those of
    a trace. Both are empty for a run of steady shapes. `spans` are the prompts where they share content;
    `parts` are the runs that this one was joined from, if it was, one a section of its steps. `idle` are
    the plans that computed nothing, where they were recorded; `steps` are all others."""

    name: str
    folder: Path
    meta: dict[str, Any]
    steps: Steps
    requests: pd.DataFrame
    inputs: pd.DataFrame
    spans: Spans | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    parts: tuple[RecordedRun, ...] = ()
    idle: Steps | None = None
    transfers: tuple[RecordedTransfer, ...] = ()

    @property
    def cut(self) -> bool:
        """Whether no server ended the recording: it was killed, could not write, or still runs."""
        return bool(self.meta.get("cut"))

    @property
    def pipeline_depth(self) -> int:
        """1 where the engine scheduled a step before its predecessor had ended, else 0."""
        return int(bool(self.meta.get("config", {}).get("async_scheduling")))

    @property
    def submitted_ns(self) -> Ints:
        """When the engine was given each request, in request order."""
        return to_ns(self.requests["submitted_s"].to_numpy(np.float64))

    @property
    def arrival_ns(self) -> Ints:
        """When each request came, from which latencies count, in request order."""
        return to_ns(self.requests["arrival_s"].to_numpy(np.float64))

    def trace(self, arrival: str = "arrival") -> Trace:
        """The run's requests as a trace, arriving when they came ("arrival") or when the engine was given
        them ("submitted"). Cancellations keep their place in time."""
        if arrival not in ("arrival", "submitted"):
            raise BadInput(f"arrival must be 'arrival' or 'submitted', not {arrival!r}")
        table = self.inputs.copy()
        table["arrival_s"] = self.requests[f"{arrival}_s"].to_numpy(np.float64)
        if "cancelled_s" in self.requests:
            table["cancel_after_s"] = self.requests["cancelled_s"].astype(float) - table["arrival_s"]
        return Trace(self.name, table, self.spans)

    @classmethod
    def load(cls, folder: str | Path) -> RecordedRun:
        """Reads and checks a run's folder. Raises `BadInput` naming the file, line and field at fault.

        A folder that a server still writes to, or was killed while it did, is read as far as it goes.
        """
        path = Path(folder)
        if not segments(path):
            return cls._load(path)
        with tempfile.TemporaryDirectory(prefix="pagecast-run-") as place:
            unfold(path, Path(place))
            run = cls._load(Path(place))
        return replace(run, name=str(run.meta.get("name") or path.name), folder=path)

    @classmethod
    def _load(cls, path: Path) -> RecordedRun:
        if not (path / "meta.json").is_file():
            raise BadInput(f"{path}: no meta.json: a recorded run is a folder with one, and steps.jsonl.gz")
        meta = _read_meta(path / "meta.json")
        steps, idle = _computing(path / "steps.jsonl.gz", _read_steps(path / "steps.jsonl.gz"))
        depth = int(bool(meta.get("config", {}).get("async_scheduling")))
        _check_order(path / "steps.jsonl.gz", steps, depth)
        requests, inputs, spans = read_requests(path)
        _check_end(path / "steps.jsonl.gz", steps, requests)
        has_events = has(path, "events.jsonl.gz")
        events = [line for _, line in lines(path / "events.jsonl.gz")] if has_events else []
        name = str(meta.get("name") or path.name)
        transfers = read_transfers(path)
        return cls(name, path, meta, steps, requests, inputs, spans, events, idle=idle, transfers=transfers)

    def write(self, folder: str | Path) -> Path:
        """Writes the run in the same format, creating the folder; returns it. Times keep nanoseconds."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        meta = {"format": FORMAT, **self.meta}
        (path / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        lines = list(_step_lines(self.steps))
        if self.idle is not None:
            lines = sorted([*lines, *_step_lines(self.idle)], key=_place_of(self.steps.sections))
        _write_lines(path / "steps.jsonl.gz", iter(lines))
        if len(self.requests):
            with _zip(path / "requests.csv.gz") as out:
                self.requests.to_csv(out, index=False, lineterminator="\n")
            _write_lines(path / "inputs.jsonl.gz", _input_lines(self.inputs, self.spans))
        if self.events:
            _write_lines(path / "events.jsonl.gz", iter(self.events))
        if self.transfers:
            _write_lines(path / TRANSFERS, (transfer.line() for transfer in self.transfers))
        return path


def to_ns(seconds: Floats) -> Ints:
    """Seconds as whole nanoseconds, rounded."""
    return np.rint(np.asarray(seconds, np.float64) * 1e9).astype(np.int64)


def _read_meta(path: Path) -> dict[str, Any]:
    meta = read_json(path, _MOST_META_BYTES, "give the folder of a recorded run")
    if not isinstance(meta, dict):
        raise BadInput(f"{path}: must hold an object")
    if not isinstance(meta.get("config", {}), dict):
        raise BadInput(f"{path}: 'config' is {meta['config']!r}, must be an object of engine options")
    version = meta.get("format", FORMAT)
    if version != FORMAT:
        raise BadInput(f"{path}: run format {version!r}, this pagecast reads {FORMAT}: record the run again")
    config = meta.get("config", {})
    size, share = config.get("tensor_parallel_size", 1), config.get("gpu_memory_utilization")
    if type(size) is not int or size < 1:
        raise BadInput(f"{path}: config: 'tensor_parallel_size' is {size!r}, must be a whole number from 1")
    if share is not None and not (type(share) in (int, float) and 0 < share <= 1):
        wrong = f"'gpu_memory_utilization' is {share!r}, must be a number above 0 and at most 1"
        raise BadInput(f"{path}: config: {wrong}")
    return meta


class _Section(NamedTuple):
    names: dict[str, int]
    column: list[int]


def _read_steps(path: Path) -> Steps:
    columns: dict[str, list[Any]] = {key: [] for key in _STEP_KEYS if key != "prefill"}
    starts, tokens, there = [0], list[int](), list[int]()
    section = _Section({}, [])
    for number, line in lines(path):
        try:
            _check_step(line)
        except ValueError as error:
            raise BadInput(f"{path} line {number}: {error}") from None
        for key, column in columns.items():
            column.append(line[key])
        tokens += [chunk[0] for chunk in line["prefill"]]
        there += [chunk[1] for chunk in line["prefill"]]
        starts.append(len(tokens))
        section.column.append(section.names.setdefault(str(line.get("run", "")), len(section.names)))
    if not section.column:
        raise BadInput(f"{path}: holds no steps")
    times = {key.replace("_s", "_ns"): to_ns(np.array(columns.pop(key), np.float64)) for key in _TIMES}
    usage = np.array(columns.pop("kv_usage"), np.float64)
    counts = {key: np.array(column, np.int64) for key, column in columns.items()}
    prefill = [np.array(column, np.int64) for column in (starts, tokens, there)]
    numbers = np.array(section.column, np.int64)
    return Steps(
        **times,
        **counts,
        kv_usage=usage,
        prefill_start=prefill[0],
        prefill_tokens=prefill[1],
        prefill_ctx=prefill[2],
        section=numbers,
        sections=tuple(section.names),
    )


def _check_step(line: dict[str, Any]) -> None:
    """Raises `ValueError` with what is wrong with one step's line."""
    for key in _STEP_KEYS:
        if key not in line:
            raise ValueError(f"no '{key}'")
    for key in (*_TIMES, "kv_usage"):
        if type(line[key]) not in (int, float) or not abs(line[key]) < LATEST_S:
            raise ValueError(f"'{key}' is {line[key]!r}, must be a finite number below {LATEST_S:g}")
    if not 0 <= line["kv_usage"] <= 1 + _ROUNDING:
        raise ValueError(f"'kv_usage' is {line['kv_usage']!r}, must be a share of the blocks, from 0 to 1")
    for key in _COUNTS:
        if type(line[key]) is not int or not 0 <= line[key] < HUGE:
            raise ValueError(f"'{key}' is {line[key]!r}, must be a whole number of at least 0, below 2**53")
    if line["end_s"] < line["start_s"] or line["sched_s"] < 0:
        key = "sched_s" if line["sched_s"] < 0 else "end_s - start_s"
        raise ValueError(f"negative duration: '{key}'")
    if not isinstance(line["prefill"], list) or not all(
        isinstance(chunk, list)
        and len(chunk) == 2
        and all(type(v) is int and v < HUGE for v in chunk)
        and chunk[0] >= 1
        and chunk[1] >= 0
        for chunk in line["prefill"]
    ):
        raise ValueError("'prefill' must be a list of [tokens computed, tokens already there]")
    for key in ("decode_ctx", "decode_max"):
        if line[key] and not line["decode_n"]:
            raise ValueError(f"'{key}' is {line[key]}, but nothing decodes")


def _computing(path: Path, steps: Steps) -> tuple[Steps, Steps | None]:
    """The steps that compute something, and apart from them those that do not, if there are any."""
    computes = (steps.decode_n > 0) | (np.diff(steps.prefill_start) > 0)
    if not computes.any():
        raise BadInput(f"{path}: no step computes anything: there are no decodes and no prefill")
    if computes.all():
        return steps, None
    return steps.take(np.flatnonzero(computes)), steps.take(np.flatnonzero(~computes))


def _check_order(path: Path, steps: Steps, depth: int) -> None:
    """A step starts when the step `depth` + 1 before it has ended, and not before its predecessor."""
    for apart in range(1, depth + 2):
        same = steps.section[apart:] == steps.section[:-apart]
        earlier = steps.start_ns[:-apart] if apart <= depth else steps.end_ns[:-apart]
        bad = np.flatnonzero(same & (steps.start_ns[apart:] < earlier))
        if len(bad):
            first = int(bad[0]) + apart
            raise BadInput(
                f"{path} line {first + 1}: overlaps the step {apart} before it "
                f"(start_s {steps.start_ns[first] / 1e9:.6f}); "
                + ("one step may be in flight" if depth else "only a run with config.async_scheduling may")
            )


def _check_end(path: Path, steps: Steps, requests: pd.DataFrame) -> None:
    """Steps must go on for as long as requests were served."""
    end_s = float(steps.end_ns.max()) / 1e9
    later = requests["finish_s"].to_numpy(np.float64) > end_s + _LATE_S
    if later.any():
        raise BadInput(
            f"{path}: columns are short: the steps end at {end_s:.3f} s, and {int(later.sum()):,} requests "
            f"finish later, up to {float(requests['finish_s'].max()):.3f} s"
        )


def _step_lines(steps: Steps) -> Iterator[dict[str, Any]]:
    for i in range(len(steps)):
        name = steps.sections[int(steps.section[i])]
        times = {key: int(getattr(steps, key.replace("_s", "_ns"))[i]) / 1e9 for key in _TIMES}
        counts = {key: int(getattr(steps, key)[i]) for key in _COUNTS}
        line = {**times, **counts, "prefill": steps.prefill(i), "kv_usage": float(steps.kv_usage[i])}
        yield {"run": name, **line} if name else line


def _place_of(sections: tuple[str, ...]) -> Callable[[dict[str, Any]], tuple[int, float]]:
    """A step's place among the lines of a file: by section, then by its start."""
    return lambda line: (sections.index(line.get("run", "")), line["start_s"])


def _input_lines(inputs: pd.DataFrame, spans: Spans | None) -> Iterator[dict[str, Any]]:
    for i, row in enumerate(inputs.to_dict("records")):
        line: dict[str, Any] = {str(key): value for key, value in row.items() if not pd.isna(value)}
        prompt = spans.row(i) if spans is not None else []
        size = prompt[0][2] if prompt else 0
        if prompt and all(offset == 0 for _, offset, _ in prompt) and _even(prompt, size):
            line |= {"block_ids": [content for content, _, _ in prompt], "block_ids_tokens": size}
        elif prompt:
            line["spans"] = prompt
        yield line


def _even(prompt: list[tuple[int, int, int]], size: int) -> bool:
    """Whether the pieces are whole blocks of one size, but for the last, which may be cut."""
    return all(length == size for _, _, length in prompt[:-1]) and prompt[-1][2] <= size


def _zip(path: Path) -> Any:
    # No time stamp inside: the same run gives the same bytes.
    return gzip.GzipFile(path, "wb", compresslevel=6, mtime=0)


def _write_lines(path: Path, lines: Iterator[dict[str, Any]]) -> None:
    with _zip(path) as out:
        for line in lines:
            out.write(json.dumps(line).encode() + b"\n")
