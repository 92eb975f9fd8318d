"""The longest time between two tokens of each request."""

import numpy as np
import pandas as pd
import pytest
from pagecast.sim.replay import Kept, replay
from pagecast.sim.replay.token_gaps import longest_gaps_s
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

SCENARIO = Scenario(model="Qwen/Qwen3-8B", gpu="H100", num_gpu_blocks=2000)


def test_a_prompt_in_between_makes_a_gap_of_its_step():
    rows = {"arrival_s": [0.0, 0.1, 0.3], "input_tokens": [10, 6000, 10], "output_tokens": [60, 20, 1]}
    result = replay(Trace("three", pd.DataFrame(rows)), SCENARIO)
    first, second, one = longest_gaps_s(result)
    prompt = result.steps[result.steps["prefill_tokens"] >= 6000].iloc[0]
    assert first == pytest.approx((prompt["end_ns"] - prompt["start_ns"]) / 1e9, rel=0.1)
    assert second < 0.1 * first  # decode steps, and a short prompt
    assert np.isnan(one)
    assert np.isnan(
        longest_gaps_s(replay(Trace("three", pd.DataFrame(rows)), SCENARIO, kept=Kept(steps=False)))
    ).all()
