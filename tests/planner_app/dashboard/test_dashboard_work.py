"""The dashboard beside its pages: jobs, the server, and the searches of the Tune page."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.planner.capacity.options import PlanOptions

pytest.importorskip("streamlit", reason="the dashboard needs the extra `app`")

from pagecast.planner_app.dashboard import server_start
from pagecast.planner_app.dashboard.shell import jobs, replays, state, workload
from pagecast.planner_app.dashboard.shell.jobs import Job, Results, results
from pagecast.planner_app.dashboard.shell.state import Session
from pagecast.planner_app.dashboard.shell.view import UPLOAD, PageView
from pagecast.planner_app.dashboard.tune import searches
from pagecast.planner_app.dashboard.tune.charts import grid_map, hit_curve
from pagecast.planner_app.dashboard.what_if import admissible, refining
from pagecast.planner_app.dashboard.what_if.memory_charts import hbm_waterfall
from pagecast.planner_app.planner.capacity.planning import plan
from pagecast.planner_app.reports.style import caption_of
from pagecast.sim.replay import replay

ROWS = b"arrival_s,input_tokens,output_tokens\n" + b"".join(b"%d,100,10\n" % at for at in range(80))


def _until(true, within_s: float = 60) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


# ---- jobs


def test_a_job_tells_how_far_it_is_and_can_be_stopped():
    own = Session()
    trace, view = (
        workload.trace_of(PageView.of({"requests": 2000})),
        PageView.of({"requests": 2000, "seed": 77}),
    )
    assert replays.spread_for(own, view, trace) is None
    spread = own.jobs["spread"]
    _until(lambda: spread.progress is not None)
    assert spread.running and spread.progress[1:] == (replays.REPLICATES, "replays for the intervals")
    spread.stop()
    _until(lambda: not spread.running)
    assert spread.stopped and spread.value is None and not spread.error
    assert replays.spread_for(own, view, trace) is None and own.jobs["spread"] is spread


def test_a_job_that_breaks_says_so():
    job = Job("broken", time.sleep, "not seconds")
    _until(lambda: not job.running)
    assert job.value is None and "ended before it was done" in job.error


def test_a_process_that_is_ready_takes_the_next_job_and_ends_with_its_work():
    ready = jobs._Ready()
    ready.keep(1)
    (waiting,) = ready._waiting
    assert ready.take() is waiting
    waiting.communicate(timeout=60)  # no work came: it ends in silence
    assert waiting.returncode == 0


def test_a_job_nobody_holds_ends():
    own = Session()
    view = PageView.of({"requests": 2000, "seed": 78})
    replays.spread_for(own, view, workload.trace_of(view))
    state = own.jobs["spread"]._state
    _until(lambda: state.process is not None)
    process = state.process
    own.jobs.clear()
    _until(lambda: process.poll() is not None)


def _wait(gate: str, *, progress: object) -> str:
    while not Path(gate).exists():
        time.sleep(0.02)
    return "done"


def test_what_a_page_needs_first_does_not_wait_for_searches(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "_AT_ONCE", threading.BoundedSemaphore(1))
    gate, other = tmp_path / "gate", Session()
    other.ask("search", "a search", _wait, str(gate))
    _until(lambda: other.jobs["search"]._state.process is not None)
    own = Session()
    view = PageView.of({"trace": UPLOAD, "upload": own.keep_upload("t.csv", ROWS), "requests": 50})
    _until(lambda: replays.trace_for(own, view) is not None)
    assert results.get("a search") is None
    gate.touch()
    _until(lambda: results.get("a search") == "done")


def test_a_browser_that_goes_takes_its_jobs_along(tmp_path):
    stayed, left = Session(), Session()
    state._sessions.update(stayed=stayed, left=left)
    for own in (stayed, left):
        own.ask("search", ("search", id(own)), _wait, str(tmp_path / "gate"))
    job = left.jobs["search"]
    state.stop_left(lambda number: number == "stayed")
    _until(lambda: not job.running)
    assert job.stopped and not left.jobs
    assert stayed.jobs["search"].running and not stayed.jobs["search"].stopped
    assert left.ask("search", ("search", id(left)), _wait, str(tmp_path / "gate")) is None
    assert not left.jobs["search"].stopped  # the browser came back


def test_results_are_bounded_and_the_oldest_go_first():
    results = Results(most=2)
    for key in "abc":
        results.put(key, key)
    assert (results.get("a"), results.get("b"), results.get("c")) == (None, "b", "c")


def test_what_two_ask_for_at_once_is_made_once():
    results, made, gate = Results(), [], threading.Event()

    def make() -> str:
        gate.wait(10)
        made.append(1)
        return "it"

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(results.make, "key", make) for _ in range(4)]
        gate.set()
        assert {one.result() for one in asked} == {"it"}
    assert len(made) == 1


def test_the_baseline_gets_its_concurrency_too_once_the_views_own_is_in():
    own = Session()
    view = PageView.of({"requests": 30, "seed": 80})
    pinned = PageView.of({"requests": 30, "seed": 81, "slo": "tpot_p99<1us"})
    own.pins, own.baseline = {"other": pinned}, "other"
    own.settled = (view.key(), view["slo"])
    trace = workload.trace_of(view)
    assert refining._ask(own, view, trace)[admissible.BASE] is None and admissible.BASE not in own.jobs
    answer = admissible.Admissible(7, 6.0, 8.0, "")
    for slot in (admissible.POINT, admissible.INTERVAL):
        results.put(admissible.key(view, slot), answer)
    _until(lambda: refining._ask(own, view, trace)[admissible.BASE] is not None)
    assert admissible.known_of(pinned).users == 0 and "can't be kept" in admissible.known_of(pinned).sentence


def test_a_search_that_is_stopped_is_not_waited_for():
    own = Session()
    view = PageView.of({"requests": 2000, "seed": 79})
    trace = workload.trace_of(view)
    own.settled = (view.key(), view["slo"])
    for _ in ("the first questions", "the rest, which waited for them"):
        begun = set(own.jobs)
        refining._ask(own, view, trace)
        assert set(own.jobs) > begun
        for job in own.jobs.values():
            job.stop()
        _until(lambda: not any(job.running for job in own.jobs.values()))
    assert not refining._waiting(own, refining._ask(own, view, trace))


# ---- the server


def test_it_listens_here_only_and_tells_nobody():
    flags = server_start.options("127.0.0.1", 8501, browser=False)
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
    figure = hbm_waterfall(PageView().scenario().budget())
    bars = figure.data[0].y
    assert sum(bars) == pytest.approx(0, abs=1e-9)


# ---- tune


def test_tune_maps_the_grid_and_recommends_with_a_reason():
    view = PageView.of({"requests": 40, "gpu": "L40S", "slo": "ttft_p99<100s"})
    trace, updates = workload.trace_of(view), []
    table = searches.grid_job(trace, view.scenario(), view["slo"], progress=updates.append)
    figure = grid_map(table, "TTFT p99", (0.9, 16))
    assert updates[-1][0] == updates[-1][1] == len(table)
    assert sum(text is not None for row in figure.data[0].text for text in row) == len(table)
    row = table[(table["block_size"] == 32) & (table["reason"] == "")].iloc[-1]
    alone = view.scenario().changed(block_size=32, gpu_memory_utilization=row["gpu_memory_utilization"])
    assert row["ttft_p99_s"] == replay(trace, alone).summary["ttft_s"]["p99"]
    tuned = searches.tune_job(
        trace, view.scenario(), "block_size", view["slo"], False, progress=updates.append
    )
    assert tuned.reason and tuned.recommended in tuned.table["block_size"].tolist()


def test_budgets_begin_where_the_kv_cache_fits():
    for gpu in ("L40S", "H200"):
        budgets = searches.budgets(PageView.of({"gpu": gpu}).scenario())
        assert list(budgets) == sorted(budgets) and budgets[-1] == 0.95 and 4 <= len(budgets) <= 8
        assert all(
            PageView.of({"gpu": gpu, "gpu_memory_utilization": value}).scenario().budget()
            for value in budgets
        )


def test_the_map_holds_the_side_bars_own_scenario():
    scenario = PageView.of({"gpu_memory_utilization": 0.87, "block_size": 512}).scenario()
    budgets = searches.grid_budgets(scenario)
    assert 0.87 in budgets and len(budgets) == len(searches.budgets(scenario))
    trace = workload.trace_of(PageView.of({"requests": 5}))
    table = searches.grid_job(trace, scenario, "", progress=lambda _: None)
    assert len(grid_map(table, "TTFT p99", (0.87, 512)).layout.shapes) == 1


def test_a_map_marks_what_breaks_the_slo():
    view = PageView.of({"requests": 30})
    trace = workload.trace_of(view)
    table = searches.grid_job(trace, view.scenario(), "ttft_p99<1us", progress=lambda _: None)
    figure = grid_map(table, "TTFT p99", (0.9, 16))
    assert all(text.startswith("✕") for row in figure.data[0].text for text in row)
    assert "No scenario" in caption_of(figure)


def test_the_hit_curve_ends_at_what_an_endless_cache_finds():
    view = PageView.of({"requests": 200})
    curve = workload.hits_of(view, workload.trace_of(view))
    figure = hit_curve(curve, 100)
    assert max(figure.data[0].y) == pytest.approx(100 * curve.infinite)
    (mark,) = figure.layout.annotations  # on an axis of logarithms
    assert 10**mark.x == pytest.approx(100 * curve.block_size)


def test_admissible_concurrency_is_the_planners():
    view = PageView.of({"requests": 60, "model": "Qwen/Qwen3-32B", "gpu": "A100 80GB"})
    trace = workload.trace_of(view)
    answer = admissible.concurrency_job(trace, view.scenario(), view["slo"], False, progress=lambda _: None)
    planned = plan(trace, view.scenario(), PlanOptions(slo=view["slo"], kinds=["concurrency"], replicates=0))
    assert planned.concurrency is not None and answer.users == (planned.concurrency.value or 0)
