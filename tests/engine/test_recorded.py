"""Runs that this engine recorded on an H200 replay in the simulator: every step, hit and event.

Recorded with `pagecast record TRACE --model M --random-weights`: 300 requests of the bundled chat sample at
both pipeline depths (with their event logs); Mooncake conversations and agent sessions at two loads each, the
lighter one of agents twice; Mooncake conversations with Qwen3-0.6B.
"""

from pathlib import Path

import pytest
from pagecast.engine.recording import event_line
from pagecast.sim.recorded import RecordedRun
from pagecast.sim.validate import DecisionReplay, compare_decisions

FOLDER = Path(__file__).parent / "recorded"
STEPS = {
    "h200-qwen3-8b-chat-async": (6561, 300),
    "h200-qwen3-8b-chat-sync": (6247, 300),
    "h200-qwen3-8b-mooncake-load": (12585, 200),
    "h200-qwen3-8b-mooncake-overload": (1690, 200),
    "h200-qwen3-8b-agents-load": (34016, 512),
    "h200-qwen3-8b-agents-load-again": (26710, 396),
    "h200-qwen3-8b-agents-overload": (7101, 307),
    "h200-qwen3-0.6b-mooncake": (16486, 200),
}


def test_every_run_in_the_folder_is_held_here() -> None:
    assert {run.name for run in FOLDER.iterdir()} == set(STEPS)


@pytest.mark.parametrize("name", STEPS)
def test_a_run_recorded_on_the_gpu_is_decided_alike_by_the_simulator(name: str) -> None:
    report = compare_decisions(RecordedRun.load(FOLDER / name))
    steps, requests = STEPS[name]
    assert report.first_mismatch is None
    assert report.steps_matched == report.steps_recorded == steps
    assert report.cached_tokens_matched == report.requests == requests


@pytest.mark.parametrize(("depth", "lines"), [("async", 9508), ("sync", 9508)])
def test_its_event_log_is_the_same_line_for_line(depth: str, lines: int) -> None:
    run = RecordedRun.load(FOLDER / f"h200-qwen3-8b-chat-{depth}")
    replay = DecisionReplay(run, log=True)
    for number in range(len(run.steps)):
        replay.step(number)
    replay.finish()
    assert replay.scheduler.events is not None
    assert [event_line(event) for event in replay.scheduler.events] == run.events
    assert len(run.events) == lines
