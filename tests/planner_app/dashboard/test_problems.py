"""What is wrong is said on the page, in a line and where it belongs; advice follows from what was lost."""

from __future__ import annotations

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs the extra `app`")

from pagecast.planner_app.dashboard.shell.state import Session
from pagecast.planner_app.dashboard.shell.view import PageView, typed_prices
from pagecast.planner_app.dashboard.shell.workload import read_upload, trace_of
from pagecast.planner_app.dashboard.what_if import headline
from pagecast.planner_app.dashboard.what_if.advice import advice_on, advice_on_load, lost_hits
from pagecast.planner_app.planner.capacity.envelope import envelope
from pagecast.planner_app.planner.slo import Slo
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace, table
from streamlit.testing.v1 import AppTest

pytestmark = pytest.mark.usefixtures("no_browser")
SMALL = {"requests": 60}


def texts(elements: object) -> str:
    return " ".join(str(element.value) for element in elements)  # type: ignore[attr-defined]


def test_a_price_alone_is_of_the_gpu_in_view(app) -> None:
    test = app(**SMALL, prices="3.5")
    assert not test.exception and not test.error
    assert "at \\$3\\.50 per hour and replica" in texts(test.caption)
    assert typed_prices("3.5, L40S=1.2", "H200") == {"H200": 3.5, "L40S": 1.2}


@pytest.mark.parametrize("prices", ["abc", "H200=-3", "H200=1e400", "nothing=3"])
def test_a_price_that_can_t_be_read_is_said_beside_its_box(app, prices: str) -> None:
    test = app(**SMALL, prices=prices)
    assert not test.exception
    assert "write a number above 0" in texts(test.sidebar.error)
    assert len(test.error) == 1 and "--price" not in texts(test.error)
    assert [metric.label for metric in test.metric][:1] == ["Admissible concurrency"]  # the rest is there


def test_an_error_within_a_fragment_is_a_line(app, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def fails(*_: object) -> None:
        raise KeyError("cards")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    test: AppTest = app(**SMALL)
    monkeypatch.setattr("pagecast.planner_app.dashboard.what_if.refining.cards_of", fails)
    test.run()
    assert not test.exception and "a defect of pagecast" in texts(test.error)
    assert len(list(tmp_path.glob("pagecast-defect-*"))) == 1
    monkeypatch.setattr("pagecast.planner_app.dashboard.what_if.refining.cards_of", headline.cards_of)


def test_what_does_not_start_is_said_first_and_has_no_verdict(app) -> None:
    test = app(**SMALL, gpu_memory_utilization=1.0)
    assert test.main[0].type in ("html", "alert") or "Does not start" in texts(test.error)
    assert texts(test.error).startswith("Does not start")
    assert "holds" not in texts(test.markdown)
    assert not app(**SMALL, gpu_memory_utilization=0.9).error


def test_values_of_a_link_that_are_refused_are_said(app) -> None:
    test = app(requests=0, rate="1e9", engine="tensorrt-llm@9", gpu="L4", async_scheduling="false")
    warning = texts(test.warning)
    for name in ("requests", "rate", "engine"):
        assert f"{name} is" in warning.replace("\\", "")
    assert "gpu is" not in warning and "async" not in warning
    assert not app(**SMALL, gpu_memory_utilization=0.2, kv_offloading_size=8).warning


def test_an_upload_keeps_the_name_that_its_session_gave_it(tmp_path) -> None:
    sessions = Session(), Session()
    digests = [one.keep_upload(name, b"rows") for one, name in zip(sessions, ("a.csv", "b.csv"), strict=True)]
    assert digests[0] != digests[1]
    views = [PageView.of({"trace": "upload", "upload": digest}) for digest in digests]
    assert views[0].key() != views[1].key()


def test_an_unsorted_upload_is_told_of_the_toggle(tmp_path) -> None:
    path = tmp_path / "x"
    path.write_text("arrival_s,input_tokens,output_tokens\n5,1,1\n0,1,1\n")
    with pytest.raises(BadInput, match="switch on"):
        read_upload(str(path), "mine.csv", 10, False, 0)


def test_an_upload_to_come_is_an_invitation(app) -> None:
    test = app(trace="upload")
    assert not test.error and "Choose a trace file" in texts(test.info)


def test_a_request_beyond_all_memory_is_refused() -> None:
    columns = {"arrival_s": [0.0], "input_tokens": [1_000_000_000_000], "output_tokens": [5_000_000_000_000]}
    with pytest.raises(BadInput, match="too many to be counted"):
        envelope(Trace("huge", table(columns)), Scenario(), Slo.optional(""))


def test_no_memory_is_advised_where_nothing_that_came_again_was_lost() -> None:
    view = PageView.of({"requests": 400, "num_gpu_blocks": 6000})
    trace = trace_of(view)
    result = replay(trace, view.scenario())
    endless = replay(trace, view.scenario().changed(num_gpu_blocks=2_000_000))
    assert result.summary["evicted_blocks"]
    lost = lost_hits(view, trace, result)
    same = result.summary["token_hit_rate"] == pytest.approx(endless.summary["token_hit_rate"], abs=0.005)
    assert same == ("memory" not in advice_on("token_hit_rate", result, (), lost))
    assert "memory" in advice_on("token_hit_rate", result, (), 0.2)


def test_no_replica_is_advised_where_one_user_breaks_the_slo() -> None:
    assert "add a replica" not in advice_on_load("compute", 0) and "no further replica" in advice_on_load(
        "", 0
    )
    assert "add a replica" in advice_on_load("compute", 5)
