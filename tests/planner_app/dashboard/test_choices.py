"""The two cards that come first: their words, their button, and what they say while they wait."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs the extra `app`")

from pagecast.planner_app.dashboard.shell.jobs import begin, results, take_begun
from pagecast.planner_app.dashboard.shell.state import Session
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.dashboard.what_if.choice_job import first_choices
from pagecast.planner_app.dashboard.what_if.choices import headline, key
from pagecast.planner_app.planner.tune.choice import BLOCK_SIZE, HBM, Choice, Standing, choose
from pagecast.planner_app.planner.tune.worth import worth
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

pytestmark = pytest.mark.usefixtures("no_browser")
SMALL = {"requests": 60, "seed": 77}


def choice(knob: str, now: tuple, best: tuple, load: int = 300) -> Choice:
    return Choice(knob, Standing(*now), Standing(*best), load, (0.5, 0.9))


def test_the_words_say_now_best_and_what_it_is_worth() -> None:
    more = choice(HBM, (0.39, 196, 1.0, 30.0), (0.9, 302, 1.0, 109.0))
    assert headline(HBM, 0.39, more) == "0.39 now, 0.90 is best"
    assert worth(more) == "196 users at once keep the SLO now, 302 with 0.90: +54%."
    less = choice(HBM, (0.9, 302, 1.0, 109.0), (0.5, 302, 1.0, 50.0))
    assert "as many as with 0.50, which leaves 59 GiB" in worth(less)
    rates = choice(HBM, (0.55, 302, 1.0, 60.0, 29.1), (0.75, 302, 1.0, 88.0, 31.5))
    assert worth(rates) == "302 users at once keep the SLO now, +8% requests per second."
    same = choice(BLOCK_SIZE, (16, 302, 1.0, 109.0), (16, 302, 1.0, 109.0))
    assert headline(BLOCK_SIZE, 16, same) == "16 is best" and not same.changes
    assert headline(HBM, 0.39, more, sure=False) == "0.39 now, 0.90 seems better"
    assert headline(BLOCK_SIZE, 16, same, sure=False) == "16 takes as much as any"
    none = choice(BLOCK_SIZE, (16, 0, None, 109.0), (16, 0, None, 109.0), 0)
    assert "no value keeps the SLO" in headline(BLOCK_SIZE, 16, none)


def test_the_cards_stand_first_and_apply_moves_the_side_bar(app) -> None:
    view = PageView.of({**SMALL, "gpu_memory_utilization": 0.5})
    best = choice(HBM, (0.5, 10, 1.0, 50.0), (0.9, 20, 1.0, 109.0), 20)
    same = choice(BLOCK_SIZE, (16, 10, 1.0, 1.0), (16, 10, 1.0, 1.0), 10)
    results.put(key(view), {HBM: best, BLOCK_SIZE: same})
    test = app(**SMALL, gpu_memory_utilization=0.5)
    titles = [text.value for text in test.main.markdown]
    places = [
        next(at for at, text in enumerate(titles) if words in text)
        for words in ("Block size:", "HBM budget:")
    ]
    assert max(places) < 4  # before all other cards
    (button,) = [button for button in test.button if button.label == "Apply"]
    button.click().run()
    assert test.number_input(key="gpu_memory_utilization").value == 0.9


def test_a_question_without_an_answer_says_why(app) -> None:
    test = app(requests=62, num_gpu_blocks=5000)
    view = PageView.of({"requests": 62, "num_gpu_blocks": 5000})
    same = choice(BLOCK_SIZE, (16, 10, 1.0, 1.0), (16, 10, 1.0, 1.0), 10)
    results.put(key(view), {HBM: "the KV cache has a fixed number of blocks", BLOCK_SIZE: same})
    test.run()
    assert any("16 takes as much as any" in text.value for text in test.main.markdown)
    assert any("a fixed number of blocks" in text.value for text in test.caption)


def test_both_first_answers_share_replays_and_one_without_an_answer_says_why() -> None:
    told = []
    trace = read("chat", limit=30)
    first = first_choices(trace, Scenario(num_gpu_blocks=5000), "ttft_p90<2s", progress=told.append)
    assert isinstance(first[BLOCK_SIZE], Choice)
    assert "fixed number of blocks" in str(first[HBM])
    told.clear()
    both = first_choices(trace, Scenario(max_num_seqs=8), "ttft_p90<2s", progress=told.append)
    count = len(told)
    told.clear()
    alone = choose(
        trace,
        Scenario(max_num_seqs=8),
        BLOCK_SIZE,
        "ttft_p90<2s",
        lambda *done: told.append(done),
        lasting=False,
    )
    assert both[BLOCK_SIZE] == alone
    assert both[HBM] == choose(trace, Scenario(max_num_seqs=8), HBM, "ttft_p90<2s", lasting=False)
    assert count <= len(told) + 1  # the second question takes next to nothing


def test_a_job_begun_before_the_first_session_is_that_sessions() -> None:
    begin("asked early", _echo, 7)
    own = Session()
    assert own.ask("slot", "asked early", _echo, 8) is None
    assert take_begun("asked early") is None
    wait_until(lambda: not own.jobs["slot"].running)
    assert own.ask("slot", "asked early", _echo, 8) == 7


def _echo(value: int, *, progress: object) -> int:
    return value


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_cards_that_wait_say_so(app) -> None:
    test = app(requests=61)
    assert any("**Block size: 16**" in text.value for text in test.main.markdown)
    assert not [button for button in test.button if button.label == "Apply"]
