"""Recorded runs made of a specification and decisions, and their comparison with the core."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

from decisions import Decisions, Served, Step
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import DecisionReplay, compare_decisions
from specifications import Spec

US = 1_000_000
COLUMNS = (
    "index",
    "arrival_s",
    "submitted_s",
    "input_tokens",
    "output_tokens",
    "first_token_s",
    "finish_s",
    "cached_tokens",
    "tokens_out",
)
REQUEST_FIELDS = ("input_tokens", "output_tokens", "priority", "salt", "spans", "output_content")


class Difference(NamedTuple):
    """What the core decides otherwise: the first difference, and how many requests and steps are the same."""

    steps: str | None
    preemptions: str | None

    def __bool__(self) -> bool:
        return self.steps is not None or self.preemptions is not None

    def __str__(self) -> str:
        return "; ".join(part for part in self if part is not None) or "none"


def compare(spec: Spec, run: Decisions, folder: Path) -> Difference:
    """Replays a run by the core, in a folder to write to, and says what is not the same."""
    recorded = RecordedRun.load(lay(spec, run, folder))
    report = compare_decisions(recorded)
    return Difference(report.first_mismatch, _other_preemptions(recorded, run))


def _other_preemptions(recorded: RecordedRun, run: Decisions) -> str | None:
    replay = DecisionReplay(recorded)
    for number in range(len(recorded.steps)):
        replay.step(number)
    replay.finish()
    for request, served in zip(replay.requests, run.served, strict=True):
        ours, theirs = request.preemptions, served.preemptions
        if ours != theirs:
            return f"request {request.id}: preempted {ours} times, by the engine {theirs} times"
    return None


def lay(spec: Spec, run: Decisions, folder: Path) -> Path:
    """Writes a run in the format of recorded runs; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = spec["config"]
    meta = {
        "name": f"seed {run.seed}",
        "engine": "vllm",
        "engine_version": "0.24.0",
        "usable_blocks": config["usable_blocks"],
        "config": config,
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    _write_lines(folder / "steps.jsonl.gz", [_step(step, config["usable_blocks"]) for step in run.steps])
    _write_lines(folder / "inputs.jsonl.gz", [_input(request) for request in spec["requests"]])
    with gzip.open(folder / "requests.csv.gz", "wt", compresslevel=1, newline="") as out:
        table = csv.writer(out)
        table.writerow(COLUMNS)
        for index, (request, served) in enumerate(zip(spec["requests"], run.served, strict=True)):
            table.writerow(_row(index, request, served))
    return folder


def _row(index: int, request: dict[str, Any], served: Served) -> tuple[float, ...]:
    return (
        index,
        request["arrival_us"] / US,
        served.submitted_us / US,
        request["input_tokens"],
        request["output_tokens"],
        served.first_token_us / US,
        served.finish_us / US,
        served.cached_tokens,
        served.tokens_out,
    )


def _step(step: Step, usable_blocks: int) -> dict[str, Any]:
    return {
        "start_s": step.start_us / US,
        "sched_s": 0.0,
        "end_s": step.end_us / US,
        "decode_n": step.decode_n,
        "decode_ctx": step.decode_ctx,
        "decode_max": step.decode_max,
        "prefill": [list(chunk) for chunk in step.prefill],
        "running": step.running,
        "waiting": step.waiting,
        "kv_usage": step.used_blocks / usable_blocks,
    }


def _input(request: dict[str, Any]) -> dict[str, Any]:
    fields = {name: request[name] for name in REQUEST_FIELDS if name in request}
    return {"arrival_s": request["arrival_us"] / US, **fields}


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    with gzip.open(path, "wt", compresslevel=1) as out:
        for line in lines:
            out.write(json.dumps(line) + "\n")
