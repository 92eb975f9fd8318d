"""Advice of the cards, `tune` and the Load page beside plans, in the 20 scenarios of the benchmark."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagecast.planner_app.planner.capacity.options import PlanOptions

ADVICE = Path(__file__).parents[3] / "benchmarks" / "advice.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def names() -> Iterator[dict]:
    most = PlanOptions.model_fields["most_requests"].default
    names = runpy.run_path(str(ADVICE))
    names["shorten"](names["SHORT"])
    yield names
    names["shorten"](most)


@pytest.mark.parametrize("number", range(20))
def test_no_value_that_was_compared_takes_more_than_the_one_advised(number: int, names: dict) -> None:
    assert names["faults"](number) == []
