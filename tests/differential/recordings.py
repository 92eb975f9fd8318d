"""Recorded runs made of a specification and decisions, and their comparison with the core."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from contents import Contents
from decisions import BlockTrail, Decisions, Delivered, EventDigests, Served, Step, disk_job
from host_tier import TransferDigests
from pagecast.sim.core.engines.profile import Profile
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.events import Event, EventKind
from pagecast.sim.core.kv_events import BlockRemoved, BlockStored, KvEventStream
from pagecast.sim.core.plan import StepPlan
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.rules.order import ByPriority
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.core.tiers.disk import DiskJob
from pagecast.sim.core.tiers.tiered_offloading import TieredOffloading
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import DecisionReplay, compare_decisions
from settings import as_known
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
    "cancelled_s",
)
REQUEST_FIELDS = ("input_tokens", "output_tokens", "priority", "salt", "adapter", "spans", "output_content")
DRAFTS = ("drafts", "accepted_drafts")


class ByText(ByPriority):
    """vLLM's order of requests that the driver gives one arrival time: that of their ids as texts."""

    def place(self, request: Request) -> str:
        return request.id


def by_text(profile: Profile) -> Profile:
    """The profile with vLLM's order of equal arrivals, which no server has."""
    return replace(
        profile, order=lambda limits: ByText() if limits.policy == "priority" else profile.order(limits)
    )


class Difference(NamedTuple):
    """What the core decides otherwise: the first difference in steps, in preemptions, in the contents stored
    and removed, in the numbers of their blocks, in transfers of the host, and in steps with a log."""

    steps: str | None
    preemptions: str | None
    contents: str | None
    blocks: str | None = None
    transfers: str | None = None
    logged: str | None = None

    def __bool__(self) -> bool:
        return any(part is not None for part in self)

    def __str__(self) -> str:
        return "; ".join(part for part in self if part is not None) or "none"


def compare(spec: Spec, run: Decisions, folder: Path, profile: Profile = VLLM) -> Difference:
    """Replays a run by the core, without an event log and with one, and says what is not the same.

    `folder` is written to.
    """
    recorded = RecordedRun.load(lay(as_known(spec, profile.version), run, folder))
    profile = by_text(profile)
    report = compare_decisions(recorded, profile)
    if report.first_mismatch is not None:
        return Difference(report.first_mismatch, None, None)
    replay = DecisionReplay(recorded, profile, log=True)
    watched = TransferWatch(replay, spec) if run.transfers else None
    logged, contents, blocks = _other_contents(replay, run, spec)
    transfers = watched.difference(run) if watched is not None else None
    others = _other_preemptions(replay, run) or _other_rejections(replay, run)
    return Difference(None, others, contents, blocks, transfers, logged)


def compare_events(spec: Spec, run: Decisions, folder: Path, profile: Profile = VLLM) -> str | None:
    """Replays a run whose `contents` are digests of KV events, and names the first step with other events."""
    stream = KvEventStream()
    replay = DecisionReplay(RecordedRun.load(lay(spec, run, folder)), by_text(profile), kv_events=stream)
    digests = EventDigests()
    offloads = "kv_offloading" in spec["config"]
    for number, digest in enumerate(run.contents):
        replay.step(number)
        for event in stream.take():
            if offloads and isinstance(event, BlockStored | BlockRemoved):
                digests.medium(event.medium)
            if isinstance(event, BlockStored):
                parent, tokens = event.parent_block_hash, event.token_count
                digests.stored_event(event.block_hashes, parent, tokens, event.block_size, event.group_idx)
            elif isinstance(event, BlockRemoved):
                digests.removed_event(event.block_hashes, event.group_idx)
        if digests.digest() != digest:
            return f"step {number}: other KV events since the step before"
    return None


def _other_contents(
    replay: DecisionReplay, run: Decisions, spec: Spec
) -> tuple[str | None, str | None, str | None]:
    """Replays all steps; says where a step is not the same, and where the blocks stored and removed since the
    step before are not, by their contents and by their numbers."""
    watch = Watch(replay.scheduler, spec) if run.contents or run.steps[0].trail is not None else None
    steps = contents = blocks = None
    for number, step in enumerate(_computing(run)):
        plan = replay.step(number)
        if steps is None and (plan is None or _fields(plan) != step[2:9]):
            steps = f"step {number}, with an event log: {_fields(plan)}, the engine's {step[2:9]}"
        if watch is None:
            continue
        where = f"step {number}: other blocks were stored or removed since the step before"
        if run.contents and watch.contents.digest() != run.contents[number]:
            contents = contents or where
        if step.trail is not None and watch.trail.cut() != step.trail:
            blocks = blocks or where
    replay.finish()
    return steps, contents, blocks


def _fields(plan: StepPlan | None) -> tuple[object, ...]:
    """A plan's fields as those of a `Step`, from `decode_n` to `used_blocks`; none without a plan."""
    if plan is None:
        return ()
    prefill = tuple(sorted(plan.prefill))
    decodes = (plan.decode_n, plan.decode_ctx, plan.decode_max)
    return (*decodes, prefill, plan.running, plan.waiting, plan.used_blocks)


def _computing(run: Decisions) -> Iterator[Step]:
    """The steps that compute; what plans that compute nothing did with blocks counts as the next one's."""
    before = 0
    for step in run.steps:
        if step.decode_n or step.prefill:
            yield step if step.trail or not before else step._replace(trail=before)
            before = 0
        else:
            before = step.trail or before


class TransferWatch:
    """Takes note of the transfers of every plan of a replay, and of what comes to the host and leaves it."""

    def __init__(self, replay: DecisionReplay, spec: Spec) -> None:
        scheduler = replay.scheduler
        assert scheduler.offloading is not None
        self._replay = replay
        self._factor = spec["config"]["kv_offloading"]["block_size_factor"]
        self._offloading = scheduler.offloading
        self._host = scheduler.offloading.host
        self._host.changes = []
        self._digests = TransferDigests()
        self.made: list[int] = []
        self._plan = scheduler.plan
        scheduler.plan = self._watch  # type: ignore[method-assign]

    def _watch(self, now: int, *, once: bool = False) -> StepPlan | None:
        plan = self._plan(now, once=once)
        disk_jobs: list[DiskJob] = []
        if plan is not None:
            self._digests.flushed(list(plan.flushed))
            for kind, jobs in (("load", plan.loads), ("store", plan.stores)):
                for job in jobs:
                    slots = list(dict.fromkeys(place // self._factor for place in job.places))
                    self._digests.job(kind, job.job, job.request.index, list(job.blocks), slots)
        if isinstance(self._offloading, TieredOffloading):
            disk_jobs = self._offloading.disk.take_submitted()
        assert self._host.changes is not None
        for names, stored in self._host.changes:
            for name in names:
                self._digests.host(name, stored)
        self._host.changes.clear()
        for one in disk_jobs:
            kind = "promotion" if one.is_promotion else "cascade"
            self._digests.disk(one.number, kind, list(one.names), list(one.slots))
        self.made.append(self._digests.digest())
        return plan

    def difference(self, run: Decisions) -> str | None:
        """The first plan with other transfers, or the first request with other tokens from the host."""
        for number, (ours, theirs) in enumerate(zip(self.made, run.transfers, strict=True)):
            if ours != theirs:
                return f"plan {number}: other transfers, or other contents of the host"
        for request, served in zip(self._replay.requests, run.served, strict=True):
            if request.external_tokens != served.external_tokens:
                ours, theirs = request.external_tokens, served.external_tokens
                return f"request {request.id}: {ours} tokens from the host, the engine's {theirs}"
        return None


class Watch(list[Event]):
    """A scheduler's log that takes note of each block stored and removed, and of what it contains."""

    def __init__(self, scheduler: Scheduler, spec: Spec) -> None:
        super().__init__()
        self.contents = Contents(spec["requests"], scheduler.limits.block_size)
        self.trail = BlockTrail()
        self._scheduler = scheduler
        self._place: dict[int, tuple[int, int]] = {}
        scheduler.log.events = self

    def append(self, event: Event) -> None:
        for block in event.blocks:
            if event.kind is EventKind.STORED:
                self.trail.stored(event.group, block)
            elif event.kind is EventKind.EVICTED:
                self.trail.removed(block)
        if self._scheduler.limits.groups:
            return  # several groups: the numbers of blocks alone are compared
        if event.kind is EventKind.STORED:
            request = self._scheduler.requests[event.request]
            place = {block: number for number, block in enumerate(self._scheduler.memory.blocks(request))}
            for block in event.blocks:
                self._place[block] = request.index, place[block]
                self.contents.stored(*self._place[block])
        elif event.kind is EventKind.EVICTED:
            for block in event.blocks:
                self.contents.removed(*self._place[block])


def _other_preemptions(replay: DecisionReplay, run: Decisions) -> str | None:
    for request, served in zip(replay.requests, run.served, strict=True):
        ours, theirs = request.preemptions, served.preemptions
        if ours != theirs:
            return f"request {request.id}: preempted {ours} times, by the engine {theirs} times"
    return None


def _other_rejections(replay: DecisionReplay, run: Decisions) -> str | None:
    """The first request that was rejected by one and not by the other, where the queue is limited."""
    if replay.scheduler.lifecycle.intake is None:
        return None
    for request, served in zip(replay.requests, run.served, strict=True):
        theirs = served.finish_us < 0 and served.cancelled_us < 0
        if (request.state is State.REJECTED) != theirs:
            return f"request {request.id}: the engine {'rejects' if theirs else 'accepts'} it"
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
        "config": {name: value for name, value in config.items() if name != "kv_groups"},
    }
    if "kv_groups" in config:
        meta["kv_groups"] = config["kv_groups"]
    (folder / "meta.json").write_text(json.dumps(meta))
    _write_lines(folder / "steps.jsonl.gz", [_step(step, config["usable_blocks"]) for step in run.steps])
    _write_lines(folder / "inputs.jsonl.gz", [_input(request) for request in spec["requests"]])
    if run.delivered:
        told = [_told(one, run.lost) for one in run.delivered]
        _write_lines(folder / "transfers.jsonl.gz", told)
    with gzip.open(folder / "requests.csv.gz", "wt", compresslevel=1, newline="") as out:
        table = csv.writer(out)
        table.writerow(COLUMNS)
        for index, (request, served) in enumerate(zip(spec["requests"], run.served, strict=True)):
            table.writerow(_row(index, request, served))
    return folder


def _told(one: Delivered, lost: tuple[int, ...]) -> dict[str, Any]:
    told: dict[str, Any] = {"job": one.job, "told_s": one.time_us / US}
    if one.job in lost:
        told["lost"] = True
    if one.job < 0:
        told |= {"job": disk_job(one.job), "kind": "disk"}
    return told


def _row(index: int, request: dict[str, Any], served: Served) -> tuple[float | str, ...]:
    return (
        index,
        request["arrival_us"] / US,
        (served.submitted_us + 0.5) / US,  # a plan of the same microsecond came before
        request["input_tokens"],
        request["output_tokens"],
        served.first_token_us / US if served.first_token_us >= 0 else "",
        served.finish_us / US if served.finish_us >= 0 else "",
        max(served.cached_tokens, 0),
        served.tokens_out,
        served.cancelled_us / US if served.cancelled_us >= 0 else "",
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
    for name in DRAFTS:
        if name in request:
            numbers = islice(cycle(request[name]), request["output_tokens"])
            fields[name] = " ".join(map(str, numbers))
    if "items" in request:
        fields["multimodal"] = " ".join(f"{name}@{at}+{length}" for name, at, length in request["items"])
    return {"arrival_s": request["arrival_us"] / US, **fields}


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    with gzip.open(path, "wt", compresslevel=1) as out:
        for line in lines:
            out.write(json.dumps(line) + "\n")
