"""The fit: finds costs that are known, says what it can't tell, and keeps totals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.calibration.curve import curve_weights
from pagecast.sim.costs.calibration.draw import Drawn
from pagecast.sim.costs.calibration.file import Calibration, Noise
from pagecast.sim.costs.calibration.shape import shape_of
from pagecast.sim.fitting import features, selection
from pagecast.sim.fitting.build import CalibrationRun, calibrate
from pagecast.sim.fitting.features import step_table
from pagecast.sim.fitting.fit import Fit, fit
from pagecast.sim.fitting.left_out import left_out
from pagecast.sim.fitting.monotone import solved
from pagecast.sim.fitting.noise import noise_of
from pagecast.sim.fitting.sweep import joined
from pagecast.sim.runs.recorded import RecordedRun, Steps

META = {
    "engine": "vllm",
    "engine_version": "0.24.0",
    "gpu": "NVIDIA H200",
    "usable_blocks": 1000,
    "model": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "dtype": "bfloat16",
    },
    "config": {"max_num_seqs": 256, "cuda_graphs": "full", "attention": "FlashAttention 3"},
}
SHAPE = shape_of(META, "meta.json")
TRUTH = Fit(
    knots=(1, 256, 8192),
    curve=np.array([5.5e6, 8e6, 170e6]),
    terms={"request": 15_000.0, "prompt_step": 900_000.0, "kv_token": 34.0, "prompt_tile": 60_000.0},
    dropped=(),
    absent=(),
    scales=(1.0,),
    sd=0.0,
)


def made_run(
    count: int,
    seed: int,
    noise: float = 0.0,
    scale: float = 1.0,
    prompts: float = 1.0,
    truth: Fit = TRUTH,
) -> RecordedRun:
    """A run of random shapes, each step taking what `truth` says, times noise (`prompts`: with prompts)."""
    random = np.random.default_rng(seed)
    n = random.integers(1, 257, count)
    mean = random.integers(100, 4000, count)
    ctx, longest = n * mean, (mean * random.uniform(1, 3, count)).astype(np.int64) + 64
    chunks = np.where(random.uniform(size=count) < 0.4, 1, 0)
    start = np.concatenate([[0], np.cumsum(chunks)])
    tokens = random.integers(1, 7000, start[-1])
    context = random.integers(0, 8000, start[-1])
    empty, zero = np.zeros(count), np.zeros(count, np.int64)

    def steps(begin, end):
        return Steps(begin, end, zero, n, ctx, longest, n, zero, empty, start, tokens, context, zero, ("",))

    first = steps(np.arange(count), np.arange(count))
    run = RecordedRun("made", Path("made"), META, first, pd.DataFrame(), pd.DataFrame())
    table = step_table(run, SHAPE)
    ns = truth.predict(table, SHAPE) * scale * np.exp(noise * random.standard_normal(len(table)))
    ns = np.where(table.mixed, prompts * ns, ns)
    begin = np.concatenate([[0], np.cumsum(ns)]).astype(np.int64)
    whole = steps(begin, np.append(begin[1:], begin[-1] + 1))
    return RecordedRun("made", Path("made"), META, whole, pd.DataFrame(), pd.DataFrame())


def test_costs_that_are_known_are_found_again():
    table = step_table(made_run(3000, 1, noise=0.02), SHAPE)
    result = fit([table], SHAPE)
    fresh = step_table(made_run(500, 2), SHAPE)
    assert np.abs(result.predict(fresh, SHAPE) / fresh.ns - 1).mean() < 0.01
    assert result.terms["kv_token"] == pytest.approx(34.0, rel=0.05)
    assert result.terms["prompt_tile"] == pytest.approx(60_000.0, rel=0.05)
    assert all(value >= 0 for value in [*result.terms.values(), *result.curve])


@pytest.mark.parametrize("seed", range(1, 5))
def test_the_choice_of_terms_does_not_depend_on_rounding(seed, monkeypatch):
    table = step_table(made_run(1500, seed), SHAPE)
    errors = selection._errors
    chosen = set()
    for number in range(6):
        random = np.random.default_rng(number)

        def rounded(*given, random=random):
            return errors(*given) * (1 + 1e-10 * random.standard_normal(2))

        monkeypatch.setattr(selection, "_errors", rounded)
        chosen.add(tuple(fit([table], SHAPE).terms))
    assert len(chosen) == 1


@pytest.mark.parametrize("seed", range(8))
def test_a_column_that_is_in_no_row_has_no_coefficient(seed):
    random = np.random.default_rng(seed)
    matrix = random.uniform(size=(200, 6))
    truth = np.array([3.0, 0.0, 2.0, 5.0, 0.0, 1.0])
    unseen = matrix.copy()
    unseen[:, 4] = 0.0
    solution = solved(unseen.T @ unseen, unseen.T @ (matrix @ truth))
    assert solution == pytest.approx(truth, abs=1e-4)
    assert solution[4] == 0.0


def test_the_result_lies_between_runs_that_differ_as_a_whole():
    slow = step_table(made_run(400, 3, 0.01, 1.02), SHAPE)
    fast = step_table(made_run(4000, 4, 0.01, 0.98), SHAPE)
    result = fit([slow, fast], SHAPE)
    plain = step_table(made_run(500, 5), SHAPE)
    level = result.predict(plain, SHAPE).sum() / plain.ns.sum()
    assert level == pytest.approx(1.0, abs=0.006)
    assert result.scales[0] / result.scales[1] == pytest.approx(1.04, abs=0.012)


def test_rare_pauses_bend_no_term_but_are_in_the_total():
    table = step_table(made_run(3000, 6, noise=0.01), SHAPE)
    rows = np.arange(0, len(table), 150)
    paused = table.ns.copy()
    paused[rows] += 30e6
    table = features.StepTable(**{**vars(table), "ns": paused})
    result = fit([table], SHAPE)
    assert result.predict(table, SHAPE).sum() == pytest.approx(paused.sum(), rel=0.003)
    assert result.terms["kv_token"] == pytest.approx(34.0, rel=0.05)


def test_a_negative_seed_is_refused_by_name():
    with pytest.raises(BadInput, match="seed is -1; it must be at least 0"):
        calibrate([CalibrationRun(made_run(500, 5))], "made", replicates=2, seed=-1)


def test_terms_that_nothing_depends_on_are_dropped():
    run = made_run(2000, 7, noise=0.01)
    # Nothing in these steps depends on their tokens after prompts, or on whether a graph holds them.
    made = calibrate([CalibrationRun(run)], "made", replicates=16)
    assert {"token_after_prompts", "ungraphed_step"} <= {*made.provenance["dropped_terms"]}
    assert {"request", "prompt_step", "kv_token", "prompt_tile"} == {*made.terms_ns}
    assert "arrival" in made.provenance["absent_terms"]
    table = step_table(run, SHAPE)
    assert Fit.of(made).predict(table, SHAPE).sum() == pytest.approx(table.ns.sum(), rel=0.003)


def test_the_curve_never_falls():
    run = made_run(2000, 17, noise=0.05)
    assert (np.diff(fit([step_table(run, SHAPE)], SHAPE).curve) >= 0).all()


def test_a_term_that_copies_of_the_fit_do_not_agree_on_is_dropped():
    truth = replace(TRUTH, terms={**TRUTH.terms, "token_after_prompts": 900.0})
    made = calibrate([CalibrationRun(made_run(900, 18, noise=0.15, truth=truth))], "made", replicates=16)
    spread = np.array(made.replicates)[:, len(made.knots) :]
    needed = {"request", "kv_token", "prompt_tile"}
    for name, share in zip(made.terms_ns, spread.std(axis=0) / spread.mean(axis=0), strict=True):
        assert name in needed or share <= 0.3


def test_too_few_steps_for_the_terms_is_one_line():
    with pytest.raises(BadInput, match=r"^\d+ steps are too few for \d+ terms: record at least \d+$"):
        fit([step_table(made_run(20, 8), SHAPE)], SHAPE)


def test_calibrating_reports_noise_regions_and_cross_validation():
    sources = [CalibrationRun(made_run(1500, seed, 0.03)) for seed in (9, 10)]
    made = calibrate(sources, "made", replicates=4)
    assert made.noise.decode_sd == pytest.approx(0.03, rel=0.2)
    assert {row["region"] for row in made.regions} >= {"all steps", "pure decode", "with prompts"}
    assert all(abs(row["error_percent"]) < 1.5 for row in made.cross_validation)
    assert len(made.cross_validation) == 6
    assert len(made.replicates) == 4
    assert len(set(made.replicates)) == 4


def sweep_of(*runs: RecordedRun) -> RecordedRun:
    """The runs as segments "a", "b" ... of one recording called "sweep"."""
    named = [
        replace(run, meta={**META, "sweep": {"segment": name}})
        for run, name in zip(runs, "abc", strict=False)
    ]
    return joined(named, Path("sweep"), "sweep")


def test_equal_names_are_told_apart_and_twins_of_a_segment_leave_the_fit_with_it():
    first = sweep_of(made_run(800, 30), made_run(800, 31), made_run(800, 32))
    odd = made_run(800, 33, prompts=1.5)
    second = sweep_of(made_run(800, 34), made_run(800, 35), odd)
    third = sweep_of(made_run(800, 36), made_run(800, 37), odd)
    errors = left_out([step_table(run, SHAPE) for run in (first, second, third)], SHAPE)
    rows = {(part.name, part.what): part.rows() for part in errors}
    recordings = [f"sweep {i}" for i in (1, 2, 3)]
    assert [name for name, what in rows if what == "recording"] == recordings
    assert {name for name, what in rows if what == "segment"} == {
        f"{segment} of {sweep}" for sweep in recordings for segment in "abc"
    }
    # Segment c is slow in two recordings. Left out of both, neither foretells the other.
    slow = next(row for row in rows["c of sweep 2", "segment"] if row["steps of"] == "with prompts")
    assert slow["error_percent"] == pytest.approx(100 / 1.5 - 100, abs=2)
    made = calibrate([CalibrationRun(first), CalibrationRun(second)], "made", replicates=0)
    assert [run["run"] for run in made.provenance["runs"]] == ["sweep 1", "sweep 2"]
    assert {row["left out"] for row in made.cross_validation} == {"recording", "segment"}


def noise_of_runs(*runs: RecordedRun) -> Noise:
    return calibrate([CalibrationRun(run) for run in runs], "made", replicates=0).noise


def test_noise_between_runs_is_that_of_whole_runs_and_of_their_kinds_of_step():
    alike = noise_of_runs(*(made_run(3000, seed, 0.02) for seed in (20, 21)))
    whole = noise_of_runs(*(made_run(3000, seed, 0.02, scale) for seed, scale in ((20, 1.03), (21, 0.97))))
    kinds = noise_of_runs(made_run(3000, 20, 0.02, prompts=1.03), made_run(3000, 21, 0.02, prompts=0.97))
    single = noise_of_runs(made_run(3000, 20, 0.02))
    # Runs that are alike make the spread known of repeated recordings smaller, not nothing.
    assert 0.003 < alike.run_sd < 0.006 < whole.run_sd
    # Totals 6% apart and kinds alike, or the other way about: two degrees of freedom beside the prior's four.
    middle = (0.06**2 / 2 / 2 * 2 + 0.006**2 * 4) ** 0.5 / 6**0.5
    assert whole.run_sd == pytest.approx(middle, rel=0.15)
    assert kinds.run_sd > 0.01
    assert single.level_sd > 1.2 * alike.level_sd
    # One recording leaves nothing but the prior, whose two degrees of freedom ask for wide tails.
    assert single.freedom == pytest.approx(4) and alike.freedom > single.freedom


def test_a_load_that_the_terms_do_not_explain_widens_what_is_expected_of_another():
    plain = noise_of_runs(*(sweep_of(*(made_run(1200, 10 * i + j, 0.01) for j in range(3))) for i in (4, 5)))
    odd = [
        sweep_of(*(made_run(1200, 10 * i + j, 0.01, scale) for j, scale in enumerate((0.94, 1.0, 1.06))))
        for i in (4, 5)
    ]
    strange = noise_of_runs(*odd)
    assert plain.model_sd < 0.004
    assert 0.03 < strange.model_sd < 0.1
    assert strange.total_sd > 3 * plain.total_sd
    assert strange.run_sd == pytest.approx(plain.run_sd, rel=0.5)


def test_few_runs_make_heavy_tails_and_a_total_like_the_fitted_is_split_between_kinds():
    made = calibrate([CalibrationRun(made_run(1500, 22, 0.02))], "made", replicates=0)
    many = replace(made, noise=replace(made.noise, freedom=1e9, kind_freedom=1e9))

    def spread(source: Calibration) -> np.ndarray:
        decode = [np.log(Drawn(source, i).decode_line(64).ns(64_000, 1500)) for i in range(400)]
        return np.percentile(decode, 95) - np.percentile(decode, 5)

    assert spread(made) > 1.2 * spread(many)  # 2.13 against 1.64 at four degrees of freedom
    quiet = replace(many, noise=replace(many.noise, prompt_sd=1e-9, prompt_share=0.5))
    prompts = np.log([Drawn(quiet, i).device_ns(Batch(0, 0, 0, ((4096, 0),))) for i in range(400)])
    decode = np.log([Drawn(quiet, i).decode_line(64).ns(64_000, 1500) for i in range(400)])
    assert np.std((prompts + decode) / 2) == pytest.approx(quiet.noise.total_sd, rel=0.1)
    assert np.std(prompts - decode) == pytest.approx(quiet.noise.kind_sd, rel=0.15)


def test_steps_with_prompts_stray_like_those_before_them_in_draws_as_in_runs():
    table = step_table(made_run(4000, 23), SHAPE)
    random, like = np.random.default_rng(0), 0.8
    strays = [0.0]
    for value in random.standard_normal(len(table) - 1):
        strays.append(like * strays[-1] + (1 - like**2) ** 0.5 * value)
    rows = np.flatnonzero(table.mixed)
    ns = table.ns.copy()
    ns[rows] *= np.exp(0.04 * np.array(strays)[: len(rows)])
    noisy = replace(table, ns=ns)
    noise = noise_of([noisy], fit([noisy], SHAPE), SHAPE, [])
    assert noise.correlation == pytest.approx(like, abs=0.1)
    made = calibrate([CalibrationRun(made_run(1500, 24))], "made", replicates=0)
    drawn = Drawn(replace(made, noise=replace(noise, run_sd=0.0, level_sd=0.0, kind_sd=0.0)), 1)
    batch = Batch(0, 0, 0, ((4096, 0),))
    steps = np.log([drawn.device_ns(batch) for _ in range(5000)])
    assert np.corrcoef(steps[1:], steps[:-1])[0, 1] == pytest.approx(like, abs=0.1)
    assert np.std(steps) == pytest.approx(0.04, rel=0.25)


def test_runs_of_different_set_ups_are_not_mixed():
    run = made_run(600, 11)
    other = replace(run, meta={**META, "gpu": "NVIDIA A100 80GB"})
    with pytest.raises(BadInput, match="gpu is 'NVIDIA A100 80GB'"):
        calibrate([CalibrationRun(run), CalibrationRun(other)], "x")
    ahead = replace(run, meta={**META, "config": {**META["config"], "async_scheduling": True}})
    with pytest.raises(BadInput, match="no run with synchronous scheduling"):
        calibrate([CalibrationRun(ahead)], "x")


def test_the_curve_is_exact_at_knots_and_goes_on_straight_beyond_the_last():
    weights = curve_weights(np.array([1.0, 128.5, 256.0, 16128.0]), (1, 256, 8192))
    values = weights @ np.array([5.0, 10.0, 50.0])
    assert values == pytest.approx([5.0, 7.5, 10.0, 90.0])
