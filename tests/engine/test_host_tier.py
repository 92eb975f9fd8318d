"""The host tier: texts are those of a cache that holds everything, and decisions are the core's."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pagecast.engine.described import described
from pagecast.engine.host_tier import HostOrders, HostTier, host_places
from pagecast.engine.options import Options
from pagecast.engine.params import SamplingParams
from pagecast.engine.recording import event_line
from pagecast.engine.serve import TraceServer
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.plan import StepPlan, Transfer
from pagecast.sim.core.request import Request
from pagecast.sim.runs.journal import JournalWriter
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.run_journal import RunJournal
from pagecast.sim.runs.transfers import LOAD, STORE
from pagecast.sim.runs.validate import DecisionReplay, compare_decisions
from pagecast.traces.schema import Spans, Trace

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
GIB_PER_BLOCK = 2 * 2 * 16 * 2 * 32 * 4 / 2**30  # two layers, keys and values, of the small Qwen3 in float32
SMALL = {"num_blocks": 20, "max_num_seqs": 4, "max_num_batched_tokens": 64, "log_events": True}


def documents_trace(seed: int, count: int = 30, documents: int = 6) -> Trace:
    """Questions about documents that take more blocks than the pool has, again and again."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(60, 130, documents)
    spans = []
    for row in range(count):
        document = int(rng.integers(documents))
        spans += [(document, 0, int(lengths[document])), (100 + row, 0, int(rng.integers(1, 20)))]
    flat = np.array(spans, np.int64)
    start = np.arange(0, len(flat) + 1, 2).astype(np.int64)
    table = pd.DataFrame(
        {
            "arrival_s": np.sort(rng.random(count) * 0.05),
            "input_tokens": flat[:, 2].reshape(-1, 2).sum(1),
            "output_tokens": rng.integers(1, 20, count),
            "priority": rng.integers(0, 3, count),
        }
    )
    return Trace("documents", table, Spans(start, *(flat[:, i].copy() for i in range(3))))


def record(engine: Any, trace: Trace, folder: Path) -> RecordedRun:
    return RecordedRun.load(TraceServer(engine, trace).run().write(folder))


def checked(host: HostTier, kv: torch.Tensor) -> dict[int, int]:
    """Counts a host tier's loads; each must bring the very bytes that were stored in its place last."""
    stored: dict[int, float] = {}
    seen = {LOAD: 0, STORE: 0}
    start = host._start

    def checking(kind: str, step: int, transfers: Any) -> None:
        transfers = list(transfers)
        start(kind, step, transfers)
        if kv.is_cuda:
            torch.cuda.synchronize()
        for transfer in transfers:
            seen[kind] += 1
            for block, place in zip(transfer.blocks, transfer.places, strict=True):
                content = hash(kv[:, block].cpu().numpy().tobytes())
                if kind == STORE:
                    stored[place] = content
                assert stored[place] == content

    host._start = checking  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    ("policy", "depth", "drafts"), [("fcfs", 0, None), ("priority", 1, None), ("priority", 0, NGRAM)]
)
def test_a_small_pool_with_a_host_tier_serves_the_tokens_of_a_large_one(
    policy: str, depth: int, drafts: str | None, model_of: Any, engine_of: Any, tmp_path: Path
) -> None:
    folder = model_of("qwen3").folder
    options = {"scheduling_policy": policy, "pipeline_depth": depth, "speculative_config": drafts}
    trace = documents_trace(depth)
    large = TraceServer(engine_of(folder, **{**SMALL, **options, "num_blocks": 400}), trace).run()
    engine = engine_of(folder, **SMALL, **options, kv_offloading_size=40 * GIB_PER_BLOCK)
    assert engine.loaded.host.places == 40
    seen = checked(engine.loaded.host, engine.loaded.kv)
    run = record(engine, trace, tmp_path)
    assert run.requests["output_ids"].tolist() == large.requests["output_ids"].tolist()
    assert seen[LOAD] > 5
    assert seen[STORE] > 10
    assert len(run.transfers) == seen[LOAD] + seen[STORE]
    report = compare_decisions(run)
    assert report.ok, report.first_mismatch
    replay = DecisionReplay(run, log=True)
    for number in range(len(run.steps)):
        replay.step(number)
    replay.finish()
    assert [event_line(event) for event in replay.scheduler.events or ()] == run.events


def test_each_of_two_devices_has_its_share_of_the_tier(model_of: Any, engine_of: Any, tmp_path: Path) -> None:
    """What comes back from the host is right on both, for one text is computed of both."""
    folder, trace = model_of("qwen3").folder, documents_trace(0)
    options = {**SMALL, "pipeline_depth": 1}
    large = TraceServer(engine_of(folder, **{**options, "num_blocks": 400}), trace).run()
    size = 40 * GIB_PER_BLOCK  # for both together
    engine = engine_of(folder, **options, kv_offloading_size=size, tensor_parallel_size=2)
    assert engine.loaded.host.places == 40
    for turn in range(2):  # the second time after all was forgotten
        run = record(engine, trace, tmp_path / str(turn))
        assert run.requests["output_ids"].tolist() == large.requests["output_ids"].tolist()
        assert sum(transfer.kind == LOAD for transfer in run.transfers) > 5
        report = compare_decisions(run)
        assert report.ok, report.first_mismatch


def test_recorded_transfers_say_what_was_moved_and_when(
    model_of: Any, engine_of: Any, tmp_path: Path
) -> None:
    engine = engine_of(model_of("qwen3").folder, **SMALL, kv_offloading_size=30 * GIB_PER_BLOCK)
    run = record(engine, documents_trace(3), tmp_path)
    for transfer in run.transfers:
        assert transfer.bytes == transfer.blocks * engine.loaded.host.block_bytes
        assert transfer.queued_ns <= transfer.start_ns <= transfer.end_ns <= transfer.told_ns
    for kind in (LOAD, STORE):
        jobs = [transfer for transfer in run.transfers if transfer.kind == kind]
        ends = [transfer.end_ns for transfer in jobs]
        assert ends == sorted(ends)
    assert run.meta["config"]["kv_offloading"]["cpu_blocks"] == 30


def test_all_tokens_may_be_offloaded_in_blocks_of_their_own_size(
    model_of: Any, engine_of: Any, tmp_path: Path
) -> None:
    folder = model_of("qwen3").folder
    trace = documents_trace(6, count=20)
    quoting = replace(trace, requests=trace.requests.assign(output_tokens=40))
    large = TraceServer(engine_of(folder, **{**SMALL, "num_blocks": 400}), quoting).run()
    offloading = {
        "kv_offloading_size": 41 * GIB_PER_BLOCK,
        "kv_offloading_block_size": 32,
        "kv_offloading_eviction_policy": "arc",
        "offload_prompt_only": False,
    }
    engine = engine_of(folder, **SMALL, **offloading)
    seen = checked(engine.loaded.host, engine.loaded.kv)
    run = record(engine, quoting, tmp_path)
    assert run.requests["output_ids"].tolist() == large.requests["output_ids"].tolist()
    assert engine.limits.host.blocks == 20
    assert seen[LOAD] > 2
    report = compare_decisions(run)
    assert report.ok, report.first_mismatch


def test_cancelled_requests_leave_no_transfer_behind(model_of: Any, engine_of: Any) -> None:
    engine = engine_of(model_of("qwen3").folder, **SMALL, kv_offloading_size=30 * GIB_PER_BLOCK)
    trace = documents_trace(4)
    rng = np.random.default_rng(0)
    impatient = trace.requests.assign(cancel_after_s=rng.random(len(trace)) * 0.1)
    run = TraceServer(engine, replace(trace, requests=impatient)).run()
    assert run.requests["cancelled_s"].notna().sum() > 3
    engine.loop.drain()
    assert not engine.loaded.host.busy
    assert engine.loop.scheduler.memory.used_blocks == 0
    assert compare_decisions(run).ok
    (completion,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert len(completion.outputs[0].token_ids) == 3


def test_stores_of_steps_whose_outcome_is_open_are_not_reported() -> None:
    kv = torch.rand(2, 4, 2, 16, 2, 8)
    host = HostTier(kv, 3)
    request = Request("a", None, 1, 1)  # type: ignore[arg-type]

    def plan(step: int, **transfers: Any) -> StepPlan:
        return StepPlan(step, 1, 0, 0, 0, 0, (), 0, 0, 0, **transfers)

    good, bad = (Transfer(job, request, (job,), (job,)) for job in (0, 1))
    for step, store in enumerate((good, bad)):
        host.begin(plan(step))
        host.finish(plan(step, stores=(store,)))
    host.spoil([bad])
    assert [one.job for one in host.ended(before=1)] == [0]
    host.lose([Transfer(2, request, (2,), (2,))])
    assert [(one.job, one.lost) for one in host.ended()] == [(1, True), (2, True)]
    assert not host.busy
    host.begin(plan(2, loads=(Transfer(3, request, (3,), (0,)),)))
    assert torch.equal(kv[:, 3], kv[:, 0])
    assert torch.equal(host.memory[0], kv[:, 0])


def test_a_worker_waits_for_the_jobs_that_were_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, worker = (HostTier(torch.zeros(1, 8, 2, 4), 4) for _ in range(2))
    held: list[int] = []
    monkeypatch.setattr(worker._lanes[STORE], "hold", held.append)

    def step(number: int, *stores: int) -> HostOrders:
        copies = [SimpleNamespace(job=job, blocks=(job,), places=(job % 4,)) for job in stores]
        plan: Any = SimpleNamespace(step=number, flushed=(), loads=(), stores=copies)
        orders = leader.orders(plan)
        for tier in (leader, worker):
            if tier is worker:
                tier.settle(orders)
            tier.begin(plan)
            tier.finish(plan)
        return orders

    assert step(0, 1, 2).fresh
    assert [transfer.job for transfer in leader.ended(1)] == [1, 2]
    assert step(1, 3).reported == (1, 2)
    assert held == [1]
    assert worker.busy
    assert len(leader.ended()) == 1
    step(2)
    assert held == [1, 0]
    assert not worker.busy
    leader.restart(lambda: 0)
    assert step(3).fresh


def test_a_host_tier_too_small_for_a_block_is_refused() -> None:
    assert host_places(1, 2**20) == 1024
    with pytest.raises(BadInput, match="give more"):
        host_places(0.0001, 2**20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_block_size": 32}, "kv_offloading_block_size is for a host tier; give"),
        ({"offload_prompt_only": False}, "offload_prompt_only is for a host tier; give"),
        ({"kv_offloading_size": 1.0, "kv_offloading_block_size": 24}, "24 is no multiple of block_size 16"),
        ({"kv_offloading_size": 1.0, "kv_offloading_eviction_policy": "mru"}, "'mru' is not known"),
        ({"max_model_len": 0}, "max_model_len is 0; it must be at least 1"),
    ],
)
def test_options_that_can_not_work_are_refused_before_anything_is_loaded(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        Options(**options).check()


def test_a_run_that_is_cut_short_keeps_its_drafts_and_transfers(
    model_of: Any, engine_of: Any, tmp_path: Path
) -> None:
    options = {**SMALL, "kv_offloading_size": 40 * GIB_PER_BLOCK, "speculative_config": NGRAM}
    engine = engine_of(model_of("qwen3").folder, **options)
    writer = JournalWriter(tmp_path, {"name": "cut short", **described(engine)})
    run = TraceServer(engine, documents_trace(5, count=20), journal=RunJournal(writer)).run()
    writer.flush()  # and never closed, as where the process is killed
    left = RecordedRun.load(tmp_path)
    assert left.transfers == run.transfers
    assert left.inputs["drafts"].tolist() == run.inputs["drafts"].tolist()
    right = [sum(map(int, text.split())) for text in left.inputs["accepted_drafts"]]
    assert sum(right) > 5
    report = compare_decisions(left)
    assert report.ok, report.first_mismatch
