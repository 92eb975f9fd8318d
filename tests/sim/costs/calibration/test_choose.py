"""Step costs chosen by a scenario's names, and the notes on them."""

import pytest
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration import file
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

FITS = "vllm-0.24-h200-qwen3-8b"


def test_auto_takes_what_fits_whether_or_not_others_might_be_carried_over():
    for transfer in (False, True):
        assert Scenario(transfer_costs=transfer).step_costs().name == FITS


@pytest.mark.parametrize(
    "fields", [{"gpu": "L40S"}, {"model": "Qwen/Qwen3-0.6B"}, {"tensor_parallel_size": 2}]
)
def test_without_a_calibration_auto_takes_measured_operations(fields):
    costs = Scenario(**fields).step_costs()
    assert costs.name == "measured"
    text = sentence(costs.expected_error())
    assert text.startswith("On runs of vLLM") and "No shipped calibration fits (" in text
    assert "operations that NVIDIA measured with vllm 0.24.0 on" in text


def test_the_name_of_measured_costs_can_be_given_and_says_what_is_missing():
    assert Scenario(costs="measured").step_costs().name == "measured"
    with pytest.raises(BadInput, match="not measured on L4, but on A100 80GB, B200"):
        Scenario(costs="measured", gpu="L4").step_costs()


@pytest.mark.parametrize("fields", [{"gpu": "L4"}, {"gpu": "A100 40GB"}, {"model": "Qwen/Qwen3-8B-AWQ"}])
def test_auto_carries_the_nearest_over_only_when_asked(fields):
    plain, carried = (Scenario(transfer_costs=transfer, **fields).step_costs() for transfer in (False, True))
    assert plain.name == "roofline"
    assert "Measured operations do not cover it: " in sentence(plain.expected_error())
    assert "No shipped calibration fits (" in sentence(plain.expected_error())
    assert "--transfer-costs would transfer the nearest one." in sentence(plain.expected_error())
    assert carried.name == f"{FITS}, transferred"
    assert carried.expected_error().code == "transferred_costs"
    assert carried.expected_error().figures["origin"] == "Qwen/Qwen3-8B on NVIDIA H200"


def test_the_nearest_is_the_model_then_the_gpu_then_the_weight():
    own = {"engine": "pagecast", "transfer_costs": True}
    assert (
        Scenario(gpu="L40S", model="Qwen/Qwen3-0.6B", **own)
        .step_costs()
        .name.startswith("pagecast-h200-qwen3-0.6b")
    )
    assert Scenario(model="Qwen/Qwen3-14B", **own).step_costs().name.startswith("pagecast-h200-qwen3-8b")


def test_the_shipped_calibrations_are_read_once(monkeypatch):
    """A study asks for its costs at every replay."""
    first = Scenario().step_costs()

    def read_again(*_):
        raise AssertionError("read again")

    monkeypatch.setattr(file, "read_json", read_again)
    assert Scenario(max_num_seqs=9).step_costs().name == first.name
    assert Scenario(costs=FITS).step_costs().name == FITS


def test_an_engine_without_a_calibration_is_not_given_another_engines():
    costs = Scenario(profile="nano-vllm", gpu="L4", transfer_costs=True).step_costs()
    assert costs.name == "roofline"
    assert not costs.expected_error().figures["transferable"]
    assert "--transfer-costs" not in sentence(costs.expected_error())


def test_a_replay_with_carried_costs_can_be_repeated_from_its_folder(tmp_path):
    scenario = Scenario(gpu="L40S", transfer_costs=True)
    was = replay(read("chat", limit=30), scenario, out=tmp_path / "run")
    saved = Scenario.load(tmp_path / "run" / "scenario.yaml")
    again = replay(read("chat", limit=30), saved)
    assert again.summary["costs"] == was.summary["costs"]
    assert again.summary["e2e_s"] == was.summary["e2e_s"]
    with pytest.raises(BadInput, match="--transfer-costs"):
        saved.changed(transfer_costs=False).step_costs()
