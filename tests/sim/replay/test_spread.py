"""Spreads over draws that don't have the same figures: not every draw rejects requests for every reason."""

import json

import numpy as np
import pytest
from pagecast.planner_app.cli import run
from pagecast.sim.replay import replay
from pagecast.sim.replay.replicates import Study, by_name, summary_figures
from pagecast.sim.scenario import Scenario
from pagecast.traces.operations import select
from pagecast.traces.schema import Trace, table
from pagecast.traces.write import write

REASON = "rejected_reasons.prompt + output tokens exceed max_model_len 16000"
SCENARIO = Scenario(costs="roofline", num_gpu_blocks=3000, max_model_len=16_000)


def one_long(count=60):
    """A request each second; the last is longer than the model takes."""
    prompts = np.full(count, 500)
    prompts[-1] = 20_000
    columns = {"arrival_s": np.arange(count, dtype=float), "input_tokens": prompts}
    return Trace("long", table({**columns, "output_tokens": np.full(count, 20)}))


def without_the_long_one(trace, seed):
    return select(trace, np.arange(len(trace) - 1)) if seed % 2 == 0 else trace


def test_a_reason_that_not_every_draw_has_counts_as_none_there():
    spread = Study(one_long(), SCENARIO, workload=without_the_long_one).spread(4, workers=1)
    assert (spread.low[REASON], spread.middle[REASON], spread.high[REASON]) == (0, 0.5, 1)
    assert (spread.low["rejected"], spread.high["rejected"]) == (0, 1)


def test_sensitivities_are_of_figures_that_only_some_step_times_have():
    """All come at once, and one waits a little too long, but not where steps are faster."""
    trace = one_long(30)
    trace.requests["arrival_s"] = 0.0
    bound = 1.12 * float(replay(trace, SCENARIO).requests["ttft_s"].max())
    scenario = SCENARIO.changed(shed_ttft_s=bound)
    point = summary_figures(replay(trace, scenario))
    shed = next(name for name in point if "predicted TTFT" in name)
    assert point[shed] == 1
    spread = Study(trace, scenario).spread(0, point=point, workers=1)
    assert spread.reach[shed] == (-100, 0)
    assert spread.sensitivity[shed] > 0
    assert spread.reach[REASON] == (0, 0)


def test_figures_that_a_draw_lacks_are_missing_and_rejections_zero():
    table = by_name([{"ttft_s.p99": 1.0}, {"itl_s.p99": 2.0, REASON: 3.0}])
    np.testing.assert_array_equal(table["ttft_s.p99"], [1.0, np.nan])
    np.testing.assert_array_equal(table["itl_s.p99"], [np.nan, 2.0])
    assert table[REASON] == [0.0, 3.0]


@pytest.mark.parametrize("seed", ["1", "2"])
def test_replay_gives_intervals_where_only_some_draws_reject(seed, tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    write(one_long(), path)
    options = ["--costs", "roofline", "--num-gpu-blocks", "3000", "--max-model-len", "16000", "--seed", seed]
    assert run(["replay", str(path), *options, "--replicates", "8", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["low"]["rejected"] == 0 < body["high"]["rejected"]
    assert body["rejected_reasons"]["low"] == {REASON.partition(".")[2]: 0.0}
