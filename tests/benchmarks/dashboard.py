"""Waiting times of the dashboard: `python tests/benchmarks/dashboard.py`.

    cold start      from `pagecast dashboard` to figures on the first page in a browser that is already open
    slider          from a key on a slider to new figures of 2,000 requests, never replayed before
    both questions  from opening the page, in a window of each width, to an answer on both cards that stand
                    first: which block size, which HBM budget (the server is new, nothing is known)
    with tiers      the same with 64 GiB of host memory, and with a disk behind it

Needs the extra `app`, playwright and Debian's chromium.
"""

from __future__ import annotations

import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from playwright.sync_api import Page, sync_playwright

_STARTS, _MOVES = 3, 50
_WIDTHS, _HEIGHT = (400, 768, 1280, 1920), 1000
_CHROMIUM = "/usr/bin/chromium"
_QUIET = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")
_SLIDERS = ("Rate", "HBM budget, fraction of the GPU")
_TIERS = {"host memory": "?kv_offloading_size=64", "a disk": "?kv_offloading_size=64&secondary_tiers=fs"}
_VALUES = '[data-testid="stMetricValue"]'
_ANSWER = re.compile(r"(Block size|HBM budget): .*(is best|seems better|takes as much as any|keeps the SLO)")
_GOAL_START_S, _GOAL_SLIDER_S, _GOAL_ANSWER_S = 3.0, 0.7, 5.0


def main() -> None:
    """Prints the medians and the worst, beside the goals."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=list(_QUIET))
        starts, moves = [], []
        for number in range(_STARTS):
            took, more = _session(browser, moves=_MOVES if number == _STARTS - 1 else 0)
            starts.append(took)
            moves += more
        answers = {width: _answers(browser, width) for width in _WIDTHS}
        tiers = {name: _session(browser, moves=8, query=query)[1] for name, query in _TIERS.items()}
        browser.close()
    _say("cold start to figures", starts, _GOAL_START_S)
    _say("slider to new figures", moves, _GOAL_SLIDER_S)
    for width, (seconds, inside) in answers.items():
        _say(
            f"both questions at {width} pixels{'' if inside else ', NOT ON THE FIRST SCREEN'}",
            [seconds],
            _GOAL_ANSWER_S,
        )
    for name, seconds in tiers.items():
        _say(f"the same with {name}", seconds, _GOAL_SLIDER_S)


def _say(title: str, seconds: list[float], goal_s: float) -> None:
    middle, worst = statistics.median(seconds), max(seconds)
    p95 = sorted(seconds)[round(0.95 * (len(seconds) - 1))]
    print(
        f"{title}: median {middle:.2f} s, p95 {p95:.2f} s, worst {worst:.2f} s of {len(seconds)}; "
        f"goal {goal_s:g} s, median at {middle / goal_s:.2f} of it"
    )


def _session(browser: Any, moves: int, query: str = "") -> tuple[float, list[float]]:
    begun = time.perf_counter()
    with _served(browser, 1280, query) as page:
        page.locator(_VALUES).nth(3).wait_for(timeout=60_000)
        took = time.perf_counter() - begun
        return took, [_move(page, number) for number in range(moves)]


def _answers(browser: Any, width: int) -> tuple[float, bool]:
    """Seconds from opening the page to both answers, and whether both are in the window unscrolled."""
    with _served(browser, width, "") as page:
        begun = page.evaluate("performance.timeOrigin") / 1000
        cards = page.locator("[data-testid=stMarkdown]").filter(has_text=_ANSWER)
        cards.nth(1).wait_for(timeout=90_000)
        took = time.time() - begun
        page.screenshot(path=f"{sys.argv[1]}/answers-{width}.png") if len(sys.argv) > 1 else None
        boxes = [cards.nth(place).bounding_box() for place in range(2)]
        return took, all(box is not None and box["y"] + box["height"] <= _HEIGHT for box in boxes)


@contextmanager
def _served(browser: Any, width: int, query: str) -> Iterator[Page]:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = browser.new_context(viewport={"width": width, "height": _HEIGHT})
    page = context.new_page()
    command = [sys.executable, "-m", "pagecast", "dashboard", "--no-browser", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _open(page, f"http://127.0.0.1:{port}/{query}", port)
        yield page
    finally:
        server.kill()
        server.wait()
        context.close()


def _open(page: Page, address: str, port: int) -> None:
    while True:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.02)
    page.goto(address)


def _move(page: Page, number: int) -> float:
    """Presses a key on a slider and waits until the figures have changed. Jobs of the last move may run."""
    slider = page.get_by_role("slider", name=_SLIDERS[0])
    slider.focus()
    page.wait_for_timeout(1500)
    before = page.locator(_VALUES).all_inner_texts()
    begun = time.perf_counter()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "([selector, before]) => {"
        " const now = [...document.querySelectorAll(selector)].map(value => value.innerText);"
        " return now.length === before.length && now.slice(1).join() !== before.slice(1).join(); }",
        arg=[_VALUES, before],
        polling=20,
        timeout=30_000,
    )
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
