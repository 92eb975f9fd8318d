"""Knobs of tiers, windows and speculation: what the side bar offers, and what they do to the figures."""

from __future__ import annotations

import shlex

import pytest
from pagecast.planner_app.console import seconds
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import replay

pytest.importorskip("streamlit", reason="the dashboard needs the extra `app`")

from pagecast.planner_app.dashboard.shell.elements import plain
from pagecast.planner_app.dashboard.shell.view import AT_ONCE_SPECULATING, PageView, command
from pagecast.planner_app.dashboard.shell.workload import trace_of
from pagecast.planner_app.dashboard.what_if.effects import active, effects, sentences
from streamlit.testing.v1 import AppTest

TIGHT = {"requests": 120, "num_gpu_blocks": 1200}


pytestmark = pytest.mark.usefixtures("no_browser")


def cells(test: AppTest) -> dict[str, tuple[str, str, str]]:
    """The table of effects by its rows' titles."""
    assert not test.exception and not test.error
    table = test.table[0].value
    return {title: tuple(row) for title, row in zip(table.index, table.to_numpy().tolist(), strict=True)}


def figures(**parameters: object):
    view = PageView.of(parameters)
    return replay(trace_of(view), view.scenario()).summary


def test_without_tiers_there_are_no_knobs_of_them_and_no_table(app):
    test = app(requests=60)
    assert not test.table and not test.exception
    names = {widget.key for kind in ("selectbox", "slider", "toggle") for widget in getattr(test, kind)}
    hidden = {"kv_offloading_eviction_policy", "secondary_tiers", "spec_drafts", "spec_acceptance"}
    assert not names & {*hidden, "disable_hybrid_kv_cache_manager"}


def test_host_memory_and_a_disk_move_ttft_and_hits_to_those_of_a_replay(app):
    test = app(**TIGHT)
    test.select_slider(key="kv_offloading_size").set_value(4.0).run()
    test.selectbox(key="secondary_tiers").set_value("fs").run()
    test.selectbox(key="kv_offloading_eviction_policy").set_value("arc").run()
    table = cells(test)
    tiers = {"kv_offloading_size": 4.0, "secondary_tiers": "fs", "kv_offloading_eviction_policy": "arc"}
    before, after = figures(**TIGHT), figures(**TIGHT, **tiers)
    assert table["TTFT, mean"][:2] == tuple(
        plain(seconds(summary["ttft_s"]["mean"])) for summary in (before, after)
    )
    sources = after["prompt_tokens_by_source"]
    assert sources["host"] and sources["disk"]
    for title, source in (("host memory", "host"), ("the disk", "disk")):
        share = sources[source] / sum(sources.values())
        assert table[f"Prompt tokens from {title}"][:2] == (plain("0.0%"), plain(f"{share:.1%}"))
    assert {metric.label: metric.value for metric in test.metric}["TTFT, p99"] == seconds(
        after["ttft_s"]["p99"]
    )


def test_speculation_moves_tpot_and_tokens_per_step(app):
    test = app(requests=20)
    test.selectbox(key="spec_method").set_value("eagle").run()
    test.slider(key="spec_acceptance").set_value(0.9).run()
    high = cells(test)["TPOT, mean"]
    test.slider(key="spec_acceptance").set_value(0.1).run()
    low = cells(test)
    assert high[0] == low["TPOT, mean"][0]
    after = figures(requests=20, speculative_config="eagle:3:0.1")
    assert low["TPOT, mean"][1] == plain(seconds(after["tpot_s"]["mean"])) != high[1]
    assert low["Tokens per request and step"][1] == plain(
        f"{after['speculation']['mean_acceptance_length']:.2f}"
    )


def test_a_model_with_windows_says_its_groups_and_what_keeping_every_token_takes(app):
    model = "google/gemma-3-27b"
    test = app(requests=40, model=model)
    assert any("window of 1" in caption.value for caption in test.caption)
    assert not test.table
    test.toggle(key="disable_hybrid_kv_cache_manager").set_value(True).run()
    peaks = [
        figures(requests=40, model=model, disable_hybrid_kv_cache_manager=kept)["peak_kv_usage"]
        for kept in (False, True)
    ]
    assert peaks[0] < peaks[1]
    assert cells(test)["KV in use at peak"][:2] == tuple(plain(f"{peak:.1%}") for peak in peaks)


def test_the_url_gives_a_size_that_the_slider_does_not_have(app):
    test = app(requests=40, kv_offloading_size=24)
    assert test.select_slider(key="kv_offloading_size").value == 24.0
    assert cells(test)


def test_a_long_trace_that_speculates_is_replayed_beside_the_page(app):
    test = app(requests=AT_ONCE_SPECULATING + 1, spec_method="ngram", spec_drafts=1, seed=5)
    assert not test.metric and not test.exception
    assert test.button(key="stop-replay").click().run()


def test_speculation_that_is_given_twice_is_refused_in_one_line():
    with pytest.raises(BadInput, match="given twice") as refused:
        PageView.of({"spec_method": "eagle", "speculative_config": "eagle:3:0.5"})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        ({"kv_offloading_size": 8.0}, ["--kv-offloading-size", "8"]),
        (
            {"spec_method": "mtp", "spec_drafts": 2, "spec_acceptance": 1.0},
            ["--speculative-config", "mtp:2:1"],
        ),
    ],
)
def test_the_command_has_the_knobs_as_options(parameters, options):
    words = shlex.split(command(PageView.of(parameters)))
    assert words[-len(options) :] == options
    assert "--spec-method" not in words


def test_a_view_of_knobs_comes_back_from_its_link():
    view = PageView.of({"kv_offloading_size": 64.0, "spec_method": "eagle", "spec_acceptance": 0.35})
    assert PageView.from_query(view.query()) == view
    assert active(view) == ["64 GiB of host memory", "3 drafts by eagle"]


def test_host_memory_that_nobody_needs_is_said_to_be_of_no_use():
    view = PageView.of({"requests": 40, "kv_offloading_size": 64.0})
    trace = trace_of(view)
    result = replay(trace, view.scenario())
    reference = replay(trace, view.without(["kv_offloading_size"]).scenario())
    table = effects(reference, result)
    assert set(table["change"]) == {plain("+0.0%"), plain("+0.0 points")}
    assert "lost nothing" in sentences(result)[0]
