"""The report of a plan: the answer first, what breaks beyond it, the envelope beside it."""

from dataclasses import replace

import pytest
from pagecast.planner_app.planner.capacity.bisection import LoadTrial
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.planning import Answer, plan
from pagecast.planner_app.planner.served import RequestCounts
from pagecast.planner_app.planner.slo import Slo, TermVerdict
from pagecast.planner_app.reports import plan_charts as charts
from pagecast.planner_app.reports.html_page import plain_figures
from pagecast.planner_app.reports.plan_report import _answer, plan_report
from pagecast.planner_app.reports.style import caption_of
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

COUNTS = RequestCounts(50, 50)


@pytest.fixture(scope="module")
def plan_result():
    level = Slo.parse("ttft_p99<1s,tpot_p95<30ms")
    return plan(
        read("chat", limit=60),
        Scenario(max_num_seqs=16),
        PlanOptions(slo=level.text, kinds=["concurrency"], replicates=0, explain=False, most_requests=120),
    )


def test_the_answer_stands_first_and_every_load_tried_is_drawn(plan_result):
    text = plan_report(plan_result)
    answer = plan_result.concurrency
    assert f"{answer.value:,.0f} user" in text.split("<h2>")[0]
    assert plan_result.envelope.binding in text
    terms, throughput, envelope = plain_figures(text)
    assert len(terms["data"]) == len(answer.tried[0].terms)
    drawn = sum(len(series["customdata"]) for series in throughput["data"])
    assert drawn == len(answer.tried)
    assert len(envelope["data"]) == 2


def test_offered_and_served_requests_are_told_apart_and_users_are_users():
    """Requests offered at a rate, and those that ended: two columns of unlike figures."""
    term = (TermVerdict("ttft_p99<2s", 1.0, 2.0, True),)
    at = LoadTrial(10.0, True, term, 0.0, 9.5, 900.0, COUNTS)
    away = LoadTrial(12.0, False, (TermVerdict("backlog_growth<=0.08", 0.7, 0.08, False),), 0.0, 10.5, 0.0)
    answer = Answer("rate", 10.0, 8.0, 12.0, False, at, away, None, 9, (at, away), 5)
    *_, sides = _answer(answer).parts
    assert sides.header[1] == "requests/s offered"
    row = dict(zip(sides.header, sides.rows[0], strict=True))
    assert (row["requests/s offered"], row["requests/s served"]) == ("10", "9.5")
    assert sides.rows[1][-2:] == ["-", "-"]  # it was given up: nothing more is known
    users = _answer(replace(answer, kind="concurrency")).parts[0]
    assert "users" in users.layout.xaxis.title.text


def outcome(amount: float, ttft_s: float, good: float) -> LoadTrial:
    terms = (
        TermVerdict("ttft_p99<2s", ttft_s, 2.0, ttft_s < 2),
        TermVerdict("goodput(ttft<2s)>0.9", good, 0.9, good > 0.9),
    )
    holds = all(term.holds for term in terms)
    return LoadTrial(amount, holds, terms, 0.0, amount / 10, 100 * amount, COUNTS)


def test_terms_are_drawn_as_parts_of_their_bounds():
    tried = [outcome(20, 3.0, 0.8), outcome(10, 1.0, 0.95)]
    figure = charts.terms_by_load(tried, "users", 10, 8, 12)
    by_name = {series.name: list(series.y) for series in figure.data}
    assert by_name["ttft_p99&lt;2s"] == [50, 150]
    assert by_name["goodput(ttft&lt;2s)&gt;0.9"] == pytest.approx([50, 200])
    assert "at 20 ttft_p99<2s and goodput(ttft<2s)>0.9 breaks" in caption_of(figure)


def test_captions_say_where_nothing_holds_and_where_all_does():
    assert "No load" in caption_of(charts.terms_by_load([outcome(1, 3.0, 0.8)], "users", None))
    assert "Every load tried holds" in caption_of(charts.terms_by_load([outcome(1, 1.0, 1.0)], "users", 1))


def test_a_bound_of_nothing_and_a_term_without_value():
    assert charts.used(TermVerdict("preemptions<=0", 0.0, 0.0, True)) == 0
    assert charts.used(TermVerdict("preemptions<=0", 0.1, 0.0, False)) > 100
    assert charts.used(TermVerdict("tpot_p99<1s", None, 1.0, True)) is None


def test_the_envelope_names_the_least_limit():
    caption = caption_of(charts.envelope_bars({"KV blocks": 100, "batch size": 50}, 25, 20, 30))
    assert "the first limit is batch size, at 50" in caption
    assert "Replays admit 25, 50% of that" in caption


def test_an_envelope_of_nothing_is_drawn_as_nothing():
    figure = charts.envelope_bars({"KV blocks": 0, "batch size": 50}, 2, 2, 2)
    assert list(figure.data[0].text) == ["0", "50"]
    assert caption_of(figure) == "By arithmetic the first limit is KV blocks, at 0. Replays admit 2."


def test_replicas_and_what_is_never_served_stand_first():
    level = Slo.parse("e2e_p99<60s")
    scenario = Scenario(num_gpu_blocks=100, costs="roofline")
    plans = plan(
        read("chat", limit=40),
        scenario,
        PlanOptions(slo=level.text, kinds=["rate"], replicates=0, explain=False, most_requests=40),
    )
    lead = plan_report(plans).split("<h2>")[0]
    assert plans.replicas is not None and plans.replicas.sentence in lead
    assert "are rejected at any load" in lead
