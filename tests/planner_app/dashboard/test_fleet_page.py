"""The Fleet page: figures of real fleets, a replica's death that shows, hits per router."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import pytest
from pagecast.sim.fleet.figures import ready_over_time
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

pytest.importorskip("streamlit", reason="the dashboard needs the extra `app`")

from pagecast.planner_app.dashboard.fleet import charts
from pagecast.planner_app.dashboard.fleet.study import study
from pagecast.planner_app.reports.fleet_charts import replicas_over_time
from pagecast.planner_app.reports.style import caption_of, title_of
from streamlit.testing.v1 import AppTest

SCENARIO = Scenario(
    gpu="L40S",
    costs="roofline",
    gpu_memory_utilization=0.9,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
)


@pytest.fixture(scope="module")
def made():
    fleet = FleetSettings.make({"groups": [{"replicas": 2}], "router": {"policy": "cost"}})
    return study(read("chat", limit=300), SCENARIO, fleet, ["round-robin", "cost"], 0.3)


def test_each_router_has_the_figures_of_its_own_replay(made):
    assert made.routers["router"].tolist() == ["cost", "round-robin"]
    fleet = FleetSettings.make({"groups": [{"replicas": 2}]})
    alone = replay_fleet(read("chat", limit=300), SCENARIO, fleet).summary
    row = made.routers.iloc[1]
    assert row["token_hit_rate"] == alone["token_hit_rate"]
    assert row["ttft_p99_s"] == alone["ttft_s"]["p99"]
    figure = charts.hits_per_router(made.routers)
    assert "Most hits" in caption_of(figure)
    assert figure.data[0].textangle == 0 and all(
        "<br>" in text for text in figure.data[0].text
    )  # not upright


def test_a_replicas_death_shows_in_replicas_and_ttft(made):
    ready = ready_over_time(made.lost.timeline)
    assert ready["replicas"].min() == 1 and ready["replicas"].iloc[-1] == 2
    assert made.lost.summary["fleet"]["retries"] > 0
    assert "sent again" in charts.death_in_words(made)
    assert title_of(charts.a_replicas_death(made)) == "One replica's death"
    without, with_loss = replicas_over_time(charts.named(made)).data
    assert list(without.y) == [2, 2] and min(with_loss.y) == 1


def test_ttft_over_time_is_that_of_the_requests_that_arrived_then(made):
    times, values = charts.ttft_over_time(made.run)
    assert len(times) == len(values)
    assert np.nanmax(values) <= made.run.requests["ttft_s"].max()
    assert np.nanmin(values) >= made.run.requests["ttft_s"].min()


def test_a_loss_that_ttft_never_recovers_from_is_told_as_such(made):
    worse = made.lost.requests.copy()
    after = worse["arrival_s"] > made.loss_s
    worse["ttft_s"] = made.run.requests["ttft_s"].where(~after, made.run.requests["ttft_s"] * 10)
    forever = type(made)(
        made.run, type(made.run)(made.run.summary, worse, made.run.timeline), made.loss_s, made.routers
    )
    assert charts.recovery_s(forever) is None
    never = type(made)(made.run, made.run, made.loss_s, made.routers)
    assert charts.recovery_s(never) == 0.0


def test_replicas_are_ready_from_when_they_are_until_they_drain_or_are_lost():
    rows = [
        (0.0, "a", "ready"),
        (0.0, "b", "ready"),
        (5.0, "a", "lost"),
        (5.0, "c", "started"),
        (9.0, "c", "ready"),
        (12.0, "b", "draining"),
        (15.0, "b", "gone"),
    ]
    table = ready_over_time(pd.DataFrame(rows, columns=["time_s", "replica", "event"]))
    assert dict(zip(table["time_s"], table["replicas"], strict=True)) == {
        0.0: 2,
        5.0: 1,
        9.0: 2,
        12.0: 1,
        15.0: 1,
    }


def test_the_page_shows_its_charts():
    test = AppTest.from_string(
        "from pagecast.planner_app.dashboard.shell import sidebar\n"
        "from pagecast.planner_app.dashboard.fleet.page import render\n"
        "sidebar.ask()\nrender()\n",
        default_timeout=60,
    )
    parameters = {"requests": "60", "prices": "H200=3.5", "replicas": "2", "routers": ["round-robin"]}
    for name, value in parameters.items():
        test.query_params[name] = value
    test.run()
    until = time.monotonic() + 120
    while not any("Hits per router" in text.value for text in test.markdown):
        assert time.monotonic() < until and not test.exception
        time.sleep(0.5)
        test.run()
    assert not test.error
    titles = " ".join(text.value for text in test.markdown)
    for title in ("Replicas over time", "One replica", "Requests per replica"):
        assert title in titles
    cards = {metric.label: metric.value for metric in test.metric}
    assert cards["Cost"].startswith("$") and cards["GPU hours"] != "0"


def test_what_differs_by_chance_is_no_effect_of_a_loss(made):
    """A replay without any loss, told as one with a loss: its spans differ too, here and there."""
    run, chance, *others = made.run, *made.others
    told = type(made)(run, chance, made.loss_s, made.routers, tuple(others))
    assert charts.recovery_s(told) == 0.0
    assert "no more than it differs by chance" in charts.death_in_words(
        type(made)(run, run, made.loss_s, made.routers)
    )


def test_an_effect_ends_with_the_first_span_that_is_as_without_the_loss(made):
    worse = made.run.requests.copy()
    last = float(worse["arrival_s"].max())
    hit = (worse["arrival_s"] > made.loss_s) & (worse["arrival_s"] < made.loss_s + last / 6)
    late = worse["arrival_s"] > 0.95 * last  # as chance would have it
    worse["ttft_s"] = worse["ttft_s"].where(~(hit | late), worse["ttft_s"] * 10 + 1)
    lost = type(made.run)(made.run.summary, worse, made.run.timeline)
    told = type(made)(made.run, lost, made.loss_s, made.routers)
    assert charts.recovery_s(told) == pytest.approx(last / 6, abs=last / 30)
