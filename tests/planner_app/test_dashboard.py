"""The dashboard's pages as scripts: that they show what the command line says, and what they refuse."""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
import socket
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.planner_app.cli import run
from pagecast.sim.core.errors import BadInput

pytest.importorskip("streamlit", reason="the dashboard needs the extra `app`")

from pagecast.planner_app.console import seconds
from pagecast.planner_app.dashboard import admissible, exports, replays, script, serve, tuning, workload
from pagecast.planner_app.dashboard.compare_table import table
from pagecast.planner_app.dashboard.jobs import Job, Results
from pagecast.planner_app.dashboard.memory_charts import hbm_waterfall
from pagecast.planner_app.dashboard.state import Session
from pagecast.planner_app.dashboard.texts import plain
from pagecast.planner_app.dashboard.tune_charts import grid_map, hit_curve
from pagecast.planner_app.dashboard.view import DEFAULTS, GENERATED, UPLOAD, View, command
from pagecast.planner_app.planner.plan import plan
from pagecast.planner_app.planner.slo import Slo
from pagecast.planner_app.reports.style import caption_of
from pagecast.sim.replay import replay
from pagecast.traces.read import read
from streamlit.testing.v1 import AppTest

_SMALL = {"requests": 60}


def app(**parameters: object) -> AppTest:
    """The app as a browser opens it with these parameters in the URL."""
    test = AppTest.from_file(script.__file__, default_timeout=60)
    for name, value in parameters.items():
        test.query_params[name] = value if isinstance(value, list) else str(value)
    return test.run()


def said(test: AppTest) -> dict[str, str]:
    """The cards by title."""
    return {metric.label: metric.value for metric in test.metric}


def summary(view: View) -> dict[str, object]:
    return dict(replay(workload.trace_of(view), view.scenario()).summary)


def until_in(test: AppTest, words: str, within_s: float = 60) -> AppTest:
    """Draws the page anew until a caption says what the pattern `words` does."""
    until = time.monotonic() + within_s
    while not any(re.search(words, caption.value) for caption in test.caption):
        assert time.monotonic() < until, [caption.value for caption in test.caption]
        time.sleep(0.3)
        test.run()
    return test


# ---- what-if


def test_the_first_page_shows_the_bundled_trace_without_any_input():
    test = app()
    assert not test.exception and not test.error
    figures = summary(View())
    cards = said(test)
    assert cards["TTFT, p99"] == seconds(figures["ttft_s"]["p99"])
    assert cards["TPOT, p99"] == seconds(figures["tpot_s"]["p99"])
    assert cards["Prefix reuse"] == f"{figures['token_hit_rate']:.1%}"


def test_a_slider_moves_the_figures_to_those_of_a_replay():
    test = app(**_SMALL)
    before = said(test)
    test.select_slider(key="block_size").set_value(256).run()
    after = said(test)
    assert before != after
    expected = summary(View.of({**_SMALL, "block_size": 256}))
    assert after["Prefix reuse"] == f"{expected['token_hit_rate']:.1%}"


def test_the_url_gives_the_side_bar():
    test = app(**_SMALL, gpu="L4", enable_prefix_caching="false")
    assert test.selectbox(key="gpu").value == "L4"
    assert said(test)["Prefix reuse"] == "0.0%"


def test_intervals_come_in_when_the_sliders_rest():
    test = app(**_SMALL, seed=3)
    assert not any("to" in caption.value and caption.value.startswith("90% interval:")
                   for caption in test.caption)  # fmt: skip
    until_in(test.run(), "90% interval: .* to ")


def test_a_broken_slo_and_a_kept_one_are_told_apart_by_words():
    test = app(**_SMALL, slo="ttft_p99<1us,tpot_p99<10s")
    badges = " ".join(mark.value for mark in test.markdown)
    assert plain("ttft_p99<1us") + " is broken" in badges
    assert plain("tpot_p99<10s") + " holds" in badges


def test_an_slo_that_cannot_be_read_is_one_line_and_the_figures_stay():
    test = app(**_SMALL, slo="speed<3")
    assert len(test.error) == 1 and "\n" not in test.error[0].value
    assert said(test)["TTFT, p99"]


def test_a_scenario_that_does_not_fit_is_one_line():
    test = app(**_SMALL, model="meta-llama/Llama-3.1-405B", gpu="L4")
    assert not test.exception
    assert len(test.error) == 1 and "leaves no room" in test.error[0].value


# ---- compare


def test_a_pin_is_compared_with_what_the_side_bar_shows():
    test = app(**_SMALL, gpu="L4", pin=["one gpu?requests=60&gpu=H200"])
    assert any(metric.delta for metric in test.metric)


def test_the_table_gives_each_views_figures_and_changes():
    views = {"a": View.of(_SMALL), "b": View.of({**_SMALL, "gpu": "L4"})}
    results = {name: replay(workload.trace_of(view), view.scenario()) for name, view in views.items()}
    told = table(results, views, "a")
    assert list(told.columns) == ["a (baseline)", "b"]
    change = results["b"].summary["tpot_s"]["p99"] / results["a"].summary["tpot_s"]["p99"] - 1
    assert plain(f"({change:+.1%})") in told["b"]["TPOT p99"]
    assert told["b"]["Differs in"] == "gpu L4"


# ---- the same on the command line


_VIEWS = [
    {"trace": "chat", "rate": 2.0, "block_size": 32, "max_num_seqs": 64, "enable_prefix_caching": False},
    {"trace": GENERATED, "g_rate": 7.5, "g_cv": 2.0, "g_output": 50, "gpu": "A100 80GB", "seed": 5},
    {"trace": GENERATED, "g_turns": 3, "g_system": 500, "rate": 1.5, "profile": "nano-vllm"},
]


@pytest.mark.parametrize("parameters", _VIEWS)
@pytest.mark.parametrize("with_file", [True, False])
def test_the_command_prints_the_views_figures(parameters, with_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    view = View.of({**parameters, "requests": 80})
    result = replay(workload.trace_of(view), view.scenario())
    if with_file:
        Path("scenario.yaml").write_bytes(exports.scenario_yaml(result))
    lines = command(view, scenario_file="scenario.yaml" if with_file else "").split(" &&\n")
    for line in lines:
        capsys.readouterr()
        words = shlex.split(line)[1:]
        assert run([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    expected = json.loads(json.dumps(result.summary))
    printed.pop("wall_s"), expected.pop("wall_s")
    if with_file:  # which names its costs, where the view said auto
        printed.pop("expected_error"), expected.pop("expected_error")
    assert printed == expected


def test_exports_hold_the_replay(tmp_path):
    view = View.of(_SMALL)
    trace = workload.trace_of(view)
    result = replay(trace, view.scenario())
    rows = pd.read_parquet(io.BytesIO(exports.requests_parquet(result)))
    assert rows["ttft_s"].equals(result.requests["ttft_s"])
    (tmp_path / "t.parquet").write_bytes(exports.trace_parquet(trace))
    again = replay(read(tmp_path / "t.parquet"), view.scenario())
    assert again.summary["ttft_s"] == result.summary["ttft_s"]
    assert b"Forecast of chat" in exports.report_html(result, None)


# ---- views and links


@given(st.fixed_dictionaries({}, optional={
    "block_size": st.integers(1, 512), "rate": st.floats(0.1, 8).map(lambda value: round(value, 1)),
    "g_cv": st.floats(0.2, 5).map(lambda value: round(value, 1)), "sort": st.booleans(),
    "enable_prefix_caching": st.booleans(), "slo": st.text(max_size=30), "upload": st.text(max_size=10),
    "requests": st.integers(1, 100_000), "model": st.text(min_size=1, max_size=30),
}))  # fmt: skip
def test_a_view_comes_back_from_its_link(parameters):
    view = View.of(parameters)
    assert View.from_query(view.query()) == view


@pytest.mark.parametrize(
    "query", ["blocks=3", "block_size=many", "requests=0", "requests=999999999", "rate=-1", "rate=nan",
              "seed=1e999", "enable_prefix_caching=perhaps", "block_size=0"],
)  # fmt: skip
def test_a_link_that_makes_no_view_is_refused_in_one_line(query):
    with pytest.raises(BadInput) as refused:
        View.from_query(query)
    assert "\n" not in str(refused.value)


def test_an_unusable_pin_in_a_link_is_told_and_dropped():
    test = app(**_SMALL, pin=["bad?block_size=many"])
    assert not test.exception and any("pins" in warning.value for warning in test.warning)


def test_equal_requests_make_equal_keys_and_others_do_not():
    assert View.of({"block_size": 16}) == View()
    assert View.of({"slo": "ttft_p50<1s"}).key() == View().key()
    assert all(View.of({name: value}).key() != View().key()
               for name, value in {"seed": 1, "gpu": "L4", "rate": 2.0, "requests": 5}.items())  # fmt: skip
    assert "upload" in DEFAULTS


# ---- what users send


@pytest.mark.parametrize("text", ["![x](http://a.b/c.png)", "<script>alert(1)</script>", "[a](javascript:1)",
                                  "`x` *y* $z$ :red[w] #h", "=cmd|' /C calc'!A0"])  # fmt: skip
def test_what_a_user_wrote_is_no_markup(text):
    shown = plain(text)
    for sign in "<>[]()`*$!#:|=":
        assert shown.count(sign) == shown.count("\\" + sign)
    assert shown.replace("\\", "") == text


def upload(own: Session, name: str, data: bytes) -> View:
    return View.of({"trace": UPLOAD, "upload": own.keep_upload(name, data), "requests": 50})


def read_out(own: Session, view: View, within_s: float = 60):
    until = time.monotonic() + within_s
    while (trace := replays.trace_for(own, view)) is None:
        assert time.monotonic() < until
        time.sleep(0.1)
    return trace


def test_an_upload_is_read_and_a_bad_one_gives_the_readers_line():
    own = Session()
    rows = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{i},100,10\n" for i in range(80))
    trace = read_out(own, upload(own, "mine.csv", rows.encode()))
    assert (trace.name, len(trace)) == ("mine.csv", 50)
    with pytest.raises(BadInput, match=r"^bad\.csv .*line 3") as refused:
        read_out(own, upload(own, "bad.csv", b"arrival_s,input_tokens,output_tokens\n0,1,1\n1,x,1\n"))
    assert str(own.folder.name) not in str(refused.value)


@pytest.mark.parametrize("data", [
    gzip.compress(b"\0" * (64 << 20)),
    gzip.compress(b'{"arrival_s": 0, "input_tokens": 1, "pad": "' + b"a" * (80 << 20)),
    gzip.compress(b"[" * (64 << 20)),
    b"PK\x03\x04" + b"x" * 100,
    b"",
])  # fmt: skip
def test_a_hostile_upload_ends_in_one_line(data):
    own = Session()
    with pytest.raises(BadInput) as refused:
        read_out(own, upload(own, "../../<b>x</b>.gz", data))
    assert "\n" not in str(refused.value)


def test_an_uploads_name_is_no_path():
    own = Session()
    digest = own.keep_upload("../../etc/passwd", b"x")
    assert own.uploads[digest].name == "passwd"
    assert own.uploads[digest].path.parent == Path(own.folder.name)


def test_a_session_cannot_see_anothers_upload():
    mine, other = Session(), Session()
    rows = b"arrival_s,input_tokens,output_tokens\n0,100,10\n"
    view = upload(mine, "mine.csv", rows)
    read_out(mine, view)
    with pytest.raises(BadInput, match="choose a trace file"):
        replays.trace_for(other, view)


# ---- jobs


def test_a_job_tells_how_far_it_is_and_can_be_stopped():
    own = Session()
    trace, view = workload.trace_of(View.of({"requests": 2000})), View.of({"requests": 2000, "seed": 77})
    assert replays.spread_for(own, view, trace) is None
    spread = own.jobs["spread"]
    _until(lambda: spread.progress is not None)
    assert spread.running and spread.progress[1:] == (replays.REPLICATES + 2, "replays for the intervals")
    spread.stop()
    _until(lambda: not spread.running)
    assert spread.stopped and spread.value is None and not spread.error
    assert replays.spread_for(own, view, trace) is None and own.jobs["spread"] is spread


def test_a_job_that_breaks_says_so():
    job = Job("broken", time.sleep, "not seconds")
    _until(lambda: not job.running)
    assert job.value is None and "ended before it was done" in job.error


def test_a_job_nobody_holds_ends():
    own = Session()
    view = View.of({"requests": 2000, "seed": 78})
    replays.spread_for(own, view, workload.trace_of(view))
    state = own.jobs["spread"]._state
    _until(lambda: state.process is not None)
    process = state.process
    own.jobs.clear()
    _until(lambda: process.poll() is not None)


def _until(true, within_s: float = 60) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_results_are_bounded_and_the_oldest_go_first():
    results = Results(most=2)
    for key in "abc":
        results.put(key, key)
    assert (results.get("a"), results.get("b"), results.get("c")) == (None, "b", "c")


# ---- the server


def test_it_listens_here_only_and_tells_nobody():
    flags = serve.options("127.0.0.1", 8501, browser=False)
    assert flags["server_address"] == "127.0.0.1"
    assert flags["browser_gatherUsageStats"] is False
    assert flags["server_maxUploadSize"] == 200
    assert "127.0.0.1" in flags["server_allowedHosts"] and "*" not in flags["server_allowedHosts"]


def test_a_port_in_use_is_one_line_and_exit_2(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run(["dashboard", "--no-browser", "--port", str(taken.getsockname()[1])]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_waterfall_adds_up_to_the_gpu():
    figure = hbm_waterfall(View().scenario().budget())
    bars = figure.data[0].y
    assert sum(bars) == pytest.approx(0, abs=1e-9)


# ---- tune


def test_tune_maps_the_grid_and_recommends_with_a_reason():
    view = View.of({"requests": 40, "gpu": "L4", "slo": "ttft_p99<100s"})
    trace, told = workload.trace_of(view), []
    table = tuning.grid_job(trace, view.scenario(), view["slo"], progress=told.append)
    figure = grid_map(table, "TTFT p99", (0.9, 16))
    assert told[-1][0] == told[-1][1] == len(table)
    assert sum(text is not None for row in figure.data[0].text for text in row) == len(table)
    row = table[(table["block_size"] == 32)].iloc[-1]
    alone = view.scenario().model_copy(
        update={"block_size": 32, "gpu_memory_utilization": row["gpu_memory_utilization"]}
    )
    assert row["ttft_p99_s"] == replay(trace, alone).summary["ttft_s"]["p99"]
    tuned = tuning.tune_job(trace, view.scenario(), "block_size", view["slo"], False, progress=told.append)
    assert tuned.reason and tuned.recommended in tuned.table["block_size"].tolist()


def test_budgets_begin_where_the_kv_cache_fits():
    for gpu in ("L4", "H200"):
        found = tuning.budgets(View.of({"gpu": gpu}).scenario())
        assert list(found) == sorted(found) and found[-1] == 0.95 and 4 <= len(found) <= 8
        assert all(View.of({"gpu": gpu, "gpu_memory_utilization": value}).scenario().budget()
                   for value in found)  # fmt: skip


def test_a_map_marks_what_breaks_the_slo():
    view = View.of({"requests": 30})
    table = tuning.grid_job(workload.trace_of(view), view.scenario(), "ttft_p99<1us", progress=lambda _: None)
    figure = grid_map(table, "TTFT p99", (0.9, 16))
    assert all(text.startswith("✕") for row in figure.data[0].text for text in row)
    assert "No scenario" in caption_of(figure)


def test_the_hit_curve_ends_at_what_an_endless_cache_finds():
    view = View.of({"requests": 200})
    found = tuning.hits_of(view, workload.trace_of(view))
    figure = hit_curve(found, 100)
    assert max(figure.data[0].y) == pytest.approx(100 * found.infinite)


def test_admissible_concurrency_is_the_planners():
    view = View.of({"requests": 60, "model": "Qwen/Qwen3-32B", "gpu": "A100 80GB"})
    trace = workload.trace_of(view)
    found = admissible.concurrency_job(
        trace, view.scenario(), view["slo"], False, progress=lambda _: None
    )
    planned = plan(trace, view.scenario(), Slo.parse(view["slo"]), kinds=["concurrency"], replicates=0)
    assert planned.concurrency is not None and found.users == (planned.concurrency.value or 0)


# ---- each page as a script


def page(module: str, **parameters: object) -> AppTest:
    """One page with its side bar, as a browser opens it with these parameters in the URL."""
    test = AppTest.from_string(
        "from pagecast.planner_app.dashboard import sidebar\n"
        f"from pagecast.planner_app.dashboard.{module} import render\n"
        "sidebar.ask()\nrender()\n",
        default_timeout=60,
    )
    for name, value in parameters.items():
        test.query_params[name] = value if isinstance(value, list) else str(value)
    return test.run()


def test_the_compare_page_tabulates_pins_and_gives_the_command():
    test = page("compare_page", requests=50, gpu="L4", pin=["big?requests=50&gpu=H200"])
    assert not test.exception and not test.error
    told = test.table[0].value
    assert list(told.columns) == ["big (baseline)", "the side bar"]
    assert "%" in told.iloc[3, 1] and "%" not in told.iloc[3, 0]
    commands = [code.value for code in test.code]
    assert commands[0] == "pagecast replay chat --limit 50 --model Qwen/Qwen3-8B --gpu L4"
    test.button(key="pin-it").click().run()
    assert len(test.table[0].value.columns) == 2 and not test.exception


def test_the_tune_page_shows_progress_and_then_the_map_and_a_reason():
    test = page("tune_page", requests=20, slo="")
    assert not test.exception
    until = time.monotonic() + 60
    while not any("Block size:" in mark.value for mark in test.markdown):
        assert time.monotonic() < until
        time.sleep(0.3)
        test.run()
    assert any("block\\_size" in mark.value for mark in test.markdown)
    assert not test.error


def test_a_long_replay_shows_progress_and_can_be_stopped_and_begun_again():
    test = app(trace=GENERATED, requests=20_000, seed=9)
    assert not test.metric and not test.exception
    test.button(key="stop-replay").click().run()
    assert any("Stopped" in caption.value for caption in test.caption)
    test.button(key="again-replay").click().run()
    assert test.button(key="stop-replay")


def test_without_the_extra_it_is_one_line_and_exit_3(monkeypatch, capsys):
    for name in ("streamlit", "streamlit.web", "streamlit.web.bootstrap"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run(["dashboard", "--no-browser"]) == 3
    assert "pagecast[app]" in capsys.readouterr().err
