"""The Blocks and Trust pages as scripts, and in a real browser: what a user does, and what it does."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("streamlit", reason="the dashboard needs the extra `app`")

from pagecast.planner_app.dashboard.blocks import page as blocks_page
from pagecast.planner_app.dashboard.blocks.frames import Look
from pagecast.planner_app.dashboard.blocks.sandbox_view import EXAMPLES
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.dashboard.shell.workload import trace_of
from pagecast.planner_app.dashboard.trust import charts, matching, recorded_run
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from streamlit.testing.v1 import AppTest

pytestmark = pytest.mark.usefixtures("components_searched_once")
_RUN = Path(__file__).parents[2] / "engine/recorded/h200c-qwen3-8b-chat-async"
_HAND, _REPLAY = {"watch": "By hand"}, {"watch": "A replay"}


def blocks_script() -> None:
    from pagecast.planner_app.dashboard.blocks import page
    from pagecast.planner_app.dashboard.shell import state
    from pagecast.planner_app.dashboard.shell.view import PageView

    state.session().view = PageView.of({"requests": 60, "gpu": "L40S"})
    page.render()


def trust_script(gpu: str = "H200", costs: str = "auto") -> None:
    from pagecast.planner_app.dashboard.shell import state
    from pagecast.planner_app.dashboard.shell.view import PageView
    from pagecast.planner_app.dashboard.trust import page

    state.session().view = PageView.of({"requests": 60, "gpu": gpu, "costs": costs})
    page.render()


def opened(script: Callable[..., None], kwargs: dict[str, Any] | None = None, **query: str) -> AppTest:
    test = AppTest.from_function(script, default_timeout=60, kwargs=kwargs)
    for name, value in query.items():
        test.query_params[name] = value
    test.run()
    assert not test.exception
    return test


def grid(test: AppTest) -> dict[str, Any] | None:
    """What the grid in the page was given."""
    nodes = [test._tree]
    while nodes:
        node = nodes.pop()
        if getattr(node, "type", "") == "bidi_component":
            payload: dict[str, Any] = json.loads(node.proto.json)
            return payload
        nodes += list(getattr(node, "children", {}).values())
    return None


def looks(data: dict[str, Any]) -> dict[Look, int]:
    """How many blocks are what, after the last frame that the grid was given."""
    cells, changes = (
        np.frombuffer(base64.b64decode(data[name]), "<i4").copy() for name in ("before", "changes")
    )
    for at, length, value in changes.reshape(-1, 3).tolist():
        cells[at : at + length] = value
    counts = np.bincount(cells & 7, minlength=len(Look))
    return {look: int(counts[look]) for look in Look}


def requests_of(test: AppTest) -> dict[str, dict[str, Any]]:
    rows = test.dataframe[0].value.to_dict("records")
    return {row["request"]: row for row in rows}


def until(test: AppTest, true: Callable[[AppTest], Any], within_s: float = 90) -> AppTest:
    end = time.monotonic() + within_s
    while not true(test):
        assert time.monotonic() < end, [caption.value for caption in test.caption]
        time.sleep(0.2)
        test.run()
    return test


# ---- by hand


def test_adding_and_stepping_fills_the_grid_and_cancelling_empties_it():
    test = opened(blocks_script, **_HAND)
    assert "empty" in " ".join(caption.value for caption in test.caption)
    test.number_input(key="sb_prompt").set_value(72).run()
    test.button(key="sb_add").click().run()
    assert requests_of(test)["A"]["state"] == "waiting"
    test.button(key="sb_step").click().run()
    data = grid(test)
    assert data is not None and looks(data)[Look.REQUEST] == 4 and looks(data)[Look.TAIL] == 1
    assert requests_of(test)["A"]["tail waste, tokens"] == 8
    assert any(line.startswith("0 allocated A 0-4") for line in data["log"])
    test.button(key="sb_cancel").click().run()
    assert requests_of(test)["A"]["state"] == "cancelled"
    assert looks(grid(test))[Look.CACHED] == 4 and looks(grid(test))[Look.REQUEST] == 0
    test.button(key="sb_undo").click().run()
    assert requests_of(test)["A"]["state"] == "decode"
    test.button(key="sb_anew").click().run()
    assert not any(looks(grid(test))[look] for look in (Look.CACHED, Look.REQUEST, Look.TAIL))


def test_a_fork_shares_growing_adds_and_finishing_ends():
    test = opened(blocks_script, **_HAND, sandbox="add-88-0-0-96-0_step-2")
    test.button(key="sb_fork").click().run()
    test.button(key="sb_step").click().run()
    assert looks(grid(test))[Look.SHARED] == 5 and requests_of(test)["B"]["found in the cache"] == 87
    before = requests_of(test)["A"]["tokens held"]
    test.number_input(key="sb_grow_tokens").set_value(20).run()
    test.button(key="sb_grow").click().run()
    assert requests_of(test)["A"]["tokens held"] == before + 20
    test.button(key="sb_finish").click().run()
    assert requests_of(test)["A"]["state"] == "finished" and requests_of(test)["B"]["state"] == "decode"
    assert looks(grid(test))[Look.SHARED] == 0


def test_a_smaller_pool_evicts_and_says_so():
    test = opened(blocks_script, **_HAND, sandbox="add-160-0-0-1-0_step-2_add-96-0-0-1-0_step-1")
    assert "0 evicted" in " ".join(caption.value for caption in test.caption)
    test.number_input(key="sb_blocks").set_value(12).run()
    assert "4 evicted" in " ".join(caption.value for caption in test.caption)
    assert any("evicted 9~6" in line for line in grid(test)["log"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_show_what_they_promise(name):
    test = opened(blocks_script, **_HAND)
    test.selectbox(key="sb_example").set_value(name).run()
    data, rows = grid(test), requests_of(test)
    promised = {
        "Shared": rows.get("B", {}).get("found in the cache") == 64,
        "Fork": any(" copied " in line for line in data["log"]) and looks(data)[Look.SHARED] > 0,
        "Eviction": any(" evicted" in line for line in data["log"]),
        "Preemption": any(" preempted " in line for line in data["log"]),
        "Tenants": [row["found in the cache"] for row in rows.values()] == [0, 0, 80],
    }
    assert promised[name.split()[0].rstrip(":")]
    assert test.query_params["sandbox"] in (EXAMPLES[name], [EXAMPLES[name]])


def test_a_block_by_hand_shows_its_chain_to_the_root():
    test = opened(blocks_script, **_HAND, sandbox="add-96-64-1-64-3_step-4")
    test.number_input(key="sb_block").set_value(3).run()
    chain = test.dataframe[1].value
    assert chain["in the sequence"].tolist() == ["3", "2", "1", "0", "root"]
    assert chain["block"].tolist()[:-1] == ["3", "2", "1", "0"]
    assert any("tenant 3" in text.value for text in test.markdown)


def test_a_hostile_sandbox_link_is_a_warning():
    test = opened(blocks_script, **_HAND, sandbox="<script>-1")
    assert len(test.warning) == 1 and "no action" in test.warning[0].value
    assert len(opened(blocks_script, **_HAND, sandbox="cancel-7").error) == 1


# ---- a replay


def test_a_replay_plays_and_a_block_tells_its_life():
    test = until(opened(blocks_script, frame="300", block="40"), grid)
    data = grid(test)
    view = PageView.of({"requests": 60, "gpu": "L40S"})
    assert data["blocks"] == view.scenario().limits().num_blocks
    assert data["at"] == 300 and data["chosen"] == 40 and data["total"] > 300
    assert len(data["times"]) == data["total"] and data["log"][0] == "0 admitted r0 cached=0"
    assert any("**Block 40**" in text.value for text in test.markdown)
    life = test.code[0].value
    assert "allocated" in life and test.dataframe[0].value["in the sequence"].tolist()[-1] == "root"
    finished = sum(" finished " in line for line in data["log"])
    assert finished == replay(trace_of(view), view.scenario()).summary["completed"] == 60


def test_a_frame_or_block_that_is_not_there_does_no_harm():
    test = until(opened(blocks_script, frame="99999999", block="99999999"), grid)
    data = grid(test)
    assert data["at"] == data["total"] - 1 and data["chosen"] is None
    assert not test.exception


def test_a_long_replay_comes_in_parts(monkeypatch):
    monkeypatch.setattr(blocks_page, "MOST_REQUESTS", 20)
    test = until(opened(blocks_script, **_REPLAY), grid)
    assert any("first 20 of 60" in caption.value for caption in test.caption)
    assert sum(" finished " in line for line in grid(test)["log"]) == 20


# ---- trust


def metrics(test: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in test.metric}


def test_trust_shows_the_shipped_calibration_in_force():
    test = opened(trust_script)
    made = matching.candidates()["vllm-0.24-h200-qwen3-8b"]
    worst = max(
        (row for row in made.cross_validation if row["steps of"] == "all"),
        key=lambda row: abs(row["error_percent"]),
    )
    assert metrics(test)["Left-out run"] == f"{worst['error_percent']:+.1f}%"
    text = " ".join(element.value for element in [*test.caption, *test.markdown])
    assert "was made for just this set\\-up" in text or "was made for just this set-up" in text
    assert "All of this replay lies within what was fitted" in text
    assert worst["run"].replace("_", "\\_") in text


def test_trust_says_in_what_a_scenario_differs():
    test = opened(trust_script, {"gpu": "RTX 6000 Ada"})
    text = " ".join(element.value for element in [*test.caption, *test.markdown])
    assert "**roofline**" in text and "differs from the scenario in GPU" in text


def test_reach_marks_what_was_not_fitted():
    made = matching.candidates()["vllm-0.24-h200-qwen3-8b"]
    result = replay(
        trace_of(PageView.of({"requests": 40})), Scenario.make({"max_num_batched_tokens": 32_768})
    )
    reaches = {each.name: each for each in charts.reach(made, result)}
    steps = result.steps
    tokens = reaches["tokens in a step"]
    assert tokens.most == int((steps["prefill_tokens"] + steps["decode_n"]).max())
    small = charts.Reach("tokens in a step", 9000, 8192)
    assert not small.inside and "9,000" in charts.reach_chart([small]).layout.meta["caption"]


def test_a_recorded_run_is_set_beside_its_forecast(monkeypatch):
    monkeypatch.setattr(recorded_run, "REPLICATES", 0)
    test = opened(trust_script)
    test.text_input(key="trust_run").set_value(str(_RUN))
    test.button[-1].click().run()
    until(test, lambda test: "Steps decided alike" in metrics(test))
    cards = metrics(test)
    assert cards["Steps decided alike"] == "6,561 of 6,561"
    rows = {row[""]: row for row in test.dataframe[-1].value.to_dict("records")}
    assert rows["TTFT p50"]["error"].startswith(cards["TTFT p50 error"][:2])


def test_a_run_of_pagecast_s_own_simulation_is_told_as_such():
    told = recorded_run.simulated_run({"engine": "pagecast simulated", "costs": "roofline"})
    assert "pagecast simulated this run, with step costs roofline" in told
    assert recorded_run.simulated_run({"engine": "vllm"}) == ""


@pytest.mark.parametrize("folder", ["/etc", "a\0b", "~nobody-here/x"])
def test_a_folder_that_holds_no_run_is_one_line(folder):
    test = opened(trust_script)
    test.text_input(key="trust_run").set_value(folder)
    test.button[-1].click().run()
    until(test, lambda test: test.error)
    assert len(test.error) == 1 and "\n" not in test.error[0].value


def test_folders_are_not_read_for_other_machines(monkeypatch):
    monkeypatch.setattr(recorded_run.st, "get_option", lambda name: "0.0.0.0")
    test = opened(trust_script)
    assert not test.text_input and any("other machines" in info.value for info in test.info)


# ---- in a browser

Visit = Callable[..., Any]


def where(page: Any) -> str:
    text: str = page.locator(".pool .where").inner_text()
    return text


def test_the_block_view_plays_steps_and_tells_of_a_block(visit: Visit) -> None:
    page = visit("/blocks?watch=A+replay&requests=60&gpu=L4&max_model_len=8192")
    page.locator(".pool .where").wait_for(timeout=60_000)
    first = where(page)
    assert first.startswith("Step 0,") and "free" in page.locator(".legend").inner_text()
    page.locator(".pool .play").click()
    page.wait_for_timeout(1500)
    page.locator(".pool .play").click()
    stopped = where(page)
    assert stopped != first
    page.locator(".pool .next").click()
    assert where(page) != stopped
    page.locator(".pool .back").click()
    assert where(page) == stopped
    page.locator(".pool .play").click()
    page.locator(".pool .next").click()  # a step while it plays pauses
    assert page.locator(".pool .play").inner_text() == "Play"
    paused = where(page)
    page.wait_for_timeout(300)
    assert where(page) == paused
    page.get_by_role("slider", name="Step of the replay").evaluate(
        "(slider) => { slider.value = 200; slider.dispatchEvent(new Event('input')); }"
    )
    assert "frame 201 of" in where(page)
    page.locator(".pool .both canvas").click(position={"x": 5, "y": 5})
    page.get_by_text("is block 0 of request r0's sequence").wait_for()
    assert "frame 201 of" in where(page) and "block=0" in page.url


@pytest.mark.slow
def test_a_sandbox_in_the_browser_grows_by_its_buttons(visit: Visit) -> None:
    page = visit("/blocks?watch=By+hand&requests=10")
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_text("free: 48").wait_for()
    page.get_by_role("button", name="1 step", exact=True).click()
    page.get_by_text("one request's: 6").wait_for()
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_text("cached: 6").wait_for()
    assert "sandbox=add-96-0-0-64-0_step-1_cancel-0" in page.url


def test_fewer_frames_than_the_one_shown_leave_the_sandbox_alive(visit: Visit) -> None:
    long = next(name for name in EXAMPLES if name.startswith("Preemption"))
    page = visit("/blocks?watch=By+hand&requests=10&sandbox=" + EXAMPLES[long])
    page.locator(".pool .where").wait_for(timeout=60_000)
    page.get_by_text("frame 29 of 29").wait_for()
    page.get_by_role("combobox", name="Show me").click()
    page.get_by_role("option").filter(has_text="Shared").click()
    page.get_by_text("of 6)").wait_for()
    assert not page.get_by_text("BidiComponent Error").count()
    page.locator(".pool .back").click()
    assert where(page).endswith("of 6)")
