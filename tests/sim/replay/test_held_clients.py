"""Clients who hold requests back: a semaphore over the trace, in its order, after the warm-up."""

from dataclasses import replace

import numpy as np
import pytest
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.replay import replay
from pagecast.sim.replay.resample import resample
from pagecast.sim.scenario import Scenario
from pagecast.traces.load import Load

SCENARIO = Scenario(gpu="H100", num_gpu_blocks=4000)
VARIED = Load(input_len="uniform:50-900", output_len="uniform:2-60", num_prompts=60, concurrency=7)


@pytest.mark.parametrize("fast_forward", [True, False])
def test_the_next_request_is_sent_when_one_ends_in_the_order_of_the_trace(fast_forward: bool) -> None:
    trace = VARIED.trace()
    result = replay(trace, SCENARIO, fast_forward=fast_forward, check_every=50)
    sent = result.requests["arrival_s"].to_numpy()
    ends = np.sort(result.requests["finished_s"].to_numpy())
    assert (np.diff(sent) >= 0).all()
    assert (sent[:7] == 0).all()
    np.testing.assert_array_equal(sent[7:], ends[: len(sent) - 7])


def test_a_request_is_not_sent_before_its_time() -> None:
    load = Load(input_len="500", output_len="30", num_prompts=40, concurrency=3, request_rate=9.0)
    trace = load.trace()
    requests = replay(trace, SCENARIO).requests
    due, sent, ends = trace.seconds("arrival_s"), requests["arrival_s"], np.sort(requests["finished_s"])
    free = np.concatenate([np.zeros(3), ends[:-3]])
    np.testing.assert_allclose(sent, np.maximum(due, free), atol=1e-9)


def test_a_ramp_opens_places_one_by_one() -> None:
    load = Load(input_len="100", output_len="400", num_prompts=5, concurrency=5, concurrency_ramp=2.0)
    sent = replay(load.trace(), SCENARIO).requests["arrival_s"]
    np.testing.assert_allclose(sent, [0.0, 0.5, 1.0, 1.5, 2.0])


def test_a_session_holds_its_place_while_its_user_thinks() -> None:
    load = Load(input_len="100", output_len="10", num_prompts=4, concurrency=2, turns="3", turn_delay="1.5")
    trace = load.trace()
    requests = replay(trace, SCENARIO).requests.set_index("row")
    after = trace.integers("after")
    turns = np.flatnonzero(after >= 0)
    pauses = requests["arrival_s"][turns].to_numpy() - requests["finished_s"][after[turns]].to_numpy()
    np.testing.assert_allclose(pauses, 1.5)
    first = requests["arrival_s"][np.flatnonzero(after < 0)].to_numpy()
    lasts = np.sort(requests["finished_s"][np.setdiff1d(np.arange(len(trace)), after)].to_numpy())
    np.testing.assert_array_equal(first[2:], lasts[:2])


@pytest.mark.parametrize("fleet", [False, True])
def test_warm_up_ends_before_measuring_begins_and_is_in_no_figure(fleet: bool) -> None:
    load = Load(input_len="320", output_len="20", num_prompts=9, concurrency=4, repeat_prompts=2, warmup=3)
    trace = load.trace()
    result = (
        replay_fleet(trace, SCENARIO, FleetSettings.make({"groups": [{"replicas": 1}]}))
        if fleet
        else replay(trace, SCENARIO)
    )
    assert len(trace) == 3 + 2 * 9
    assert result.summary["requests"] == result.summary["completed"] == 9
    assert (trace.integers("warmup")[result.requests["row"]] == 0).all()
    # All prompts were sent before, and are cached but for the block with the last token.
    assert (result.requests["cached_tokens"] == 304).all()
    alone = replay(Load(input_len="320", output_len="20", num_prompts=9, concurrency=4).trace(), SCENARIO)
    assert result.summary["ttft_s"]["mean"] < alone.summary["ttft_s"]["mean"]


def test_a_closed_loop_is_resampled_in_its_order() -> None:
    load = Load(input_len="uniform:50-900", output_len="uniform:2-60", num_prompts=400)
    trace = Load(concurrency=7).sent(replace(load.trace(), recipe=None))
    drawn = resample(trace, 1)
    assert drawn.concurrency == trace.concurrency
    assert not drawn.seconds("arrival_s").any()
    assert drawn.integers("input_tokens").tolist() != trace.integers("input_tokens").tolist()
    assert set(drawn.integers("input_tokens").tolist()) <= set(trace.integers("input_tokens").tolist())
