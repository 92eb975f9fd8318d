"""The Load page and the cost card: figures of real replays, GPUs side by side, one sentence each."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest
from pagecast.planner_app.planner.slo import Slo
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

pytest.importorskip("streamlit", reason="the dashboard needs the extra `app`")

from pagecast.planner_app.dashboard.load import charts, highest, page
from pagecast.planner_app.dashboard.load.curves import curves
from pagecast.planner_app.dashboard.load.highest import rates_job
from pagecast.planner_app.dashboard.shell.elements import cost_words
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.dashboard.what_if.advice import advice_on, advice_on_cost, advice_on_load
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.planning import plan
from pagecast.planner_app.planner.prices import read_prices, usd_per_million_tokens
from pagecast.planner_app.reports.style import caption_of
from streamlit.testing.v1 import AppTest

SLO = "ttft_p99<2s,tpot_p99<50ms"


@pytest.fixture(scope="module")
def table():
    return curves(
        read("chat", limit=60), Scenario(max_model_len=8192), ["H200", "L4"], SLO, loads=(0.5, 1.0, 8.0)
    )


def test_ttft_grows_and_goodput_leaves_the_offered_load(table):
    fast = table[table["gpu"] == "H200"]
    assert list(fast["load"]) == [0.5, 1.0, 8.0]
    assert fast["ttft_p99_s"].iloc[2] > fast["ttft_p99_s"].iloc[0]
    assert np.allclose(fast["requests_per_s"], fast["requests_per_s"].iloc[1] * fast["load"])
    assert fast["goodput"].iloc[1] > 0.99 and bool(fast["meets"].iloc[1])
    assert (fast["goodput_per_s"] <= 1.5 * fast["requests_per_s"]).all()


def test_a_gpu_that_is_overloaded_is_tried_at_no_higher_load_but_the_side_bars(table):
    slow = table[table["gpu"] == "L4"]
    assert 1.0 in set(slow["load"]) and 8.0 not in set(slow["load"])
    assert not slow["meets"].any()


def test_a_gpu_that_cannot_run_the_model_says_why():
    rows = curves(read("chat", limit=20), Scenario(model="Qwen/Qwen3-32B"), ["L4"], SLO, loads=(1.0,))
    assert "L4" in rows["reason"].iloc[0] and not rows["meets"].iloc[0]


def test_goodput_is_the_share_of_requests_that_keep_every_bound():
    result = replay(read("chat", limit=60), Scenario())
    requests = result.requests
    ttft = float(requests["ttft_s"].median())
    good = Slo.parse(f"ttft_p99<{ttft}s,goodput(tpot<1s)>0.5").good(requests)
    assert good.tolist() == ((requests["ttft_s"] < ttft) & ~(requests["tpot_s"] >= 1)).tolist()


def test_advice_names_the_load_that_a_gpu_takes(table):
    fast, slow = (table[table["gpu"] == gpu] for gpu in ("H200", "L4"))
    offered = float(fast[fast["load"] == 1.0]["requests_per_s"].iloc[0])
    assert "The SLO holds at" in page.advice(fast)
    assert "broken at every load tried" in page.advice(slow)
    rates = {"H200": offered * 1.1, "L4": offered / 3.5}
    assert f"up to {offered * 1.1:.3g} requests/s" in page.advice(fast, rates)
    assert "over 4 replicas" in page.advice(slow, rates)
    assert "at no load" in page.advice(slow, {"L4": None})
    assert "SLO" in page.advice(table.drop(columns="meets"))
    assert "H200" in caption_of(charts.ttft_against_load(table, 2.0))
    assert "H200" in caption_of(charts.goodput_against_load(table))


def test_the_cost_of_tokens_follows_from_price_and_throughput(table):
    assert usd_per_million_tokens(3.6, 1000) == pytest.approx(1.0)
    assert usd_per_million_tokens(3.6, 0) is None
    priced = table.assign(usd_per_million=[2.0, 1.0, 0.5, 3.0, 3.0][: len(table)])
    assert "H200" in caption_of(charts.cost_against_load(priced))
    with pytest.raises(BadInput, match="write GPU=USD_PER_GPU_HOUR"):
        read_prices(["3.5"])
    assert PageView.of({"prices": "H200=-1"}).prices() == {}  # as its box says
    assert PageView.of({"prices": "h200=3.5, L40S=1.2"}).prices() == {"H200": 3.5, "L40S": 1.2}


def test_what_the_cards_advise():
    chat = read("chat", limit=60)
    light = replay(chat, Scenario())
    assert advice_on("ttft_s.p99", light, [("ttft_p99<2s", True)]).startswith("Nothing to do")
    assert "prefill" in advice_on("ttft_s.p99", light, [("ttft_p99<1ms", False)])
    assert advice_on("token_hit_rate", replay(chat, Scenario(enable_prefix_caching=False)), []) == (
        "Switch prefix caching on."
    )
    tight = replay(chat, Scenario(num_gpu_blocks=450))
    assert "KV blocks" in advice_on("ttft_s.p99", tight, [("ttft_p99<1ms", False)])
    assert "evicted" in advice_on("token_hit_rate", tight, [])
    assert "price" in advice_on_cost(False, light) and "Load page" in advice_on_cost(True, light)
    assert advice_on_load("batch size", 5) == "To serve more users, raise the batch size (sequences at once)."
    assert "Wait" in advice_on_load("KV blocks", None)


def test_a_price_gives_the_cost_card_and_each_card_one_sentence(app):
    test = app(requests=60, prices="H200=3.5")
    assert not test.exception and not test.error
    summary = replay(read("chat", limit=60), Scenario()).summary
    cost = usd_per_million_tokens(3.5, summary["output_tokens_per_s"])
    cards = {metric.label: metric.value for metric in test.metric}
    assert cards["Cost"] == f"${cost:.2f}" and len(cards) == 5
    bold = [text.value for text in test.markdown if text.value.endswith("\\.**")]
    assert len(bold) == 5


def test_composed_costs_are_not_called_measured(app) -> None:
    assert cost_words("measured") == "costs composed of measured operations"
    test = app(requests=30, gpu="L40S")
    assert any("costs composed of measured operations" in text.value for text in test.markdown)


def test_without_a_price_the_card_asks_for_one(app):
    test = app(requests=60)
    assert {metric.label: metric.value for metric in test.metric}["Cost"] == "–"
    assert any("Type a price for H200" in text.value for text in test.markdown)


def test_the_load_page_sets_gpus_side_by_side():
    test = AppTest.from_string(
        "from pagecast.planner_app.dashboard.shell import sidebar\n"
        "from pagecast.planner_app.dashboard.load.page import render\n"
        "sidebar.ask()\nrender()\n",
        default_timeout=60,
    )
    parameters = {"requests": "40", "prices": "H200=3.5", "gpus": ["B200"]}
    for name, value in parameters.items():
        test.query_params[name] = value
    test.run()
    until = time.monotonic() + 120
    while not any("Cost against load" in text.value for text in test.markdown):
        assert time.monotonic() < until and not test.exception
        time.sleep(0.5)
        test.run()
    assert not test.error
    assert [metric.label for metric in test.metric].count("TTFT, p99") == 2
    titles = " ".join(text.value for text in test.markdown)
    assert "TTFT against load" in titles and "Goodput against load" in titles
    assert {metric.value for metric in test.metric if metric.label.startswith("$")} >= {"no price"}
    # TTFT of one scenario differs from What-if's, and the page says why.
    assert any("of more requests than What-if's" in text.value for text in test.caption)


def test_the_highest_rate_is_that_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, scenario = read("chat", limit=80), Scenario(max_num_seqs=8)
    short = partial(PlanOptions, most_requests=80)
    monkeypatch.setattr(highest, "PlanOptions", short)
    told: list[tuple[int, int, str]] = []
    rates = rates_job(trace, scenario, ["H200"], SLO, progress=told.append)
    found = plan(trace, scenario, short(slo=SLO, replicates=0, explain=False)).answers["rate"]
    assert rates["H200"] == found.value
    assert told
