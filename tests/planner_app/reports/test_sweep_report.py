"""The report of a sweep, and the charts it shares with tuning and the dashboard."""

import pandas as pd
import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.planner.sweep.options import SweepOptions
from pagecast.planner_app.planner.sweep.question import SweepQuestion
from pagecast.planner_app.planner.sweep.study import sweep
from pagecast.planner_app.reports import sweep_charts as charts
from pagecast.planner_app.reports.html_page import plain_figures
from pagecast.planner_app.reports.style import caption_of
from pagecast.planner_app.reports.sweep_report import sweep_report
from pagecast.planner_app.wording.figures import axis, shown, title
from pagecast.sim.scenario import Scenario
from pagecast.traces.operations import scale
from pagecast.traces.read import read


@pytest.fixture(scope="module")
def study():
    scenario = Scenario()
    space = ["max_num_seqs=4,64", "enable_prefix_caching=true,false"]
    trace = scale(read("chat", limit=120), 6)
    question = SweepQuestion(
        trace, scenario, SweepOptions(settings=space, slo="ttft_p99<1s", price={"H200": 3.5})
    )
    return sweep(question)


def test_the_report_names_the_cheapest_and_marks_it(study):
    text = sweep_report(study)
    best = study.cheapest
    assert "max_num_seqs=64" in text.split("<h2>")[0]
    assert text.count("<tr class=marked>") == 2  # on the front, and among all trials
    assert f"<td>{best['number']}</td>" in text
    assert len(plain_figures(text)) == 2 + 1 + 2 * 3


def test_the_report_tells_the_scenario_the_costs_and_yes_from_no(study):
    text = sweep_report(study)
    scenario = text[text.index("<h2>Scenario</h2>") :]
    for name, value in {
        "model": "Qwen/Qwen3-8B",
        "gpu": "H200",
        "max_num_seqs": "varied: 4,64",
        "step costs used": "vllm-0.24-h200-qwen3-8b",
    }.items():
        assert f"<td>{name}</td><td>{value}</td>" in scenario
    trials = text[text.index("<h2>All trials</h2>") : text.index("<h2>Scenario</h2>")]
    assert "<td>yes</td>" in trials and "<td>no</td>" in trials
    assert "Step costs fitted to" in text and "one replica that serves the whole trace" in text
    assert "<th>step costs</th>" not in text


def test_where_step_costs_differ_the_report_has_them_in_its_tables():
    scenario = Scenario()
    space = ["gpu=H200,L40S"]
    text = sweep_report(sweep(SweepQuestion(read("chat", limit=20), scenario, SweepOptions(settings=space))))
    assert text.count("<th>step costs</th>") == 2
    assert "Step costs differ within this sweep" in text


def test_sweep_writes_its_report(tmp_path, capsys):
    path = tmp_path / "sweep.html"
    options = ["--set", "max_num_seqs=4,64", "--limit", "40", "--workers", "1", "--report", str(path)]
    assert run(["sweep", "chat", *options]) == 0
    assert f"written to {path}" in capsys.readouterr().out
    assert "max_num_seqs=64" in path.read_text()


def test_where_nothing_meets_the_level_it_says_so(study):
    asked = study.question
    hopeless = sweep(
        SweepQuestion(
            asked.trace, asked.scenario, SweepOptions(settings=asked.ask.settings, slo="ttft_p99<1us")
        )
    )
    assert "No scenario of the space meets ttft_p99&lt;1us" in sweep_report(hopeless)


def test_trials_are_drawn_once_each_and_the_front_is_told_apart(study):
    figure = charts.trade_off(study.table, "output_tokens_per_s", "ttft_p99_s", study.knobs)
    drawn = {series.name: len(series.x) for series in figure.data}
    assert sum(drawn.values()) == len(study.table)
    assert drawn["on the front"] == study.table["on_front"].sum()


def test_a_knob_is_drawn_by_its_values_in_order():
    table = pd.DataFrame({"block_size": [64, 16, 16, 32], "ttft_p99_s": [3.0, 1.0, 2.0, 2.0]})
    figure = charts.against_knob(table, "block_size", ["ttft_p99_s"], chosen=16)
    assert list(figure.data[0].x) == [16, 32, 64]
    assert list(figure.data[0].y) == [1.5, 2.0, 3.0]
    assert figure.layout.yaxis.title.text == "TTFT p99, seconds"
    assert caption_of(figure).startswith("Best at block_size 16 (1.5 s), worst at 64 (3 s)")


def test_what_a_knob_does_not_change_is_drawn_from_nothing_up():
    table = pd.DataFrame({"block_size": [16, 32], "evicted_blocks": [0, 0], "preemptions": [0, 0]})
    figure = charts.against_knob(table, "block_size", ["evicted_blocks", "preemptions"])
    assert figure.layout.yaxis.rangemode == "tozero"
    table["evicted_blocks"] = [900, 910]
    assert charts.against_knob(table, "block_size", ["evicted_blocks"]).layout.yaxis.rangemode != "tozero"


def test_a_knob_of_words_and_nothings_is_drawn_as_words():
    table = pd.DataFrame({"kv": ["<b>fp8", None, "auto"], "output_tokens_per_s": [3.0, 1.0, 2.0]})
    figure = charts.against_knob(table, "kv", ["output_tokens_per_s"])
    assert list(figure.data[0].x) == ["&lt;b&gt;fp8", "none", "auto"]
    assert "Best at kv <b>fp8" in caption_of(figure)  # plain text: the page escapes it


@pytest.mark.parametrize(
    ("name", "expected", "unit", "value"),
    [
        ("ttft_s.p99", "TTFT p99", "TTFT p99, seconds", "1.5 s"),
        ("ttft_p99_s", "TTFT p99", "TTFT p99, seconds", "1.5 s"),
        ("makespan_s", "makespan", "makespan, seconds", "1.5 s"),
        ("output_tokens_per_s", "output tokens/s", "output tokens/s", "1.5"),
        ("evicted_blocks", "evicted blocks", "evicted blocks", "1.5"),
    ],
)
def test_figures_are_named_as_people_say_them(name, expected, unit, value):
    assert (title(name), axis(name), shown(name, 1.5)) == (expected, unit, value)
