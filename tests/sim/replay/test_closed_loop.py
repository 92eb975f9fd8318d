"""Users who wait for their answers: as many requests at once as there are users, sessions in order."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import replay
from pagecast.sim.replay.clients import ClosedLoop
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace, table

SCENARIO = Scenario(costs="roofline", num_gpu_blocks=10_000)


def made(count, sessions=None, **columns):
    lengths = np.random.default_rng(count).integers(5, 60, count)
    base = {"arrival_s": np.zeros(count), "input_tokens": lengths + 20, "output_tokens": lengths}
    if sessions:
        base["session"] = [f"s{row % sessions}" for row in range(count)]
    return Trace("made", table({**base, **columns}))


def served(trace, users, think_s=None):
    made = replay(trace, SCENARIO, arrivals=partial(ClosedLoop, users=users, think_s=think_s))
    assert (made.requests["state"] == "completed").all()
    return made.requests


def in_flight(requests):
    """The most at once, and the time-weighted mean up to when the last request came."""
    times = pd.concat([requests["arrival_s"], requests["finished_s"]]).to_numpy()
    change = np.repeat([1, -1], len(requests))
    order = np.lexsort((change, times))
    levels, times = np.cumsum(change[order]), times[order]
    until = times <= requests["arrival_s"].max()
    return levels.max(), np.average(levels[until][:-1], weights=np.diff(times[until]))


@settings(max_examples=20, deadline=None)
@given(st.integers(13, 60), st.integers(1, 12), st.one_of(st.none(), st.integers(1, 20)))
def test_each_user_has_one_request_at_a_time_and_all_are_served(count, users, sessions):
    requests = served(made(count, sessions), users)
    assert len(requests) == count
    most, _ = in_flight(requests)
    assert most == min(users, sessions or count)


def test_users_without_think_time_keep_the_server_full_while_requests_last():
    most, mean = in_flight(served(made(200), 8))
    assert most == 8
    assert mean == pytest.approx(8, rel=1e-3)


def test_a_session_stays_whole_and_in_order():
    requests = served(made(60, sessions=6), 3)
    for first in range(6):
        turns = requests.iloc[first::6]
        assert (turns["arrival_s"].to_numpy()[1:] == turns["finished_s"].to_numpy()[:-1]).all()


def test_users_pause_between_sessions_and_within_one_as_the_trace_says():
    after = np.where(np.arange(600) % 2, np.arange(600) - 1, -1)
    trace = made(600, after=after, gap_s=np.where(after >= 0, 2.0, 0.0))
    requests = served(trace, 1, think_s=5.0)
    pauses = requests["arrival_s"].to_numpy()[1:] - requests["finished_s"].to_numpy()[:-1]
    within, between = pauses[::2], pauses[1::2]
    np.testing.assert_allclose(within, 2.0, atol=1e-6)
    assert between.mean() == pytest.approx(5.0, rel=0.2)
    assert between.std() == pytest.approx(5.0, rel=0.3)
    assert requests.equals(served(trace, 1, think_s=5.0))


def test_fewer_than_one_user_is_refused():
    with pytest.raises(BadInput, match="users is 0"):
        ClosedLoop(made(3), 0)
