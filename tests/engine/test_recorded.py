"""Runs that this engine recorded on H200s replay in the simulator: every step, hit and event.

Recorded with `pagecast record TRACE --model M --random-weights`: 300 requests of the bundled chat sample
(with their event logs), Mooncake conversations and agent sessions at two loads each, Mooncake conversations
with Qwen3-0.6B. The letter behind "h200" tells five GPUs apart.
"""

from pathlib import Path

import pytest
from pagecast.engine.recording import event_line
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import DecisionReplay, compare_decisions

FOLDER = Path(__file__).parent / "recorded"
STEPS = {
    "h200a-qwen3-8b-mooncake-load": (12422, 200),
    "h200a-qwen3-8b-mooncake-overload": (1656, 200),
    "h200a-qwen3-8b-agents-load": (26737, 396),
    "h200a-qwen3-8b-agents-overload": (7101, 307),
    "h200b-qwen3-8b-chat-async": (6487, 300),
    "h200c-qwen3-8b-chat-async": (6561, 300),
    "h200c-qwen3-8b-chat-sync": (6247, 300),
    "h200c-qwen3-8b-mooncake-load": (12585, 200),
    "h200c-qwen3-8b-mooncake-overload": (1690, 200),
    "h200c-qwen3-8b-agents-overload": (7101, 307),
    "h200c-qwen3-0.6b-mooncake": (16486, 200),
    "h200d-qwen3-8b-agents-load": (26710, 396),
    "h200e-qwen3-8b-agents-load": (34016, 512),
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


@pytest.mark.parametrize("name", [name for name in STEPS if "chat" in name])
def test_its_event_log_is_the_same_line_for_line(name: str) -> None:
    run = RecordedRun.load(FOLDER / name)
    replay = DecisionReplay(run, log=True)
    for number in range(len(run.steps)):
        replay.step(number)
    replay.finish()
    assert replay.scheduler.events is not None
    assert [event_line(event) for event in replay.scheduler.events] == run.events
    assert len(run.events) == 9508
