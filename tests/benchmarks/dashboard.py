"""Waiting times of the dashboard: `python tests/benchmarks/dashboard.py`.

    cold start      from `pagecast dashboard` to figures on the first page in a browser that is already open
    slider          from a key on a slider to new figures of 2,000 requests, never replayed before
    with tiers      the same with 64 GiB of host memory, and with a disk behind it

Needs the extra `app`, playwright and Debian's chromium.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from contextlib import closing
from typing import Any

from playwright.sync_api import Page, sync_playwright

_STARTS, _MOVES = 3, 8
_CHROMIUM = "/usr/bin/chromium"
_QUIET = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")
_SLIDERS = ("Rate", "HBM budget, fraction of the GPU")
_TIERS = {"host memory": "?kv_offloading_size=64", "a disk": "?kv_offloading_size=64&secondary_tiers=fs"}
_VALUES = '[data-testid="stMetricValue"]'
_GOAL_START_S, _GOAL_SLIDER_S = 3.0, 1.0


def main() -> None:
    """Prints the medians and the worst, beside the goals."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=list(_QUIET))
        starts, moves = [], []
        for number in range(_STARTS):
            took, more = _session(browser, moves=_MOVES if number == _STARTS - 1 else 0)
            starts.append(took)
            moves += more
        tiers = {name: _session(browser, moves=_MOVES, query=query)[1] for name, query in _TIERS.items()}
        browser.close()
    _say("cold start to figures", starts, _GOAL_START_S)
    _say("slider to new figures", moves, _GOAL_SLIDER_S)
    for name, seconds in tiers.items():
        _say(f"the same with {name}", seconds, _GOAL_SLIDER_S)


def _say(title: str, seconds: list[float], goal_s: float) -> None:
    middle, worst = statistics.median(seconds), max(seconds)
    print(
        f"{title}: median {middle:.2f} s, worst {worst:.2f} s of {len(seconds)}; "
        f"goal {goal_s:g} s, median at {middle / goal_s:.2f} of it"
    )


def _session(browser: Any, moves: int, query: str = "") -> tuple[float, list[float]]:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    command = [sys.executable, "-m", "pagecast.planner_app", "dashboard", "--no-browser", "--port", str(port)]
    begun = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _open(page, f"http://127.0.0.1:{port}/{query}", port)
        page.locator(_VALUES).nth(3).wait_for(timeout=60_000)
        took = time.perf_counter() - begun
        return took, [_move(page, number) for number in range(moves)]
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
