"""The dashboard's pages as scripts: that they show what the command line says, and what they refuse."""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
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
from pagecast.planner_app.dashboard.compare import exports
from pagecast.planner_app.dashboard.compare.table import table
from pagecast.planner_app.dashboard.shell import replays, workload
from pagecast.planner_app.dashboard.shell.cards import change
from pagecast.planner_app.dashboard.shell.elements import plain
from pagecast.planner_app.dashboard.shell.jobs import results
from pagecast.planner_app.dashboard.shell.state import Session
from pagecast.planner_app.dashboard.shell.view import DEFAULTS, GENERATED, UPLOAD, PageView, command
from pagecast.planner_app.dashboard.what_if.choices import key as choice_key
from pagecast.planner_app.planner.tune.choice import BLOCK_SIZE, HBM, Choice, Standing
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.replay import replay
from pagecast.traces.read import read
from streamlit.testing.v1 import AppTest

_SMALL = {"requests": 60}

pytestmark = pytest.mark.usefixtures("no_browser")


def card_texts(test: AppTest) -> dict[str, str]:
    """The cards by title."""
    return {metric.label: metric.value for metric in test.metric}


def summary(view: PageView) -> dict[str, object]:
    return dict(replay(workload.trace_of(view), view.scenario()).summary)


def until_in(test: AppTest, words: str, within_s: float = 180) -> AppTest:
    """Draws the page anew until a caption says what the pattern `words` does."""
    until = time.monotonic() + within_s
    while not any(re.search(words, caption.value) for caption in test.caption):
        assert time.monotonic() < until, [caption.value for caption in test.caption]
        time.sleep(1.0)  # the job needs the core more than the page does
        test.run()
    return test


# ---- what-if


def test_the_first_page_shows_the_bundled_trace_without_any_input(app):
    test = app()
    assert not test.exception and not test.error
    figures = summary(PageView())
    cards = card_texts(test)
    assert cards["TTFT, p99"] == seconds(figures["ttft_s"]["p99"])
    assert cards["TPOT, p99"] == seconds(figures["tpot_s"]["p99"])
    assert cards["Prefix reuse"] == f"{figures['token_hit_rate']:.1%}"


def test_a_slider_moves_the_figures_to_those_of_a_replay(app):
    test = app(**_SMALL)
    before = card_texts(test)
    test.selectbox(key="block_size").set_value(256).run()
    after = card_texts(test)
    assert before != after
    expected = summary(PageView.of({**_SMALL, "block_size": 256}))
    assert after["Prefix reuse"] == f"{expected['token_hit_rate']:.1%}"


def test_the_url_gives_the_side_bar(app):
    test = app(**_SMALL, gpu="L40S", enable_prefix_caching="false")
    assert test.selectbox(key="gpu").value == "L40S"
    assert card_texts(test)["Prefix reuse"] == "0.0%"


def test_the_url_gives_fields_that_are_empty_at_first(app):
    test = app(**_SMALL)
    assert not [
        each for each in test.number_input if each.key == "kv_tokens"
    ]  # behind "More", which is closed
    test.session_state["more"] = True
    test.run()
    assert test.number_input(key="kv_tokens").value is None
    assert test.selectbox(key="async_scheduling").value is None
    test = app(**_SMALL, kv_tokens=20_000, async_scheduling="false")
    assert test.number_input(key="kv_tokens").value == 20_000
    assert test.selectbox(key="async_scheduling").value is False
    assert not test.exception and not test.error


def put_choices(view: PageView) -> None:
    """Answers to the first questions, so that no search for them runs."""
    standings = {BLOCK_SIZE: Standing(16.0, 10, 1.0, 1.0), HBM: Standing(0.92, 10, 1.0, 1.0)}
    chosen = {knob: Choice(knob, one, one, 10, (one.value,)) for knob, one in standings.items()}
    results.put(choice_key(view), chosen)
    for knob, choice in chosen.items():
        results.put(choice_key(view, knob), choice)


def test_intervals_come_in_when_the_sliders_rest(app):
    put_choices(PageView.of({**_SMALL, "seed": 3}))
    test = app(**_SMALL, seed=3)
    assert not any(
        "to" in caption.value and caption.value.startswith("90% interval:") for caption in test.caption
    )
    until_in(test.run(), "90% interval: .* to ")


def test_a_browser_that_draws_the_side_bar_late_is_told_the_same_defaults(app):
    test = app(**_SMALL)
    slider, sizes = test.slider(key="rate").proto.default, test.selectbox(key="block_size").proto.default
    test.run()
    assert test.slider(key="rate").proto.default == slider == [1.0]
    assert test.selectbox(key="block_size").proto.default == sizes


def test_a_broken_slo_and_a_kept_one_are_told_apart_by_words(app):
    test = app(**_SMALL, slo="ttft_p99<1us,tpot_p99<10s")
    badges = " ".join(mark.value for mark in test.markdown)
    assert plain("ttft_p99<1us") + " is broken" in badges
    assert plain("tpot_p99<10s") + " holds" in badges


def test_an_slo_that_cannot_be_read_is_one_line_and_the_figures_stay(app):
    test = app(**_SMALL, slo="speed<3")
    assert len(test.error) == 1 and "\n" not in test.error[0].value
    assert card_texts(test)["TTFT, p99"]


def test_a_scenario_that_does_not_fit_is_one_line(app):
    test = app(**_SMALL, model="meta-llama/Llama-3.1-405B", gpu="L4")
    assert not test.exception
    assert len(test.error) == 1 and "leaves no room" in test.error[0].value


# ---- compare


def test_a_pin_is_compared_with_what_the_side_bar_shows(app):
    test = app(**_SMALL, gpu="L40S", pin=["one gpu?requests=60&gpu=H200"])
    assert any(metric.delta for metric in test.metric)


def test_the_table_gives_each_views_figures_and_changes():
    views = {"a": PageView.of(_SMALL), "b": PageView.of({**_SMALL, "gpu": "L40S"})}
    results = {name: replay(workload.trace_of(view), view.scenario()) for name, view in views.items()}
    frame = table(results, views, "a")
    assert list(frame.columns) == ["a (baseline)", "b"]
    told_change = change(*(results[name].summary["tpot_s"]["p99"] for name in ("b", "a")))
    assert plain(f"({told_change})") in frame["b"]["TPOT p99"]
    assert frame["b"]["Differs in"] == "gpu L40S"
    assert frame["b"]["Step costs"] == "composed of measured operations"
    assert "points" in frame["b"]["KV in use at peak"]


def test_changes_are_in_words_of_their_kind():
    assert change(0.5, 0.8, share=True) == "-30.0 points"
    assert (change(3.0, 2.0), change(2.0, 0.01)) == ("+50.0%", "200 times")


# ---- the same on the command line


_VIEWS = [
    {"trace": "chat", "rate": 2.0, "block_size": 32, "max_num_seqs": 64, "enable_prefix_caching": False},
    {"trace": GENERATED, "g_rate": 7.5, "g_cv": 2.0, "g_output": 50, "gpu": "A100 80GB", "seed": 5},
    {"trace": GENERATED, "g_turns": 3, "g_system": 500, "rate": 1.5, "engine": "nano-vllm"},
    {"trace": "load", "m_input_len": "uniform:50-500", "m_prefix_len": 64, "m_num_prefixes": 3, "rate": 2.0},
    {"trace": "load", "m_distinct_prompts": 20, "m_burst_size": 4, "m_ramp_up_end_rps": 9.0, "rate": 2.0},
    {"trace": "chat", "concurrency": 6, "concurrency_ramp": 3.0, "warmup": 2, "repeat_prompts": 2},
    {"trace": "load", "m_turns": "3", "m_turn_delay": "0.5", "m_request_rate": 0.0, "concurrency": 9},
    {"trace": "chat", "free_gpu_memory_fraction": 0.95, "async_scheduling": False, "max_model_len": 6000},
    {"trace": "chat", "num_gpu_blocks": 900},
]


@pytest.mark.parametrize("parameters", _VIEWS)
@pytest.mark.parametrize("with_file", [True, False])
def test_the_command_prints_the_views_figures(parameters, with_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    view = PageView.of({**parameters, "requests": 80})
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
    notes = printed.pop("notes")
    assert with_file or notes == [sentence(note) for note in result.notes]
    expected["expected_error"] = sentence(result.summary["expected_error"])
    if with_file:  # which names its costs, where the view said auto
        printed.pop("expected_error"), expected.pop("expected_error")
    assert printed == expected


def test_exports_hold_the_replay(tmp_path):
    view = PageView.of(_SMALL)
    trace = workload.trace_of(view)
    result = replay(trace, view.scenario())
    rows = pd.read_parquet(io.BytesIO(exports.requests_parquet(result)))
    assert rows["ttft_s"].equals(result.requests["ttft_s"])
    (tmp_path / "t.parquet").write_bytes(exports.trace_parquet(trace))
    again = replay(read(tmp_path / "t.parquet"), view.scenario())
    assert again.summary["ttft_s"] == result.summary["ttft_s"]
    assert b"Forecast of chat" in exports.report_html(result, None)


# ---- views and links


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "block_size": st.integers(1, 512),
            "rate": st.floats(0.1, 8).map(lambda value: round(value, 1)),
            "g_cv": st.floats(0.2, 5).map(lambda value: round(value, 1)),
            "sort": st.booleans(),
            "enable_prefix_caching": st.booleans(),
            "slo": st.text(max_size=30),
            "upload": st.text(max_size=10),
            "kv_tokens": st.none() | st.integers(1, 10**9),
            "async_scheduling": st.none() | st.booleans(),
            "requests": st.integers(1, 100_000),
            "model": st.text(min_size=1, max_size=30),
        },
    )
)
def test_a_view_comes_back_from_its_link(parameters):
    view = PageView.of(parameters)
    assert PageView.from_query(view.query()) == view


@pytest.mark.parametrize(
    "query",
    [
        "blocks=3",
        "block_size=many",
        "requests=0",
        "requests=999999999",
        "rate=-1",
        "rate=nan",
        "seed=1e999",
        "enable_prefix_caching=perhaps",
        "block_size=0",
    ],
)
def test_a_link_that_makes_no_view_is_refused_in_one_line(query):
    with pytest.raises(BadInput) as refused:
        PageView.from_query(query)
    assert "\n" not in str(refused.value)


def test_an_unusable_pin_in_a_link_is_told_and_dropped(app):
    test = app(**_SMALL, pin=["bad?block_size=many"])
    assert not test.exception and any("block\\_size is" in warning.value for warning in test.warning)


def test_equal_requests_make_equal_keys_and_others_do_not():
    assert PageView.of({"rate": 1.0}) == PageView()
    assert PageView.of({"slo": "ttft_p50<1s"}).key() == PageView().key()
    assert all(
        PageView.of({name: value}).key() != PageView().key()
        for name, value in {"seed": 1, "gpu": "L40S", "rate": 2.0, "requests": 5}.items()
    )
    assert "upload" in DEFAULTS


# ---- what users send


@pytest.mark.parametrize(
    "text",
    [
        "![x](http://a.b/c.png)",
        "<script>alert(1)</script>",
        "[a](javascript:1)",
        "`x` *y* $z$ :red[w] #h",
        "=cmd|' /C calc'!A0",
    ],
)
def test_what_a_user_wrote_is_no_markup(text):
    shown = plain(text)
    for sign in "<>[]()`*$!#:|=":
        assert shown.count(sign) == shown.count("\\" + sign)
    assert shown.replace("\\", "") == text


def upload(own: Session, name: str, data: bytes) -> PageView:
    return PageView.of({"trace": UPLOAD, "upload": own.keep_upload(name, data), "requests": 50})


def read_out(own: Session, view: PageView, within_s: float = 60):
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


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(b"\0" * (64 << 20)),
        gzip.compress(b'{"arrival_s": 0, "input_tokens": 1, "pad": "' + b"a" * (80 << 20)),
        gzip.compress(b"[" * (64 << 20)),
        b"PK\x03\x04" + b"x" * 100,
        b"",
    ],
    ids=["zeros", "long string", "deep list", "zip", "nothing"],
)
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
    with pytest.raises(BadInput, match="choose the file in the side bar"):
        replays.trace_for(other, view)


# ---- each page as a script


def page(module: str, **parameters: object) -> AppTest:
    """One page with its side bar, as a browser opens it with these parameters in the URL."""
    test = AppTest.from_string(
        "from pagecast.planner_app.dashboard.shell import sidebar\n"
        f"from pagecast.planner_app.dashboard.{module}.page import render\n"
        "sidebar.ask()\nrender()\n",
        default_timeout=60,
    )
    for name, value in parameters.items():
        test.query_params[name] = value if isinstance(value, list) else str(value)
    return test.run()


def test_the_compare_page_tabulates_pins_and_gives_the_command():
    test = page("compare", requests=50, gpu="L4", max_model_len=8192, pin=["big?requests=50&gpu=H200"])
    assert not test.exception and not test.error
    frame = test.table[0].value
    assert list(frame.columns) == ["big (baseline)", "the side bar"]
    assert "times" in frame.iloc[3, 1] and "times" not in frame.iloc[3, 0]
    commands = [code.value for code in test.code]
    assert (
        commands[0] == "pagecast replay chat --limit 50 --model Qwen/Qwen3-8B --gpu L4 --max-model-len 8192"
    )
    test.button(key="pin-it").click().run()
    assert len(test.table[0].value.columns) == 2 and not test.exception


def test_the_tune_page_shows_progress_and_then_the_map_and_a_reason():
    test = page("tune", requests=20, slo="")
    assert not test.exception
    until = time.monotonic() + 60
    while not any("Block size:" in mark.value for mark in test.markdown):
        assert time.monotonic() < until
        time.sleep(1.0)
        test.run()
    assert any("block\\_size" in mark.value for mark in test.markdown)
    assert not test.error


def test_the_tune_page_has_one_answer_to_each_question():
    view = PageView.of({"requests": 20})
    put_choices(view)
    test = page("tune", requests=20)
    until = time.monotonic() + 60
    while not all(results.get(("tune", knob, False, view["slo"], *view.key())) for knob in (BLOCK_SIZE, HBM)):
        assert time.monotonic() < until
        time.sleep(0.5)
        test.run()
    texts = [mark.value for mark in test.run().markdown]
    for title in ("Block size:", "HBM budget:"):
        assert sum(title in text for text in texts) == 1


def test_the_tune_page_recommends_nothing_where_no_request_completes():
    test = page("tune", requests=20, slo="", max_model_len=10)
    until = time.monotonic() + 60
    while not any("no request completes" in mark.value for mark in test.markdown):
        assert time.monotonic() < until
        time.sleep(1.0)
        test.run()
    (text, *_) = (mark.value for mark in test.markdown if "no request completes" in mark.value)
    assert text.endswith(".** no request completes at any of these values") and "None" not in text


def test_a_long_replay_shows_progress_and_can_be_stopped_and_begun_again(app):
    test = app(trace=GENERATED, requests=20_000, seed=9)
    assert not test.metric and not test.exception
    test.button(key="stop-replay").click().run()
    assert any("Stopped" in caption.value for caption in test.caption)
    test.button(key="again-replay").click().run()
    assert test.button(key="stop-replay")


def test_a_load_is_made_by_its_fields_and_told_what_is_wrong_with_it(app):
    test = app(trace="load", requests=30, m_input_len="uniform:50-100", m_turns="2")
    assert test.metric and not test.exception
    assert test.text_input(key="m_turn_delay") and test.number_input(key="m_burstiness")
    assert test.number_input(key="m_burst_size") and test.number_input(key="warmup")
    test.text_input(key="m_input_len").input("long").run()
    assert not test.exception
    told = [box.value for box in (*test.error, *test.warning)]
    assert any("'long'" in text or "long" in text for text in told), told


def test_without_the_extra_it_is_one_line_and_exit_3(monkeypatch, capsys):
    for name in ("streamlit", "streamlit.web", "streamlit.web.bootstrap"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run(["dashboard", "--no-browser"]) == 3
    assert "pagecast[app]" in capsys.readouterr().err
