"""Tables of a replay: what they say where there is nothing to count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pagecast.planner_app.commands.replay_view import show
from pagecast.sim.replay import replay
from pagecast.sim.replay.result import Result
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read


@pytest.fixture(scope="module")
def result() -> Result:
    return replay(read("chat", limit=5), Scenario(num_gpu_blocks=900, costs="roofline"))


def line_of(title: str, result: Result, capsys: pytest.CaptureFixture[str], **figures: Any) -> str:
    show(read("chat", limit=5), replace(result, summary={**result.summary, **figures}), None)
    text = capsys.readouterr().out
    return " ".join(text[text.index(title) :].partition("\nreplayed in")[0].split())


@pytest.mark.parametrize(
    ("at_rollout", "at_end", "gone_after_s", "words"),
    [
        (0, 0, 0.0, "no old blocks"),
        (0, 0, None, "no old blocks"),
        (0, 12, None, "0 old blocks at the rollout, 12 at the end"),
        (1, 0, 26.0, "1 old block at the rollout, the last gone after 26 s"),
        (1_200, 900, None, "1,200 old blocks at the rollout, 900 at the end"),
    ],
)
def test_a_rollout_says_what_became_of_old_blocks(
    at_rollout: int,
    at_end: int,
    gone_after_s: float | None,
    words: str,
    result: Result,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rollout = {
        "forced_miss_tokens": 7,
        "old_blocks_at_rollout": at_rollout,
        "old_blocks_at_end": at_end,
        "old_blocks_gone_after_s": gone_after_s,
    }
    line = line_of("rollout", result, capsys, rollout=rollout)
    assert line.startswith(f"rollout 7 hit tokens lost; {words}")


@pytest.mark.parametrize(("evicted", "words"), [(None, "- blocks evicted"), (1_234, "1,234 blocks evicted")])
def test_evictions_of_a_tenant_that_nobody_counts_are_a_dash(
    evicted: int | None, words: str, result: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    tenant = {"requests": 5, "completed": 5, "ttft_p99_s": 0.5, "token_hit_rate": 0.25}
    tenants = {"a": {**tenant, "evicted_blocks": evicted}}
    assert words in line_of("tenant a", result, capsys, tenants=tenants)
