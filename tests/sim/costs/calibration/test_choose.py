"""Step costs chosen by a scenario's names, and the notes on them."""

import pytest
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration import file
from pagecast.sim.scenario import Scenario

FITS = "vllm-0.24-h200-qwen3-8b"


def test_auto_takes_what_fits():
    assert Scenario().step_costs().name == FITS


@pytest.mark.parametrize(
    "fields", [{"gpu": "L40S"}, {"model": "Qwen/Qwen3-0.6B"}, {"tensor_parallel_size": 2}]
)
def test_without_a_calibration_auto_takes_measured_operations(fields):
    costs = Scenario(**fields).step_costs()
    assert costs.name == "measured"
    text = sentence(costs.expected_error())
    assert "like it (vLLM, dense, " in text and "No shipped calibration fits (" in text
    assert "operations that NVIDIA measured with vllm 0.24.0 on" in text


def test_the_name_of_measured_costs_can_be_given_and_says_what_is_missing():
    assert Scenario(costs="measured").step_costs().name == "measured"
    with pytest.raises(BadInput, match="not measured on L4, but on A100 80GB, B200"):
        Scenario(costs="measured", gpu="L4").step_costs()


@pytest.mark.parametrize("fields", [{"gpu": "L4"}, {"gpu": "A100 40GB"}, {"model": "Qwen/Qwen3-8B-AWQ"}])
def test_auto_is_the_roofline_where_nothing_was_measured_and_says_why(fields):
    costs = Scenario(**fields).step_costs()
    assert costs.name == "roofline"
    assert "Measured operations do not cover it: " in sentence(costs.expected_error())
    assert f"No shipped calibration fits ({FITS} is " in sentence(costs.expected_error())


def test_the_shipped_calibrations_are_read_once(monkeypatch):
    """A study asks for its costs at every replay."""
    first = Scenario().step_costs()

    def read_again(*_):
        raise AssertionError("read again")

    monkeypatch.setattr(file, "read_json", read_again)
    assert Scenario(max_num_seqs=9).step_costs().name == first.name
    assert Scenario(costs=FITS).step_costs().name == FITS


def test_an_engine_without_a_calibration_is_not_given_another_engines():
    costs = Scenario(engine="nano-vllm", gpu="L4").step_costs()
    assert costs.name == "roofline"
