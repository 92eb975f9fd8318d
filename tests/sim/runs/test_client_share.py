"""What a client measures beside the engine's own latencies."""

import math
from dataclasses import replace

import numpy as np
import pytest
from pagecast.planner_app.wording.accuracy import expected_error
from pagecast.sim.replay import Kept, replay
from pagecast.sim.runs.bench_results import BenchResults
from pagecast.sim.runs.client_share import CLIENT_SHARE
from pagecast.sim.runs.forecast import forecast_results
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

SET_UP = Scenario(model="Qwen/Qwen3-8B", gpu="H100", costs="measured", num_gpu_blocks=20_000)


@pytest.fixture(scope="module")
def served():
    return replay(read("chat", limit=60), SET_UP, kept=Kept(steps=False))


def results_of(served, client=None):
    ttft, e2e = (served.requests[name].to_numpy(float) for name in ("ttft_s", "e2e_s"))
    return BenchResults("served", read("chat", limit=60), ttft, e2e, client)


def test_a_client_sees_each_request_later_and_its_tokens_as_far_apart(served):
    seen = CLIENT_SHARE.seen(served).requests
    share = CLIENT_SHARE.fixed_s + CLIENT_SHARE.token_s * served.requests["input_tokens"]
    for name in ("ttft_s", "e2e_s"):
        assert np.allclose(seen[name] - served.requests[name], share)
    assert seen["tpot_s"].equals(served.requests["tpot_s"])


def test_results_of_a_client_are_forecast_as_it_measures_them(served):
    seen = CLIENT_SHARE.seen(served)
    outcome = forecast_results(results_of(seen, CLIENT_SHARE), SET_UP, replicates=0, workers=1)
    assert outcome.worst_percent < 1e-6
    assert "6.2 ms, and 1.9 ms per 1,000 prompt tokens, are added" in expected_error(outcome)
    outcome = forecast_results(results_of(served), SET_UP, replicates=0, workers=1)
    assert outcome.worst_percent < 1e-6
    assert "client" not in expected_error(outcome)


def test_the_interval_of_a_clients_ttft_is_wider_by_the_spread_of_its_share(served):
    seen = CLIENT_SHARE.seen(served)

    def width(share):
        outcome = forecast_results(results_of(seen, share), SET_UP, replicates=20, workers=1)
        row = next(row for row in outcome.rows if row.name == "ttft_s.p50")
        return row.high - row.low

    assert width(replace(CLIENT_SHARE, sd=0.5)) > 1.5 * width(replace(CLIENT_SHARE, sd=0.0))


def test_shares_of_draws_lie_around_the_stated_one():
    shares = [CLIENT_SHARE.drawn(index, 0).fixed_s for index in range(200)]
    assert np.median(shares) == pytest.approx(CLIENT_SHARE.fixed_s, rel=0.02)
    wide = 1.134 * CLIENT_SHARE.sd  # Student's t of four degrees of freedom at 84%
    assert math.log(np.percentile(shares, 84) / np.median(shares)) == pytest.approx(wide, rel=0.15)
