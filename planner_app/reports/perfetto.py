"""A replay as a trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing: what the replica did when.

The Trace Event Format, JSON object form: times in microseconds, complete events (`X`) for slices, counters
(`C`), instants (`i`), metadata (`M`) for names and order of tracks. Slices of a track never overlap: steps
that were planned while another ran begin where that one ends, and each request takes the lowest slot that is
free from its arrival to its end. Events are written as they are made; a file's order does not matter.
Source: the format's description, "Trace Event Format", sections on events and on the JSON object format.
"""

from __future__ import annotations

import gzip
import heapq
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pagecast.planner_app import console
from pagecast.sim.fleet.simulation import FleetResult
from pagecast.sim.replay import Result
from pagecast.traces.write import replacing

REPLICA, REQUESTS = 1, 2  # processes of the trace; a fleet's replicas follow from 3 on
_ENDINGS = (".json", ".json.gz")
_STEPS = 1  # the thread of steps
_CHUNK = 1 << 15  # rows turned into Python objects at a time

TraceEvent = dict[str, Any]
TableRow = dict[Any, Any]  # of a table, by column


def ready(option: str, path: Path) -> None:
    """Before any work: Errors: BadInput where the trace can't be written, or its ending is not known."""
    console.check_place(option, path, *_ENDINGS)


def write_perfetto(result: Result, path: Path) -> int:
    """Writes a replay with its steps (`Kept.steps`); packed where the name ends in `.gz`.

    Returns the number of events. Errors: BadInput where the file can't be written; it is then as it was.
    """
    with replacing(path) as place, place.open("wb") as file:
        if path.suffix != ".gz":
            return _write(result, file)
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
            return _write(result, packed)


def _write(result: Result, file: Any) -> int:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
    scenario, costs = result.scenario.resolved(), result.summary["costs"]
    other = json.dumps({"trace": result.trace, "scenario": scenario, "costs": costs})
    text.write(f'{{"displayTimeUnit":"ms","otherData":{other},"traceEvents":[')
    count = 0
    for event in events(result):
        text.write(",\n" if count else "\n")
        text.write(json.dumps(event, separators=(",", ":"), allow_nan=False))
        count += 1
    text.write("\n]}\n")
    text.flush()
    text.detach()
    return count


def events(result: Result) -> Iterator[TraceEvent]:
    """Every event: names of tracks, then steps with their counters, then requests."""
    yield _named("process_name", REQUESTS, 0, f"requests of {result.trace}")
    yield _sorted(REQUESTS, 0, "process_sort_index", 1)
    if isinstance(result, FleetResult):
        yield from _replicas(result)
    else:
        name = f"replica: {result.scenario.gpu}, {result.scenario.model}"
        yield from _replica(REPLICA, name, result.steps, result.pool_blocks)
    yield from _requests(result.requests)


def _replicas(result: FleetResult) -> Iterator[TraceEvent]:
    """A process for each replica of a fleet, with marks where it starts, drains or is lost."""
    steps = {str(name): rows for name, rows in result.steps.groupby("replica", sort=False)}
    for number, row in enumerate(_rows(result.replicas)):
        process, name = REQUESTS + 1 + number, str(row["replica"])
        own = steps.get(name, result.steps[:0])
        yield from _replica(process, f"{name}: {row['gpu']}", own, int(row["num_gpu_blocks"]))
        for mark in _rows(result.timeline[result.timeline["replica"] == name]):
            yield {
                "ph": "i",
                "s": "p",
                "name": mark["event"],
                "cat": "replica",
                "pid": process,
                "tid": 0,
                "ts": _us(_ns(mark["time_s"])),
            }


def _replica(process: int, name: str, steps: pd.DataFrame, num_blocks: int) -> Iterator[TraceEvent]:
    """The steps of one replica, in a process of its own."""
    yield _named("process_name", process, 0, name)
    yield _named("thread_name", process, _STEPS, "steps")
    yield _sorted(process, 0, "process_sort_index", 0 if process == REPLICA else process)
    yield from _steps(steps, num_blocks, process)


def _named(what: str, process: int, thread: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _sorted(process: int, thread: int, what: str, index: int) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"sort_index": index}}


def _us(ns: int) -> float:
    """Microseconds; exact to the nanosecond for a hundred days."""
    return ns / 1000


def _steps(steps: pd.DataFrame, num_blocks: int, process: int) -> Iterator[TraceEvent]:
    """A slice per step, or fast-forwarded row of steps, and the counters that change where it begins."""
    free = 0
    counters = _Counters(process)
    for row in _rows(steps):
        start, end = max(row["start_ns"], free), row["end_ns"]
        free = end
        yield {
            "ph": "X",
            "name": _title(row),
            "cat": "prefill" if row["prefill_n"] else "decode",
            "pid": process,
            "tid": _STEPS,
            "ts": _us(start),
            "dur": _us(end - start),
            "args": {
                "step": row["step"],
                "steps": row["steps"],
                "planned_us": _us(row["start_ns"]),
                "decode_requests": row["decode_n"],
                "decode_context_tokens": row["decode_ctx"],
                "prompt_chunks": row["prefill_n"],
                "prompt_tokens": row["prefill_tokens"],
            },
        }
        used = round(100 * row["used_blocks"] / max(num_blocks, 1), 3)
        yield from counters.at(
            start, row["running"], row["waiting"], used, row["prefill_tokens"], row["decode_n"]
        )
    yield from counters.at(free, 0, 0, 0, 0, 0)


class _Counters:
    """The replica's counters: an event only where one changes."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._last: dict[str, TraceEvent] = {}

    def at(
        self, ns: int, running: int, waiting: int, used: float, prompt: int, decode: int
    ) -> Iterator[TraceEvent]:
        """The changes at `ns`."""
        now: dict[str, TraceEvent] = {
            "requests": {"running": running, "waiting": waiting},
            "KV blocks in use, %": {"used": used},
            "tokens per step": {"prompt": prompt, "decode": decode},
        }
        for name, values in now.items():
            if self._last.get(name) != values:
                yield {"ph": "C", "name": name, "pid": self._process, "tid": 0, "ts": _us(ns), "args": values}
        self._last = now


def _rows(table: pd.DataFrame) -> Iterator[TableRow]:
    """A table's rows as Python objects, some at a time."""
    for begin in range(0, len(table), _CHUNK):
        yield from table.iloc[begin : begin + _CHUNK].to_dict("records")


def _title(row: TableRow) -> str:
    parts = []
    if row["prefill_n"]:
        parts.append(f"prefill {row['prefill_tokens']} tokens of {row['prefill_n']}")
    if row["decode_n"]:
        parts.append(f"decode {row['decode_n']}")
    return " + ".join(parts) + (f", {row['steps']} steps" if row["steps"] > 1 else "")


def _requests(table: pd.DataFrame) -> Iterator[TraceEvent]:
    """Each request's queue, prefill and decode in a slot; rejected ones are marks on the process."""
    order = table.iloc[np.argsort(table["arrival_s"].to_numpy(), kind="stable")]
    busy: list[tuple[int, int]] = []  # end and slot of the requests that are there
    spare: list[int] = []
    slots = 0
    for row in _rows(order):
        arrival, finished = _ns(row["arrival_s"]), _ns(row["finished_s"])
        if row["state"] == "rejected":
            yield {
                "ph": "i",
                "s": "p",
                "name": f"rejected: {row['reason']}",
                "cat": "rejected",
                "pid": REQUESTS,
                "tid": 0,
                "ts": _us(arrival),
                "args": {"request": row["row"]},
            }
            continue
        while busy and busy[0][0] <= arrival:
            heapq.heappush(spare, heapq.heappop(busy)[1])
        if not spare:
            slots += 1
            spare.append(slots)
            yield _named("thread_name", REQUESTS, slots, f"slot {slots}")
            yield _sorted(REQUESTS, slots, "thread_sort_index", slots)
        slot = heapq.heappop(spare)
        heapq.heappush(busy, (finished, slot))
        yield from _phases(row, slot, arrival, finished)


def _phases(row: TableRow, slot: int, arrival: int, finished: int) -> Iterator[TraceEvent]:
    """The slices of one request: those it reached, each to the next or to its end."""
    admitted, first = _ns(row["admitted_s"]), _ns(row["first_token_s"])
    marks = [("queue", arrival), ("prefill", admitted), ("decode", first)]
    times = [(name, time) for name, time in marks if time >= 0]
    ends = [time for _, time in times[1:]] + [finished]
    names = ("state", "input_tokens", "output_tokens", "cached_tokens", "recomputed_tokens", "preemptions")
    facts = {"request": row["row"], **{name: row[name] for name in names}}
    if "replica" in row:
        facts["replica"] = row["replica"]
    for (name, start), end in zip(times, ends, strict=True):
        if end > start:
            yield {
                "ph": "X",
                "name": f"{name} {row['row']}",
                "cat": name,
                "pid": REQUESTS,
                "tid": slot,
                "ts": _us(start),
                "dur": _us(end - start),
                "args": facts,
            }


def _ns(seconds: float) -> int:
    return -1 if seconds != seconds else round(seconds * 1e9)
