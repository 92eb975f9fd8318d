"""A calibration's file and the costs it gives: what they refuse, and that they are what was fitted."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.choose import choose, costs_for
from pagecast.sim.costs.calibration.draw import _heavy, _heavy_95
from pagecast.sim.costs.calibration.file import Calibration, load, shipped
from pagecast.sim.costs.calibration.misfit import difference
from pagecast.sim.costs.calibration.target import Target
from pagecast.sim.fitting.build import CalibrationRun, calibrate
from pagecast.sim.fitting.features import step_table
from pagecast.sim.fitting.fit import Fit
from pagecast.sim.machine.gpus import gpu
from pagecast.sim.machine.models import model
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.scenario import Scenario

VLLM = "vllm-0.24-h200-qwen3-8b"
RUNS = "groundtruth/vllm-0.24.0-h200-qwen3-8b"
SHAPE = {"kv_heads": 8, "group": 4, "sms": 132, "graph_sizes": [1], "prompt_sizes": [1]}


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return load(VLLM)


def test_written_and_read_again_a_calibration_is_the_same(calibration, tmp_path):
    assert Calibration.load(calibration.save(tmp_path / "a.json")) == calibration


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 7}, "version 7 of the calibration format; this pagecast reads 2"),
        ({"kind": "something"}, "not a calibration"),
        ({"knots": [1, 2]}, "'knots' and 'curve_ns' don't fit together"),
        ({"host": {"step_ns": 1.0}}, "field missing or of the wrong kind"),
        ({"terms_ns": {"kv_token": float("nan")}, "replicates": []}, "NaN"),
        ({"terms_ns": {"kv_token": -1.0}, "replicates": []}, "term kv_token is -1, must be from 0"),
        ({"format": 1}, "version 1 of the calibration format; this pagecast reads 2: calibrate again"),
        (
            {"shape": {"family": "abacus", **SHAPE}},
            "shape: no kernel family 'abacus': this pagecast knows flash",
        ),
        ({"terms_ns": {"magic": 1.0}, "replicates": []}, "'magic' is not known"),
        ({"replicates": [[1.0]]}, "'replicates' need"),
    ],
)
def test_a_file_that_can_not_be_used_says_why_in_one_line(calibration, tmp_path, change, words):
    path = calibration.save(tmp_path / "a.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BadInput, match=words) as caught:
        Calibration.load(path)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_no_calibration_is_answered_with_those_there_are(tmp_path):
    with pytest.raises(BadInput, match=VLLM):
        load("vllm-9")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(BadInput, match="not valid JSON"):
        load(str(tmp_path / "text.json"))


def test_every_shipped_calibration_loads_and_says_what_error_to_expect():
    assert VLLM in shipped()
    for name in shipped():
        text = sentence(CalibratedCosts(load(name)).expected_error())
        assert text.endswith(".")
        assert "None" not in text
        assert "?" not in text


def test_the_error_said_is_that_of_a_run_left_out_and_not_the_fits_own(calibration):
    note = CalibratedCosts(calibration).expected_error()
    left_out = [row for row in calibration.cross_validation if row["steps of"] == "all"]
    worst = max(abs(row["error_percent"]) for row in left_out)
    assert worst > 2
    assert note.figures["left_out"]["recording"][0] == worst
    assert f"was left out of the fit, total step time was off by up to {worst:.1f}%" in sentence(note)
    assert "a change of 1% in step time can change TTFT by 20%" in sentence(note)
    alone = CalibratedCosts(replace(calibration, cross_validation=[])).expected_error()
    assert not alone.figures["left_out"]
    assert "No run was left out of the fit" in sentence(alone)
    segment = {**left_out[0], "run": "decode-sync", "left out": "segment", "error_percent": -9.5}
    both = CalibratedCosts(replace(calibration, cross_validation=[*left_out, segment])).expected_error()
    assert both.figures["left_out"]["recording"][0] == worst
    assert both.figures["left_out"]["segment"][0] == 9.5
    assert "For a segment of the sweep that was left out of the fit" in sentence(both)


def test_what_was_not_fitted_is_named_and_what_was_is_not(calibration):
    costs = CalibratedCosts(calibration)
    assert costs.outside(16_406, 8192, 256, 16) is None
    for reached, words in (
        ((100_000, 8192, 256, 16), "contexts of up to 100,000 tokens (fitted: 16,406 in decode, 65,536 in"),
        ((4096, 65_536, 256, 16), "steps of up to 65,536 tokens (fitted: 8,192)"),
        ((4096, 8192, 1024, 16), "1,024 requests in a step (fitted: 256)"),
        ((4096, 8192, 256, 4096), "a block size of 4,096 (fitted: 16)"),
    ):
        text = sentence(costs.outside(*reached))
        assert words in text
        assert text.count("fitted:") == 1 and "\n" not in text
    # A file of before ranges were kept says what it knows.
    bare = CalibratedCosts(replace(calibration, fitted={}))
    assert "steps of up to 65,536 tokens" in sentence(bare.outside(100_000, 65_536, 1024, 16))
    assert Target(model("Qwen/Qwen3-8B"), gpu("H200")).roofline().outside(100_000, 65_536, 1024, 1) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_cache_dtype": "fp8"}, "for a KV cache in bfloat16, not fp8"),
        ({"gpu": gpu("B200")}, "for NVIDIA H200, not B200"),
        ({"model": model("Qwen/Qwen3-4B")}, "for Qwen/Qwen3-8B, not Qwen/Qwen3-4B"),
        ({"engine": "nano-vllm"}, "for engine vllm, not nano-vllm"),
    ],
)
def test_falling_back_to_the_roofline_says_why(change, words):
    target = replace(Target(model("Qwen/Qwen3-8B"), gpu("H200")), **change)
    text = sentence(choose("auto", target).expected_error())
    assert "No shipped calibration fits (" in text
    assert f"{VLLM} is {words}" in text
    assert "No shipped" not in sentence(choose("roofline", target).expected_error())


def test_another_model_gpu_or_sharding_is_refused(calibration):
    qwen, h200 = model("Qwen/Qwen3-8B"), gpu("H200")
    assert difference(calibration, Target(qwen, h200)) is None
    for target, words in (
        (Target(model("Qwen/Qwen3-0.6B"), h200), "for Qwen/Qwen3-8B, not Qwen/Qwen3-0.6B"),
        (Target(qwen, gpu("H100")), "for NVIDIA H200, not H100 SXM"),
        (Target(qwen, h200, tensor_parallel_size=2), "for 1 GPU a replica, not 2"),
        (Target(qwen, h200, kv_cache_dtype="fp8"), "for a KV cache in bfloat16, not fp8"),
    ):
        with pytest.raises(BadInput, match=f"{words}: .* give --costs measured or auto"):
            costs_for(calibration, target)


def test_what_fits_is_chosen_and_first_principles_where_nothing_does():
    here = Target(model("Qwen/Qwen3-8B"), gpu("H200"))
    assert choose("auto", here).name == VLLM
    assert choose("roofline", here).name == "roofline"
    assert choose(VLLM, here).name == VLLM
    assert choose("auto", Target(model("Qwen/Qwen3-8B"), gpu("H100"))).name == "vllm-0.24-h100-qwen3-8b"
    assert choose("auto", Target(model("Qwen/Qwen3-8B"), gpu("B200"))).name == "measured"
    assert choose("auto", Target(model("Qwen/Qwen3-8B"), gpu("L4"))).name == "roofline"
    assert choose("auto", replace(here, engine="another")).name == "roofline"
    assert choose("auto", replace(here, engine="pagecast")).name == "pagecast-h200-qwen3-8b"
    own = Scenario(engine="pagecast", model="Qwen/Qwen3-0.6B")
    assert own.step_costs().name == "pagecast-h200-qwen3-0.6b"
    assert Scenario().step_costs().name == VLLM
    with pytest.raises(BadInput, match="not H100"):
        choose(VLLM, Target(model("Qwen/Qwen3-8B"), gpu("H100")))


def test_a_step_with_prompts_right_after_another_takes_longer(calibration):
    costs = CalibratedCosts(calibration)
    rested, hot = (costs.device_ns(Batch(4, 4000, 1500, ((2000, 0),), after)) for after in (0, 4000))
    assert 1.01 < hot / rested < 1.2
    assert costs.device_ns(Batch(4, 4000, 1500, ((2000, 0),), 100)) < hot


def test_planning_ahead_hides_the_host_and_the_launch_of_prompts(calibration):
    plain, ahead = CalibratedCosts(calibration), CalibratedCosts(calibration, pipeline_depth=1)
    small, large = Batch(4, 4000, 1500, ((30, 0),)), Batch(4, 4000, 1500, ((8000, 0),))
    assert plain.decode_line(8).ns(8000, 2000) == ahead.decode_line(8).ns(8000, 2000)
    assert ahead.device_ns(small) < plain.device_ns(small)
    assert ahead.device_ns(large) > plain.device_ns(large)


@pytest.mark.parametrize("name", ["azure_conv_repeat3", "mooncake_conv", "azure_priority_tight"])
def test_costs_are_what_was_fitted_step_by_step(shared, calibration, name):
    run = RecordedRun.load(shared / RUNS / name)
    table = step_table(run, calibration.shape)
    fit = Fit(calibration.knots, np.array(calibration.curve_ns), calibration.terms_ns, (), (), (1.0,), 0.0)
    expected = fit.predict(table, calibration.shape)
    costs = CalibratedCosts(calibration)
    for row in range(0, len(table), 11):
        batch = run.steps.batch(int(table.index[row]))
        if batch.prefill:
            ns = costs.device_ns(batch)
        else:
            ns = costs.decode_line(batch.decode_n).ns(batch.decode_ctx, batch.decode_max)
        ns += costs.host_ns(batch.decode_n + len(batch.prefill))
        ns += round(fit.terms.get("arrival", 0.0) * table.arrivals[row])
        ns += round(fit.terms.get("arriving_token", 0.0) * table.arrived_tokens[row])
        # Blocks of even contexts are counted whole in the fit, on average in a line that is to be summed.
        n, ctx, longest, prefill, _ = batch
        even = not prefill and longest * n - ctx < 64 * n
        assert ns == pytest.approx(expected[row], rel=0.02 if even else 1e-3), batch


@pytest.fixture(scope="module")
def vllm_runs(shared) -> dict[str, RecordedRun]:
    names = ("sweep", "azure_conv", "azure_conv_repeat2", "azure_conv_repeat3", "azure_priority_tight")
    return {name: RecordedRun.load(shared / RUNS / name) for name in (*names, "mooncake_conv")}


def test_the_shipped_vllm_costs_are_fitted_from_two_runs_alone(vllm_runs, calibration):
    sources = [CalibrationRun(vllm_runs["sweep"]), CalibrationRun(vllm_runs["azure_conv_repeat2"])]
    again = calibrate(sources, VLLM, replicates=0)
    assert again.curve_ns == pytest.approx(calibration.curve_ns, rel=1e-4)
    assert again.terms_ns == pytest.approx(calibration.terms_ns, rel=1e-4)
    assert again.fitted == calibration.fitted
    assert asdict(again.noise) == pytest.approx(asdict(calibration.noise), rel=1e-4)


NOT_FITTED = ("azure_conv", "azure_conv_repeat3", "mooncake_conv", "azure_priority_tight")


@pytest.mark.parametrize("name", NOT_FITTED)
def test_step_times_of_runs_not_fitted_are_within_one_percent_in_all_and_two_by_kind(
    vllm_runs, calibration, name
):
    table = step_table(vllm_runs[name], calibration.shape)
    fit = Fit(calibration.knots, np.array(calibration.curve_ns), calibration.terms_ns, (), (), (1.0,), 0.0)
    expected = fit.predict(table, calibration.shape)

    def error(rows):
        return expected[rows].sum() / table.ns[rows].sum() - 1

    assert abs(error(np.ones(len(table), bool))) < 0.01
    assert abs(error(~table.mixed)) < 0.02
    assert abs(error(table.mixed)) < 0.02


@pytest.mark.parametrize("freedom", [1, 2, 3.5, 7, 40, 1000, math.inf])
def test_the_quantile_behind_a_half_width_is_students(freedom: float) -> None:
    assert _heavy_95(freedom) == pytest.approx(_heavy(0.95, freedom), rel=1e-5)
