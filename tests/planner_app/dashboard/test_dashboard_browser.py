"""The dashboard in a real browser: sliders, uploads, downloads, two sessions, and how the pages look."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs the extra `app`")
pytest.importorskip("playwright", reason="browser tests need playwright")

from pagecast.planner_app.console import seconds
from pagecast.planner_app.dashboard.server_start import UPLOAD_MB
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.dashboard.shell.workload import trace_of
from pagecast.sim.replay import replay
from playwright.sync_api import expect

expect.set_options(timeout=60_000)

Visit = Callable[..., Any]
DRAWN = ".js-plotly-plot .main-svg, canvas, table"
_ROWS = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{i / 4},{900 + i},40\n" for i in range(100))
_HOSTILE = "<img src=x onerror=document.title='broken-into'>![a](http://192.0.2.1/x.png)=1+1.csv"


def card(page: Any, title: str) -> Any:
    """The value of a metric: the first, for a page may still have the last draw's as well."""
    return page.get_by_test_id("stMetric").filter(has_text=title).get_by_test_id("stMetricValue").first


def press(slider: Any, key: str, times: int) -> None:
    """Presses a key from within the page, so that a busy machine leaves no rest between two presses."""
    slider.evaluate(
        """async (slider, [key, times]) => {
            slider.focus();
            for (let at = 0; at < times; at++) {
                slider.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
                await new Promise(done => setTimeout(done, 50));
            }
        }""",
        [key, times],
    )


def ttft(view: PageView) -> str:
    return seconds(replay(trace_of(view), view.scenario()).summary["ttft_s"]["p99"])


def pagecast(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "pagecast", *map(str, arguments), "--json"]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def test_a_slider_moves_the_figures_and_the_link_repeats_them(visit: Visit) -> None:
    page = visit("/?requests=300")
    expect(card(page, "TTFT")).to_have_text(ttft(PageView.of({"requests": 300})))
    slider = page.get_by_role("slider", name="Rate")
    slider.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    moved = ttft(PageView.of({"requests": 300, "rate": 1.3}))
    expect(card(page, "TTFT")).to_have_text(moved)
    expect(page).to_have_url(re.compile(r"rate=1\.3"))
    link = urlsplit(page.url)
    assert parse_qs(link.query) == {"requests": ["300"], "rate": ["1.3"]}
    again = visit(f"{link.path}?{link.query}")
    expect(card(again, "TTFT")).to_have_text(moved)


def test_a_broken_slo_is_red_and_charts_add_no_tab_stops(visit: Visit) -> None:
    page = visit("/?requests=60&slo=ttft_p99<1us,tpot_p99<1s")
    expect(card(page, "TTFT")).to_have_css("color", "rgb(224, 49, 49)")
    expect(card(page, "TPOT")).not_to_have_css("color", "rgb(224, 49, 49)")
    expect(page.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    assert not page.locator(".modebar-btn").count()


CUT = """() => [...document.querySelectorAll('[data-testid=stMetricLabel], [data-testid=stMetricLabel] *')]
    .filter(one => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflow === 'hidden')
    .map(one => one.innerText)"""


def test_back_goes_to_the_last_value_at_which_a_slider_rested(visit: Visit) -> None:
    page = visit("/compare?requests=60")  # a page without charts, which take a browser long to draw
    slider = page.get_by_role("slider", name="Rate")
    cell = page.get_by_role("row", name="TTFT p99").get_by_role("cell").last

    def rests(rate: float) -> None:
        expect(cell).to_have_text(ttft(PageView.of({"requests": 60, "rate": rate})))
        page.wait_for_function("() => window.pagecastHistory?.href === location.href")
        assert parse_qs(urlsplit(page.url).query).get("rate", ["1.0"]) == [f"{rate}"]

    rests(1.0)
    for presses, rate in ((1, 1.1), (3, 1.4)):
        press(slider, "ArrowRight", presses)
        rests(rate)
    page.go_back()
    rests(1.1)
    page.go_back()
    rests(1.0)
    page.go_forward()
    rests(1.1)


@pytest.mark.slow
def test_no_text_of_the_fleet_is_cut(visit: Visit) -> None:
    page = visit("/fleet?requests=60&replicas=2")
    expect(page.get_by_text("Hits per router")).to_be_visible()
    tags = page.locator("[data-testid=stMultiSelectTagsContainer]").first
    chosen = tags.locator("[data-tag]")
    assert chosen.count() == 3
    box = tags.bounding_box()
    for at in range(3):
        tag = chosen.nth(at).bounding_box()
        assert tag["x"] + tag["width"] <= box["x"] + box["width"] + 1
    assert page.evaluate(CUT) == []


@pytest.mark.slow
def test_intervals_are_grey_until_they_are_in(visit: Visit) -> None:
    page = visit("/?requests=40&seed=11")
    expect(page.locator('[class*="st-key-pending"]').first).to_be_visible()
    expect(page.get_by_text(re.compile(r"90% interval: .* to ")).first).to_be_visible(timeout=150_000)


@pytest.mark.slow
def test_a_scenario_that_is_downloaded_replays_to_the_same_figures(visit: Visit, tmp_path: Path) -> None:
    page = visit("/compare?requests=200&block_size=64&gpu=A100%2080GB")
    with page.expect_download() as got:
        page.get_by_role("button", name="Scenario, YAML").click()
    file = tmp_path / "scenario.yaml"
    got.value.save_as(file)
    printed = pagecast("replay", "chat", "--limit", 200, "--scenario", file)
    cell = page.get_by_role("row", name="TTFT p99").get_by_role("cell").last
    expect(cell).to_have_text(seconds(printed["ttft_s"]["p99"]))


def test_an_upload_is_replayed_as_the_command_line_does_and_its_name_does_nothing(
    visit: Visit, tmp_path: Path
) -> None:
    file = tmp_path / _HOSTILE.replace("/", "∕")
    file.write_text(_ROWS)
    page = visit("/?trace=upload")
    page.get_by_test_id("stFileUploaderDropzoneInput").set_input_files(file)
    printed = pagecast("replay", file)
    expect(card(page, "TTFT")).to_have_text(seconds(printed["ttft_s"]["p99"]))
    assert page.title() != "broken-into" and page.locator('img[src="x"]').count() == 0


def test_a_file_that_is_no_trace_gives_the_readers_line(visit: Visit, tmp_path: Path) -> None:
    file = tmp_path / "notes.csv"
    file.write_text("arrival_s,input_tokens,output_tokens\n0,12,many\n")
    page = visit("/?trace=upload")
    page.get_by_test_id("stFileUploaderDropzoneInput").set_input_files(file)
    alert = page.get_by_test_id("stAlert")
    expect(alert).to_contain_text("notes.csv")
    expect(alert).to_contain_text("line 2")


def test_an_upload_that_is_too_large_is_refused_with_its_reason(visit: Visit, tmp_path: Path) -> None:
    file = tmp_path / "large.csv"
    with file.open("wb") as out:
        out.truncate((UPLOAD_MB + 1) << 20)
    page = visit("/?trace=upload")
    page.get_by_test_id("stFileUploaderDropzoneInput").set_input_files(file)
    expect(page.get_by_text(re.compile(rf"{UPLOAD_MB}(\.0)?\s*MB or smaller"))).to_be_visible()


@pytest.mark.slow
def test_two_sessions_do_not_see_each_other(visit: Visit, tmp_path: Path) -> None:
    file = tmp_path / "secret.csv"
    file.write_text(_ROWS.replace("40\n", "41\n"))
    mine, other = visit("/?trace=upload"), visit("/?requests=150")
    expect(card(other, "TTFT")).to_be_visible()
    mine.get_by_test_id("stFileUploaderDropzoneInput").set_input_files(file)
    expect(card(mine, "TTFT")).to_be_visible(timeout=60_000)
    mine.get_by_role("button", name="Pin", exact=True).click()
    mine.get_by_role("button", name="Pin this scenario").click()
    expect(mine).to_have_url(re.compile("pin="))
    other.get_by_role("link", name="Compare").click()
    expect(other.get_by_text("0 pinned")).to_be_visible()
    assert "secret" not in other.content()
    link = urlsplit(mine.url)
    thief = visit(f"/?{link.query}")  # the link alone does not carry the file
    expect(thief.get_by_test_id("stAlert").first).to_contain_text("only its sender has")
    assert "secret" not in thief.content()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        pytest.param(400, "light", marks=pytest.mark.slow),
        pytest.param(1280, "light", marks=pytest.mark.slow),
        pytest.param(1920, "dark", marks=pytest.mark.slow),
    ],
)
def test_every_page_fits_its_window(visit: Visit, screenshots: Path, width: int, scheme: str) -> None:
    page = visit("/?requests=300&pin=on one L40S?requests=300%26gpu=L40S", width=width, scheme=scheme)
    expect(card(page, "TTFT")).to_be_visible()
    if width < 768:  # the side bar does not lie over the page
        bar = page.get_by_test_id("stSidebar").bounding_box()
        assert bar["x"] + bar["width"] <= 0
    names = [link.inner_text() for link in page.get_by_role("navigation").get_by_role("link").all()]
    assert {"What-if", "Tune", "Compare"} <= set(names)
    for name in names:
        if (opener := page.get_by_test_id("stExpandSidebarButton")).is_visible():
            opener.click()
        page.get_by_role("link", name=name).click()
        expect(page.locator(DRAWN).first).to_be_visible(timeout=60_000)
        page.wait_for_timeout(1000)
        wider = page.evaluate(
            """() => { const main = document.querySelector('[data-testid=stMain]');
            return main.scrollWidth - main.clientWidth; }"""
        )
        assert wider <= 0, f"{name} is {wider} pixels wider than its window"
        height = page.evaluate("() => document.querySelector('[data-testid=stMain]').scrollHeight")
        page.set_viewport_size({"width": width, "height": min(height + 80, 6000)})
        page.wait_for_timeout(500)
        page.screenshot(path=screenshots / f"{name.lower()}-{width}-{scheme}.png")
        page.set_viewport_size({"width": width, "height": 1000})
