"""HTML reports: one file, no network, nothing of a user's words runs, figures that say what they mean."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.reports import charts
from pagecast.planner_app.reports.html_page import HtmlTable, Section, SummaryCard, page, plain_figures
from pagecast.planner_app.reports.replay_report import replay_report
from pagecast.planner_app.reports.style import caption_of, peaks, title_of
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.operations import scale
from pagecast.traces.read import read

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"


class _Tags(HTMLParser):
    """Every tag with its attributes, and the text outside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def result():
    return replay(scale(read("chat", limit=300), 4), Scenario(max_num_seqs=16))


def test_a_report_is_one_file_that_asks_no_network(result):
    text = replay_report(result)
    tags = _Tags(text).tags
    assert not [tag for tag, attrs in tags if "src" in attrs or "href" in attrs]
    assert not re.search(r"https?://", text)
    policy = next(attrs["content"] for tag, attrs in tags if attrs.get("http-equiv"))
    assert "default-src 'none'" in policy and "http" not in policy
    assert text.count('id="plotly"') == 1
    assert len(text) < 2_500_000


def test_a_fleets_report_has_the_memory_of_each_replica():
    fleet = FleetSettings.make({"groups": [{"replicas": 2}]})
    result = replay_fleet(read("chat", limit=200), Scenario(num_gpu_blocks=900, costs="roofline"), fleet)
    text = replay_report(result)
    for heading in ("KV in use at peak", "blocks evicted"):
        assert f">{heading}</th>" in text
    rows = result.summary["fleet"]["by_replica"]
    assert sum(row["evicted_blocks"] for row in rows) == result.summary["evicted_blocks"] > 0
    for row in rows:
        assert f">{row['evicted_blocks']:,}</td>" in text and f">{row['peak_kv_usage']:.1%}</td>" in text


def test_what_users_named_is_text_and_nothing_else(result):
    text = replay_report(replace(result, trace=NASTY, notes=(NASTY,)))
    tags = _Tags(text).tags
    assert not [tag for tag, attrs in tags if tag == "img" or "onerror" in attrs]
    assert sum(tag == "script" for tag, _ in tags) == 3  # figures, plotly, the page's own
    assert "&lt;img src=x onerror=alert(2)&gt;" in text


def test_the_data_of_charts_cannot_end_its_script():
    from pagecast.planner_app.reports.style import chart, label

    figure = chart(NASTY, NASTY, "x", "y")
    figure.add_bar(x=[label(NASTY)], y=[1])
    text = page(
        NASTY,
        NASTY,
        [SummaryCard(NASTY, NASTY, NASTY)],
        [Section(NASTY, [figure, HtmlTable(NASTY, [NASTY], [[NASTY]], NASTY)])],
        [NASTY],
    )
    assert sum(tag == "script" for tag, _ in _Tags(text).tags) == 3
    [drawn] = plain_figures(text)
    assert drawn["layout"]["meta"]["title"] == NASTY
    assert "<img" not in drawn["data"][0]["x"][0]


def test_every_chart_has_a_title_a_conclusion_and_units(result):
    blocks, most = result.summary["num_gpu_blocks"], result.scenario.max_num_batched_tokens
    figures = charts.replay_charts(result.requests, result.steps, blocks, most)
    assert len(figures) == 9
    for figure in figures:
        assert title_of(figure) and caption_of(figure).endswith(".")
        assert figure.layout.xaxis.title.text or figure.layout.yaxis.title.text
        assert figure.data


def test_cached_and_uncached_are_compared_bin_by_bin_of_the_queue(result):
    figure = charts.cached_and_uncached_ttft(result.requests)
    hit = next(series for series in figure.data if series.name.startswith("with a hit"))
    table = result.requests
    empty = table[(table["queue_depth"] == 0) & (table["cached_tokens"] > 0)]
    assert hit.x[0] == "0"
    assert hit.y[0] == pytest.approx(empty["ttft_s"].median())
    assert hit.customdata[0] == len(empty)
    one_kind = table[table["cached_tokens"] > 0]
    assert "nothing to compare" in caption_of(charts.cached_and_uncached_ttft(one_kind))


def test_a_queue_within_steps_is_not_called_none(result):
    """Who arrives during a step waits for its end, whatever is left over when the next one is planned."""
    steps = result.steps.assign(running=54, waiting=0)
    caption = caption_of(charts.load_over_time(steps))
    assert caption == (
        "At most 54 requests ran at once, and none was left waiting after a step was planned: "
        "what arrives during a step waits for its end."
    )
    assert result.requests["queue_s"].max() > 0
    caption = caption_of(charts.load_over_time(steps.assign(waiting=3)))
    assert caption.startswith("At most 54 requests ran at once, and 3 were left waiting after a step was")


def test_the_replicas_time_adds_up(result):
    bars = charts.step_time(result.steps).data[0]
    assert sum(bars.x) == pytest.approx((result.steps["end_ns"].max() - result.steps["start_ns"].min()) / 1e9)


def test_long_runs_keep_their_spikes():
    times, values = np.arange(10_000.0), np.zeros(10_000)
    values[5_432] = 7.0
    at, highest = peaks(times, values, 10_000.0)
    assert len(at) == 600
    assert highest.max() == 7.0
    assert abs(at[highest.argmax()] - 5_432) < 20


def test_a_replay_that_served_nobody_still_has_its_report():
    trace = read("chat", limit=5)
    result = replay(trace, Scenario(num_gpu_blocks=2))
    assert result.summary["rejected"] == 5
    text = replay_report(result)
    assert "No request was given a token" in text


def test_replay_writes_its_report_and_its_trace(tmp_path, capsys):
    report, perfetto = tmp_path / "r.html", tmp_path / "t.json.gz"
    arguments = ["replay", "chat", "--limit", "40", "--report", str(report), "--perfetto", str(perfetto)]
    assert run([*arguments, "--json"]) == 0
    json.loads(capsys.readouterr().out)
    assert plain_figures(report.read_text())
    assert json.loads(gzip.decompress(perfetto.read_bytes()))["otherData"]["trace"] == "chat"
    assert run(arguments) == 0
    assert f"written to {report}" in capsys.readouterr().out


def test_without_plotly_a_report_is_refused_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    path = tmp_path / "r.html"
    assert run(["replay", "nowhere", "--report", str(path)]) == 3
    assert capsys.readouterr().err == (
        "pagecast: --report needs plotly; install it by pip install 'pagecast[app]'\n"
    )
    assert run(["replay", "nowhere", "--report", str(tmp_path)]) == 2
    assert run(["replay", "nowhere", "--perfetto", str(tmp_path / "no" / "t.json")]) == 2
    assert not path.exists()


@pytest.mark.skipif(not BROWSER, reason="no chromium here")
def test_a_browser_without_network_draws_every_chart(result, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(replay_report(result), encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=20000",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--dump-dom",
    ]
    browser = subprocess.run([BROWSER, *options, path.as_uri()], capture_output=True, text=True, timeout=120)
    assert 'data-drawn="9"' in browser.stdout
    assert browser.stdout.count('class="main-svg"') >= 9


def test_reuse_that_a_trace_does_not_tell_is_unknown_and_not_zero():
    trace = replace(read("chat", limit=20), lengths_only=True)
    text = replay_report(replay(trace, Scenario(costs="roofline")))
    card = text.partition("Prefix hits</div>")[2].partition("<div class=card>")[0]
    assert "unknown" in card and "%" not in card
