"""The core repeats every decision of the engine from the recorded times alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagecast.engine.runner import Flight
from pagecast.engine.serve import TraceServer
from pagecast.sim.costs.calibration.shape import model_of as model_of_run
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import compare_decisions
from pagecast.traces.schema import Trace, table


def record(engine: Any, trace: Trace, folder: Path) -> RecordedRun:
    """Serves a trace, and writes and reads the run."""
    return RecordedRun.load(TraceServer(engine, trace).run().write(folder))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_recorded_run_replays_step_by_step_and_event_by_event(
    seed: int,
    depth: int,
    policy: str,
    model_of: Any,
    engine_of: Any,
    small_trace: Any,
    core_events: Any,
    tmp_path: Path,
) -> None:
    engine = engine_of(
        model_of("qwen3", num_hidden_layers=1).folder,
        num_blocks=20,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        pipeline_depth=depth,
        scheduling_policy=policy,
        log_events=True,
    )
    run = record(engine, small_trace(seed), tmp_path)
    report = compare_decisions(run)
    assert report.ok, report.first_mismatch
    assert report.requests == 40
    assert core_events(run) == run.events
    kinds = {event["kind"] for event in run.events}
    assert {"allocated", "stored", "reused", "evicted", "freed", "preempted", "finished"} <= kinds


@pytest.mark.parametrize("depth", [0, 1])
def test_a_mixture_of_experts_runs_in_lockstep(
    depth: int, model_of: Any, engine_of: Any, small_trace: Any, core_events: Any, tmp_path: Path
) -> None:
    model = model_of("qwen3_moe")
    limits = {"num_blocks": 20, "max_num_seqs": 6, "max_num_batched_tokens": 48}
    engine = engine_of(model.folder, **limits, pipeline_depth=depth, log_events=True)
    run = record(engine, small_trace(7), tmp_path)
    report = compare_decisions(run)
    assert report.ok, report.first_mismatch
    assert core_events(run) == run.events
    assert model_of_run(run.meta, "meta.json") == engine.loaded.spec.facts


def test_a_recorded_run_says_what_was_generated(
    model_of: Any, engine_of: Any, small_trace: Any, core_events: Any, tmp_path: Path
) -> None:
    model = model_of("qwen3")
    engine = engine_of(model.folder, max_num_seqs=6, log_events=True, pipeline_depth=1)
    trace = small_trace(5, count=30)
    trace = replace(trace, requests=trace.requests.drop(columns="cancel_after_s"))
    run = record(engine, trace, tmp_path)
    server = TraceServer(engine, trace)
    for row in range(30):
        ids = [int(token) for token in run.requests["output_ids"][row].split()]
        assert len(ids) == run.requests["output_tokens"][row]
        prompt = server.prompt(row).tolist()
        expected = model.logits(prompt + ids)[len(prompt) - 1 : -1].argmax(-1)
        assert ids == (expected.tolist() if server.forced(row) is None else server.forced(row).tolist())
    assert np.all(run.requests["finish_s"] >= run.requests["first_token_s"])
    assert np.all(run.requests["first_token_s"] > run.requests["submitted_s"])


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_failures_and_early_ends_are_replayed_too(
    seed: int,
    depth: int,
    model_of: Any,
    engine_of: Any,
    small_trace: Any,
    core_events: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(
        model_of("qwen3", num_hidden_layers=1).folder,
        num_blocks=10,
        max_num_seqs=5,
        max_num_batched_tokens=40,
        pipeline_depth=depth,
        scheduling_policy="priority" if seed % 2 else "fcfs",
        log_events=True,
    )
    runner, rng = engine.loop.runner, np.random.default_rng(seed)

    def launch(plan: Any, memory: Any) -> Flight:
        """Draws tokens by dice: of 50, one ends the text (0) and one is a failure (-1)."""
        takers = runner.batches.lay_out(plan, memory).draws.takers
        return Flight(takers, torch.from_numpy(rng.integers(-1, 49, len(takers))), None)

    monkeypatch.setattr(runner, "launch", launch)
    server = TraceServer(engine, small_trace(seed, count=60))
    make = server._sequence

    def may_stop(row: int, arrival_ns: int) -> Any:
        sequence = make(row, arrival_ns)
        sequence.stops = frozenset([0])
        return sequence

    monkeypatch.setattr(server, "_sequence", may_stop)
    run = RecordedRun.load(server.run().write(tmp_path))
    reasons = run.requests["reason"]
    assert (reasons != "").sum() > 0
    assert (run.requests["tokens_out"] < run.requests["output_tokens"]).sum() > (reasons != "").sum()
    report = compare_decisions(run)
    assert report.ok, report.first_mismatch
    assert core_events(run) == run.events


def test_retries_are_sent_only_where_they_are_needed(
    model_of: Any, engine_of: Any, core_events: Any, tmp_path: Path
) -> None:
    columns = {
        "arrival_s": [0.0, 0.0, 0.0, np.nan, np.nan, np.nan, np.nan],
        "after": [-1, -1, -1, 0, 1, 2, 4],
        "retry": [0, 0, 0, 1, 1, 1, 1],
        "input_tokens": [20, 21, 22, 23, 24, 25, 26],
        "output_tokens": [4, 400, 6, 7, 8, 9, 10],
        "cancel_after_s": [np.nan, 0.02, 0.0, np.nan, np.nan, np.nan, np.nan],
    }
    trace = Trace("retries", table(columns))
    run = record(engine_of(model_of("qwen3").folder, log_events=True), trace, tmp_path)
    requests = run.requests
    assert requests["index"].tolist() == [0, 1, 2, 3, 4]
    assert requests["input_tokens"].tolist() == [20, 21, 22, 24, 25]
    assert requests["finish_s"].notna().tolist() == [True, False, False, True, True]
    assert requests["tokens_out"].tolist()[3:] == [8, 9]
    assert np.all(requests["arrival_s"].to_numpy()[3:] >= requests["cancelled_s"].to_numpy()[1:3])
    assert run.inputs["after"].tolist() == [-1, -1, -1, 1, 2]
    report = compare_decisions(run)
    assert report.ok, report.first_mismatch
    assert core_events(run) == run.events


def test_a_trace_of_token_ids_is_served_as_it_is(model_of: Any, engine_of: Any, tmp_path: Path) -> None:
    model = model_of("qwen2")
    shared = list(range(40))
    prompts = [[*shared, 1, 2], [*shared, 3], [9] * 5, [*shared[:20], 4], [*shared, 1, 2]]
    columns = {
        "arrival_s": np.zeros(5),
        "input_tokens": [len(p) for p in prompts],
        "output_tokens": [6, 7, 8, 9, 10],
    }
    trace = Trace("ids", table(columns), token_ids=[np.array(p, np.int64) for p in prompts])
    run = record(engine_of(model.folder, log_events=True), trace, tmp_path)
    report = compare_decisions(run)
    assert report.ok, report.first_mismatch
    assert run.requests["cached_tokens"].tolist() == [0, 32, 0, 16, 32]
    for prompt, text in zip(prompts, run.requests["output_ids"], strict=True):
        ids = [int(token) for token in text.split()]
        assert ids == model.logits(prompt + ids)[len(prompt) - 1 : -1].argmax(-1).tolist()
