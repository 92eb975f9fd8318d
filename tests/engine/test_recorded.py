"""A run that this engine recorded on an H200 replays in the simulator: every step, hit and event.

300 requests of the bundled chat sample, Qwen3-8B with random weights, asynchronous scheduling, recorded with
`pagecast record chat --model Qwen/Qwen3-8B --random-weights --requests 300 --async-scheduling`.
"""

from pathlib import Path

from pagecast.engine.recording import event_line
from pagecast.sim.recorded import RecordedRun
from pagecast.sim.validate import DecisionReplay, compare_decisions

RUN = Path(__file__).parent / "recorded" / "h200-qwen3-8b-chat-async"


def test_a_run_recorded_on_the_gpu_is_decided_alike_by_the_simulator():
    run = RecordedRun.load(RUN)
    report = compare_decisions(run)
    assert report.first_mismatch is None
    assert report.steps_matched == report.steps_recorded == 6206
    assert report.cached_tokens_matched == report.requests == 300


def test_its_event_log_is_the_same_line_for_line():
    run = RecordedRun.load(RUN)
    replay = DecisionReplay(run, log=True)
    for number in range(len(run.steps)):
        replay.step(number)
    replay.finish()
    assert replay.scheduler.events is not None
    assert [event_line(event) for event in replay.scheduler.events] == run.events
    assert len(run.events) == 9508
