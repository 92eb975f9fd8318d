"""A calibration of kernels that have changed since says so beside its name."""

import pytest
from pagecast.kernels.code_digest import code_digest
from pagecast.planner_app.wording import costs_name as words
from pagecast.planner_app.wording.costs_name import costs_name


def test_a_calibration_of_other_kernels_names_both():
    said = costs_name("pagecast-h200-qwen3-8b")
    assert said.startswith("pagecast-h200-qwen3-8b (of other kernels: ")
    assert f"here {code_digest()})" in said


@pytest.mark.parametrize("name", ["measured", "vllm-0.24-h200-qwen3-8b"])
def test_costs_of_other_engines_have_their_name_alone(name):
    assert costs_name(name) == name


def test_a_calibration_of_the_same_kernels_has_its_name_alone(monkeypatch):
    monkeypatch.setattr(words, "code_digest", lambda: "c77db606")
    assert costs_name("pagecast-h200-qwen3-8b") == "pagecast-h200-qwen3-8b"
