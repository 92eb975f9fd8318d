"""Users who wait for their answers: as many requests at once as there are users, sessions in order."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.replay import replay
from pagecast.sim.replay.clients import ClosedLoop
from pagecast.sim.scenario import Scenario
from pagecast.traces.chains import Chains
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


def test_a_request_without_a_session_joins_none_whatever_sessions_are_called():
    columns = {"arrival_s": [0.0] * 5, "input_tokens": [8] * 5, "output_tokens": [4] * 5}
    columns["session"] = ["row 1", None, "row 1", None, "3"]
    columns["after"] = [-1, -1, -1, 1, -1]
    chains = Chains.of(Trace("rows", table(columns)))
    assert chains.chain.tolist() == [0, 1, 0, 1, 2]
    assert chains.follower.tolist() == [2, 3, -1, -1, -1]
    assert chains.first.tolist() == [0, 1, 4]


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


def with_retries(sessions):
    """Four requests, of which the client gives up two; each has a retry, and a turn that follows it."""
    firsts = pd.DataFrame({"arrival_s": np.zeros(4), "after": -1, "retry": 0, "output_tokens": 200})
    firsts["cancel_after_s"] = [np.nan, 0.1] * 2
    again = pd.DataFrame({"after": range(4), "retry": 1, "output_tokens": 20})
    turns = pd.DataFrame({"after": range(4, 8), "retry": 0, "output_tokens": 20})
    rows = pd.concat([firsts, again, turns], ignore_index=True).assign(input_tokens=64, gap_s=0.5)
    if sessions:
        rows["session"] = [f"s{row % 4}" for row in range(12)]
    return Trace("retries", rows)


@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.parametrize("users", [1, 4])
def test_users_send_a_retry_only_where_it_is_needed(users, sessions):
    clients = partial(ClosedLoop, users=users)
    table = replay(with_retries(sessions), SCENARIO, arrivals=clients).requests.set_index("row")
    assert table.index.tolist() == [0, 1, 2, 3, 5, 7, 8, 9, 10, 11]
    assert table["state"].loc[:3].tolist() == ["completed", "cancelled"] * 2
    assert table["arrival_s"][8] == table["finished_s"][0], "the turn follows the retry that was not needed"
    assert table["arrival_s"][9] == table["finished_s"][5]
    fleet = replay_fleet(with_retries(sessions), SCENARIO, FleetSettings(), arrivals=clients)
    assert fleet.requests["row"].tolist() == table.index.tolist()


def test_a_chain_that_ends_with_a_retry_that_is_not_needed_gives_way_to_the_next():
    rows = with_retries(sessions=False).requests.iloc[:8]
    table = replay(Trace("r", rows), SCENARIO, arrivals=partial(ClosedLoop, users=1)).requests
    assert table["row"].tolist() == [0, 1, 2, 3, 5, 7]
    times = table.set_index("row")
    assert times["arrival_s"][1] == times["finished_s"][0]


REJECTS_ALL = SCENARIO.changed(shed_ttft_s=1e-6)


def pauses(requests):
    """From each end to the next arrival, of one user."""
    return requests["arrival_s"].to_numpy()[1:] - requests["finished_s"].to_numpy()[:-1]


def test_a_user_who_is_rejected_in_a_row_backs_off_for_longer_each_time():
    table = replay(made(9), REJECTS_ALL, arrivals=partial(ClosedLoop, users=1)).requests
    assert (table["state"] == "rejected").all()
    longest = np.array([0.5, 1, 2, 4, 8, 8, 8, 8])
    assert (pauses(table) <= longest + 1e-9).all()
    assert (pauses(table) >= 0.75 * longest).all()


def test_users_who_are_rejected_together_come_back_apart():
    table = replay(made(80), REJECTS_ALL, arrivals=partial(ClosedLoop, users=40)).requests
    again = table["arrival_s"][40:]
    assert again.nunique() == 40
    other = replay(made(80), REJECTS_ALL, arrivals=partial(ClosedLoop, users=40, seed=1)).requests
    assert not again.equals(other["arrival_s"][40:])


def test_a_longer_pause_of_their_own_is_enough_for_users_who_are_rejected():
    after = np.arange(12) - 1
    trace = made(12, after=after, gap_s=np.where(after >= 0, 20.0, 0.0))
    table = replay(trace, REJECTS_ALL, arrivals=partial(ClosedLoop, users=1, think_s=0.0)).requests
    np.testing.assert_allclose(pauses(table), 20.0, atol=1e-6)


def test_a_user_begins_anew_with_short_back_offs_once_served():
    """Long prompts are rejected, short ones served: one rejection in a row each time."""
    trace = made(12)
    trace.requests["input_tokens"] = [30_000, 50] * 6
    scenario = SCENARIO.changed(shed_ttft_s=0.3, enable_prefix_caching=False)
    table = replay(trace, scenario, arrivals=partial(ClosedLoop, users=1)).requests
    assert table["state"].tolist() == ["rejected", "completed"] * 6
    assert (pauses(table)[::2] <= 0.5).all()
    assert (pauses(table)[::2] >= 0.375).all()
    np.testing.assert_allclose(pauses(table)[1::2], 0.0, atol=1e-9)


def test_a_request_that_is_too_long_makes_nobody_pause():
    trace = made(12)
    trace.requests["input_tokens"] = 200_000
    table = replay(trace, SCENARIO, arrivals=partial(ClosedLoop, users=1)).requests
    assert (table["state"] == "rejected").all()
    assert table["arrival_s"].max() < 0.1


def test_users_back_off_from_a_fleet_as_from_a_replica_and_with_fast_forward_as_without():
    scenario = SCENARIO.changed(max_num_seqs=4, shed_ttft_s=0.05)
    trace, clients = made(300), partial(ClosedLoop, users=40, seed=3)
    table = replay(trace, scenario, arrivals=clients).requests
    assert 0 < (table["state"] == "rejected").sum() < 250
    slow = replay(trace, scenario, arrivals=clients, fast_forward=False).requests
    pd.testing.assert_frame_equal(table, slow)
    fleet = replay_fleet(trace, scenario, FleetSettings(), arrivals=clients).requests
    columns = ["row", "arrival_s", "state"]
    pd.testing.assert_frame_equal(
        table[columns].sort_values("row", ignore_index=True),
        fleet[columns].sort_values("row", ignore_index=True),
    )
