"""Resampled workloads are of the same kind, and copies find nothing of each other in the cache."""

import numpy as np
import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import Kept, replay
from pagecast.sim.replay.replicates import Spread, Study, summary_figures, with_intervals
from pagecast.sim.replay.resample import SESSIONS, WINDOWS_OF_TIME, redrawn, resample
from pagecast.sim.scenario import Scenario
from pagecast.traces.hits import hits
from pagecast.traces.read import read
from pagecast.traces.schema import Spans, Trace, table


def windows_of_documents(count: int = 240) -> Trace:
    """Requests that come evenly, four after another reading one document."""
    rows = np.arange(count)
    spans = Spans(np.arange(count + 1), rows // 4, np.zeros(count, np.int64), np.full(count, 640, np.int64))
    columns = {
        "arrival_s": rows.astype(float),
        "input_tokens": np.full(count, 640),
        "output_tokens": np.full(count, 8),
    }
    return Trace("documents", table(columns), spans)


@pytest.mark.parametrize("name", ["chat", "rag", "code"])
def test_a_draw_is_of_the_same_kind_and_repeatable(name):
    trace = read(name)
    drawn, again, other = resample(trace, 1), resample(trace, 1), resample(trace, 2)
    assert drawn.requests.equals(again.requests)
    assert not drawn.requests.equals(other.requests)
    assert len(drawn) == pytest.approx(len(trace), rel=0.15)
    for column in ("input_tokens", "output_tokens"):
        assert drawn.requests[column].sum() == pytest.approx(trace.requests[column].sum(), rel=0.2)
    assert hits(drawn, (), 64).infinite == pytest.approx(hits(trace, (), 64).infinite, abs=0.06)


def test_a_negative_seed_is_refused_by_name():
    with pytest.raises(BadInput, match="seed is -4; it must be at least 0"):
        resample(windows_of_documents(), -4)


def test_turns_follow_turns_of_their_own_session():
    drawn = resample(read("chat"), 3)
    after, session = drawn.integers("after"), drawn.requests["session"]
    later = np.flatnonzero(after >= 0)
    assert len(later) > 500
    assert (session.iloc[later].to_numpy() == session.iloc[after[later]].to_numpy()).all()
    assert (after[later] < later).all()


def test_a_request_without_a_session_is_drawn_by_itself_whatever_sessions_are_called():
    """It used to belong to a session that is called as its row was, and came with every turn of it."""
    columns = {"arrival_s": np.arange(40.0), "input_tokens": np.full(40, 8), "output_tokens": np.full(40, 4)}
    columns["session"] = ["row 39"] * 39 + [None]
    trace = Trace("one session", table(columns))
    assert {len(resample(trace, seed)) for seed in range(20)} == {2, 40, 78}


@pytest.mark.parametrize("count", [7, 11, 60])
def test_every_session_is_drawn_from_at_least_six(count):
    lengths = np.arange(count) + 1
    columns = {"arrival_s": np.arange(float(count)), "input_tokens": lengths, "output_tokens": lengths}
    columns["session"] = [f"session {length}" for length in lengths]
    trace = Trace("sessions", table(columns))
    drawn = np.stack([resample(trace, seed).integers("input_tokens") for seed in range(60)])
    shares = [np.unique(each, return_counts=True)[1] / len(drawn) for each in drawn.T]
    assert min(map(len, shares)) >= 6
    assert max(share.max() for share in shares) < 0.33


def test_a_window_drawn_twice_finds_nothing_of_its_first_copy():
    trace = windows_of_documents()
    # Each document is read four times in a row: three of four are found again, however windows are drawn.
    # Windows of four seconds hold one document each, so a second copy that kept its name would find all four.
    for seed in range(5):
        assert hits(resample(trace, seed), (), 64).infinite == pytest.approx(0.75, abs=0.02)


def test_prompts_given_as_token_ids_are_kept_apart_by_a_salt():
    trace = windows_of_documents(80)
    ids = [np.full(640, row // 4) for row in range(80)]
    drawn = resample(Trace("ids", trace.requests, None, ids), 0)
    salts = drawn.column("salt").fillna("").astype(str)
    assert len(set(salts)) > 1
    assert len(drawn.token_ids or []) == len(drawn)
    assert hits(drawn, (), 64).infinite == pytest.approx(0.75, abs=0.05)


def test_it_says_what_sharing_is_lost():
    assert redrawn(read("chat"), 0).figures["source"] == SESSIONS
    assert redrawn(windows_of_documents(), 0).figures["source"] == WINDOWS_OF_TIME
    figures = redrawn(read("chat"), 0, 0.5, 0.3).figures
    assert (figures["reused"], figures["reused_in_draws"]) == (0.5, 0.3)


def test_intervals_stand_beside_the_figures_and_hold_the_forecast():
    trace, scenario = read("rag", limit=150), Scenario.make({})
    result = replay(trace, scenario, kept=Kept(steps=False))
    spread = Study(trace, scenario, workload=resample).spread(20, workers=1)
    body = with_intervals(result.summary, spread)
    assert body["ttft_s"]["low"]["p90"] < body["ttft_s"]["high"]["p90"]
    assert body["low"]["makespan_s"] <= body["high"]["makespan_s"]
    assert body["low"]["output_tokens_per_s"] > 0
    assert body["e2e_s"]["low"]["mean"] < body["e2e_s"]["mean"] < body["e2e_s"]["high"]["mean"]
    assert body["ttft_s"]["mean"] == result.summary["ttft_s"]["mean"]
    assert "wall_s" not in body["low"]
    assert with_intervals(result.summary, Spread())["low"] == {}
    assert summary_figures(result)["ttft_s.p90"] == result.summary["ttft_s"]["p90"]


def test_every_draw_accepts_draft_tokens_by_chances_of_its_own():
    study = Study(read("chat", limit=25), Scenario.make({"speculative_config": "eagle:3:0.6"}))
    spread = study.spread(8, workers=1)
    low, middle, high = (
        side["speculation.num_accepted_tokens"] for side in (spread.low, spread.middle, spread.high)
    )
    assert low < middle < high
    assert study.spread(8, workers=1) == spread


def test_an_interval_is_widened_to_the_forecast_and_has_a_twentieth_of_draws_on_either_side():
    spread = Spread({"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 2.0})
    spread = spread.around({"a": 0.5, "b": float("nan"), "c": 9.0})
    assert (spread.low, spread.high) == ({"a": 0.5, "b": 1.0}, {"a": 2.0, "b": 2.0})
    body = with_intervals({"a": 3.0}, spread)
    assert (body["low"]["a"], body["high"]["a"]) == (0.5, 3.0)

    class Numbered(Study):
        def run(self, job):
            return {"x": float(job.index), "rare": float(job.index) if job.index < 5 else float("nan")}

    result = Numbered(read("rag"), Scenario.make({})).spread(39, workers=1)
    assert (result.low["x"], result.high["x"]) == pytest.approx((1.0, 37.0))  # 2nd and 38th of 0 to 38
    assert "rare" not in result.low


def test_a_figure_that_does_not_follow_step_times_shows_its_range_beside_its_slope():
    class Uneven(Study):
        def run(self, job):
            assert job.factor is not None
            change = 100 * (job.factor - 1)
            dip = 7.5 if change == pytest.approx(-0.5) else 10 + change
            return {"dip": dip, "rare": float("nan"), "no": 0}

    point = {"dip": 10.0, "rare": 1.0, "no": 0.0}
    spread = Uneven(read("rag"), Scenario.make({})).spread(0, point=point, workers=1)
    assert spread.reach["dip"] == pytest.approx((-25, 10))
    assert 10 < spread.sensitivity["dip"] < 15
    assert "rare" not in spread.reach
    assert (spread.sensitivity["no"], spread.reach["no"]) == (0, (0, 0))
    assert spread.low == {}


@pytest.mark.slow
def test_the_workload_adds_to_what_the_costs_leave_open():
    trace, scenario = read("rag"), Scenario.make({})
    fixed = Study(trace, scenario).spread(20, workers=1)
    drawn = Study(trace, scenario, workload=resample).spread(20, workers=1)
    key = "e2e_s.mean"
    assert drawn.high[key] - drawn.low[key] > 1.5 * (fixed.high[key] - fixed.low[key])


def test_any_seed_is_taken_with_speculation_too():
    scenario = Scenario.make({"speculative_config": "eagle:3:0.6", "seed": 1_785_000_000_000_000_000})
    spread = Study(read("chat", limit=20), scenario, scenario.seed).spread(2, workers=1)
    assert spread.low["speculation.num_accepted_tokens"] > 0
