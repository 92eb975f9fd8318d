"""Costs of the engine's own steps: small ones are padded to CUDA graphs, others launched kernel by kernel."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.kernels.prefill_plan import plan_prefill
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.choose import costs_for
from pagecast.sim.costs.calibration.file import MEASURED, Calibration
from pagecast.sim.costs.calibration.shape import shape_of
from pagecast.sim.costs.calibration.target import Target
from pagecast.sim.costs.families.attention_tiles import BLOCK
from pagecast.sim.costs.families.paged_triton import first_tokens, prompt_span
from pagecast.sim.fitting.ahead import ahead_of
from pagecast.sim.fitting.build import CalibrationRun, calibrate
from pagecast.sim.fitting.features import launched_singly, step_table
from pagecast.sim.fitting.fit import Fit, fit
from pagecast.sim.machine.gpus import gpu
from pagecast.sim.machine.models import model
from pagecast.sim.runs.recorded import RecordedRun, Steps

RECORDED = Path(__file__).parents[2] / "engine" / "recorded"
META = {
    "engine": "pagecast",
    "engine_version": "0.1.0",
    "gpu": "NVIDIA H200",
    "usable_blocks": 1000,
    "model": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "dtype": "bfloat16",
    },
    "config": {"attention": "triton", "cuda_graph_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]},
}
SHAPE = shape_of(META, "meta.json")
PROMPT_GRAPHS = {**META["config"], "prompt_graph_sizes": [64, 256, 512]}
TRUTH = Fit(
    knots=(1, 256, 8192),
    curve=np.array([4.5e6, 6e6, 170e6]),
    terms={"request": 10_000.0, "kv_token": 34.0, "prompt_tile": 60_000.0, "launch_floor": 9e6},
    dropped=(),
    absent=(),
    scales=(1.0,),
    sd=0.0,
)


def made_run(count: int, seed: int, truth: Fit = TRUTH, **changes: object) -> RecordedRun:
    """A synchronous run of random shapes, many with few prompt tokens, that takes what `truth` says."""
    random = np.random.default_rng(seed)
    n = random.integers(1, 200, count)
    ctx = n * random.integers(50, 4000, count)
    start = np.concatenate([[0], np.cumsum(random.uniform(size=count) < 0.5)])
    tokens = np.exp(random.uniform(np.log(2), np.log(8000), start[-1])).astype(np.int64)
    context = np.where(random.uniform(size=start[-1]) < 0.5, 0, random.integers(0, 39_000, start[-1]))
    zero, longest, none = np.zeros(count, np.int64), ctx // n + 64, np.zeros(count)
    shape = shape_of({**META, **changes}, "meta.json")

    def run_of(begin: np.ndarray, end: np.ndarray) -> RecordedRun:
        steps = Steps(begin, end, zero, n, ctx, longest, n, zero, none, start, tokens, context, zero, ("",))
        return RecordedRun("made", Path("made"), {**META, **changes}, steps, pd.DataFrame(), pd.DataFrame())

    table = step_table(run_of(np.arange(count), np.arange(count)), shape)
    ns = truth.predict(table, shape) * np.exp(0.01 * random.standard_normal(len(table)))
    begin = np.concatenate([[0], np.cumsum(ns)]).astype(np.int64)
    return run_of(begin, np.append(begin[1:], begin[-1] + 1))


@pytest.mark.parametrize("floor_ns", [0.0, 9e6, 30e6])
def test_the_least_that_launching_a_step_takes_is_told_from_what_its_device_does(floor_ns):
    truth = replace(TRUTH, terms={**TRUTH.terms, "launch_floor": floor_ns})
    result = fit([step_table(made_run(3000, 1, truth), SHAPE)], SHAPE)
    if floor_ns:
        assert result.terms["launch_floor"] == pytest.approx(floor_ns, rel=0.02)
    assert result.terms["prompt_tile"] == pytest.approx(60_000.0, rel=0.05)
    fresh = step_table(made_run(1000, 2, truth), SHAPE)
    ratio = result.predict(fresh, SHAPE) / fresh.ns
    assert abs(ratio.mean() - 1) < 0.004
    small = fresh.mixed & (fresh.tokens < 256)
    assert abs(ratio[small].mean() - 1) < 0.01


def test_costs_without_an_asynchronous_run_say_so_where_steps_are_planned_ahead():
    made = calibrate([CalibrationRun(made_run(1000, 10))], "own", replicates=0)
    assert CalibratedCosts(made, pipeline_depth=1).expected_error().figures["not_ahead"]
    assert not CalibratedCosts(made).expected_error().figures["not_ahead"]


@pytest.mark.parametrize("config", [META["config"], PROMPT_GRAPHS], ids=["launched", "graphs"])
def test_costs_are_what_was_fitted(config):
    truth = replace(TRUTH, terms={**TRUTH.terms, "prompt_step": 0.7e6})
    run = made_run(2000, 3, truth, config=config)
    made = calibrate([CalibrationRun(run)], "own", replicates=2)
    table = step_table(run, made.shape)
    fitted = Fit.of(made).predict(table, made.shape)
    costs = CalibratedCosts(made)
    for i in np.flatnonzero(table.column("decode_after_prompts") == 0)[::5]:
        batch = run.steps.batch(int(table.index[i]))
        rows = batch.decode_n + len(batch.prefill)
        line = costs.decode_line(batch.decode_n)
        took = line.ns(batch.decode_ctx, batch.decode_max)
        if batch.prefill:
            took = max(costs.device_ns(batch), costs.launch_ns(batch))
        assert took + costs.host_ns(rows) == pytest.approx(fitted[i], rel=1e-4)


def test_steps_with_prompts_are_padded_to_graphs_of_their_own_and_wait_for_no_launches(tmp_path):
    truth = replace(TRUTH, terms={**TRUTH.terms, "prompt_step": 0.7e6, "launch_floor": 30e6})
    made = calibrate([CalibrationRun(made_run(3000, 8, truth, config=PROMPT_GRAPHS))], "own", replicates=0)
    assert made.terms_ns["prompt_step"] == pytest.approx(0.7e6, rel=0.15)
    made.save(tmp_path / "made.json")
    costs = CalibratedCosts(Calibration.load(tmp_path / "made.json"))
    alike = [Batch(8, 8000, 1000, ((tokens, 0),)) for tokens in (60, 240)]
    assert costs.device_ns(alike[0]) == pytest.approx(costs.device_ns(alike[1]), rel=0.02)
    assert [costs.launch_ns(batch) for batch in alike] == [0, 0]
    assert costs.launch_ns(Batch(8, 8000, 1000, ((505, 0),))) == pytest.approx(30e6, rel=0.02)


def test_decode_steps_right_after_prompts_cost_more_and_fade():
    truth = replace(TRUTH, terms={**TRUTH.terms, "decode_after_prompts": 11_000.0})
    table = step_table(made_run(4000, 11, truth), SHAPE)
    made = calibrate([CalibrationRun(made_run(4000, 11, truth))], "own", replicates=0)
    assert made.terms_ns["decode_after_prompts"] == pytest.approx(11_000.0, rel=0.15)
    warm = table.column("decode_after_prompts")
    first = np.flatnonzero((warm > 0) & np.append(False, table.mixed[:-1]))
    assert warm[first] == pytest.approx(np.sqrt(table.tokens[first - 1]), rel=0.001)
    # A replay charges the first four steps' worth to the first.
    worth = sum(0.75**k for k in range(4))
    assert CalibratedCosts(made).warm_ns(2500) == pytest.approx(11_000 * 50 * worth, rel=0.15)


def test_what_requests_spare_one_another_by_sharing_context_is_told_from_what_they_read():
    table = step_table(made_run(3000, 9), SHAPE)
    shared = np.where(np.arange(len(table)) % 3, 0.0, table.ctx * (np.arange(len(table)) % 7) / 8)
    units = table.units.copy()
    units[:, table.terms.index("shared_token")] = -shared
    made = replace(table, units=units, ns=table.ns - 12.0 * shared)
    result = fit([made], SHAPE)
    assert result.terms["shared_token"] == pytest.approx(12.0, rel=0.1)
    assert result.terms["kv_token"] == pytest.approx(34.0, rel=0.03)


def test_shared_context_is_counted_from_the_runs_own_decisions():
    run = RecordedRun.load(RECORDED / "h200c-qwen3-8b-chat-sync")
    table = step_table(run, shape_of(run.meta, "meta.json"))
    shared = -table.column("shared_token")
    assert (shared <= table.ctx).all()
    # Its requests begin with one of a few system prompts.
    many = table.n >= 16
    assert 0.1 < (shared[many] / table.ctx[many]).mean() < 0.5
    assert not shared[(table.n == 1) & ~table.mixed].any()


def test_decode_is_padded_to_a_graph_and_a_step_with_prompts_is_not():
    costs = CalibratedCosts(calibrate([CalibrationRun(made_run(2000, 4))], "own", replicates=2))
    padded = [costs.decode_line(n).ns(n * 1000, 1000) for n in (65, 128)]
    request_ns = costs.calibration.terms_ns["request"]
    assert padded[1] - padded[0] < 63 * (request_ns + 1100 * costs.calibration.terms_ns["kv_token"])


def test_what_was_learnt_on_a_cpu_is_refused_for_a_gpu():
    made = calibrate([CalibrationRun(made_run(2000, 5, gpu="CPU"))], "own", replicates=0)
    target = Target(model("Qwen/Qwen3-8B"), gpu("H200"))
    with pytest.raises(BadInput, match="was made on a CPU: no GPU to plan for is one"):
        costs_for(made, target)


@given(st.lists(st.tuples(st.integers(2, 3000), st.integers(0, 40_000)), min_size=1, max_size=6))
def test_the_busiest_sm_is_that_of_the_kernels_own_pieces_dealt_out_in_turn(chunks):
    tokens, _ = zip(*chunks, strict=True)
    lens = [new + cached for new, cached in chunks]
    rows = BLOCK // SHAPE.group
    plan = plan_prefill(tokens, lens, rows, kv_heads=SHAPE.kv_heads, processors=SHAPE.sms)
    pieces = plan[1 : plan[0, 0] + 1, 4:6].tolist()
    work = [-(-(end - begin) // BLOCK) for begin, end in pieces]
    assert work == sorted(work, reverse=True)
    sms = [sum(np.repeat(work, SHAPE.kv_heads)[sm :: SHAPE.sms]) for sm in range(SHAPE.sms)]
    assert prompt_span(SHAPE, chunks) == max(sms)


def test_a_prompt_chunk_of_one_token_costs_what_a_decode_does():
    costs = CalibratedCosts(calibrate([CalibrationRun(made_run(2000, 6))], "own", replicates=0))
    alone = Batch(3, 3000, 1500, ((1, 2000),))
    line = costs.decode_line(4)
    assert costs.launch_ns(alone) == 0
    assert costs.device_ns(alone) == line.ns(5000, 2000)
    assert costs.launch_ns(alone._replace(prefill=((2, 2000),))) > 0


STEP_NS, LAUNCH_NS = 250e3, 4e6  # of the host, in `made_ahead`


def made_ahead(
    count: int,
    seed: int,
    truth: Fit = TRUTH,
    launch_ns: float = LAUNCH_NS,
    hidden_ns: float = 0.0,
    **changes: object,
) -> RecordedRun:
    """The same shapes planned ahead: the device computes them one after another, and the host, which adds
    `STEP_NS` and each request's time to synchronous steps, hears of no end while it launches a step."""
    run = made_run(count, seed, truth, **changes)
    shape = shape_of(run.meta, "meta.json")
    table = step_table(run, shape)
    _, device, _ = replace(truth, curve=truth.curve - STEP_NS).sides(table, shape)
    device = device - hidden_ns * table.mixed
    noise = np.exp(0.002 * np.random.default_rng(seed + 1).standard_normal(len(table)))
    end = np.cumsum(device * noise).astype(np.int64)
    begin = np.concatenate([[0, 1], end[:-2] + 20_000])[: len(end)]
    singly = np.append(launched_singly(table, shape)[1:], False)
    heard = np.where(singly, np.maximum(end, np.append(begin[1:], 0) + int(launch_ns)), end)
    steps, keep = run.steps, len(end)
    config = {**run.meta["config"], "async_scheduling": True}
    starts = steps.prefill_start[: keep + 1]
    whole = ("prefill_start", "prefill_tokens", "prefill_ctx", "sections")
    columns = {name: value if name in whole else value[:keep] for name, value in vars(steps).items()}
    columns |= {"start_ns": begin, "end_ns": heard, "prefill_start": starts}
    columns |= {name: columns[name][: starts[-1]] for name in ("prefill_tokens", "prefill_ctx")}
    return replace(run, folder=Path("ahead"), meta={**run.meta, "config": config}, steps=Steps(**columns))


def test_launches_that_graphs_hide_are_told_from_the_steps_planned_ahead():
    truth = replace(TRUTH, terms={**TRUTH.terms, "prompt_step": 0.9e6})
    plain = made_run(4000, 7, truth, config=PROMPT_GRAPHS)
    ahead = made_ahead(4000, 12, truth, hidden_ns=0.4e6, config=PROMPT_GRAPHS)
    made = calibrate([CalibrationRun(plain), CalibrationRun(ahead)], "own", replicates=0)
    assert made.host.launch_ns == pytest.approx(0.4e6, rel=0.15)
    table, steps = step_table(ahead, made.shape), ahead.steps
    costs = CalibratedCosts(made, pipeline_depth=1)
    light = table.mixed & (table.tokens <= 512) & ~np.append(launched_singly(table, made.shape)[1:], True)
    errors = [
        costs.device_ns(steps.batch(int(i))) / (steps.end_ns[i] - steps.end_ns[i - 1]) - 1
        for i in table.index[light & np.append(False, ~launched_singly(table, made.shape)[:-1])]
    ]
    assert len(errors) > 200 and abs(np.median(errors)) < 0.01


def test_synchronous_steps_that_last_as_long_as_their_launches_are_foretold_with_the_host():
    truth = replace(TRUTH, terms={**TRUTH.terms, "launch_floor": 30e6})
    plain = made_run(4000, 7, truth)
    made = calibrate(
        [CalibrationRun(plain), CalibrationRun(made_ahead(3000, 12, truth))], "own", replicates=0
    )
    assert made.terms_ns["launch_floor"] == pytest.approx(30e6, rel=0.006)


def test_a_few_steps_planned_ahead_tell_nothing():
    made = calibrate(
        [CalibrationRun(made_run(2000, 7)), CalibrationRun(made_ahead(40, 12))], "own", replicates=0
    )
    assert made.host.source == MEASURED
    assert CalibratedCosts(made, pipeline_depth=1).expected_error().figures["not_ahead"]


def test_a_device_that_is_slower_than_launching_does_not_show_how_long_that_takes():
    heavy = replace(TRUTH, curve=TRUTH.curve + 30e6)
    run = made_ahead(2000, 14, heavy, launch_ns=15e6)
    assert ahead_of(run, step_table(run, SHAPE), SHAPE, 0).launch_ns == 0


def test_steps_planned_ahead_tell_what_the_device_takes_and_what_the_host_adds():
    made = calibrate(
        [CalibrationRun(made_run(3000, 7)), CalibrationRun(made_ahead(3000, 12))], "own", replicates=2
    )
    assert made.host.step_ns == pytest.approx(STEP_NS, rel=0.15)
    assert made.host.request_ns == pytest.approx(10_000, rel=0.1)
    assert made.terms_ns["kv_token"] == pytest.approx(34.0, rel=0.01)
    assert len(made.hosts) == len(made.replicates) == 2
    assert not CalibratedCosts(made, pipeline_depth=1).expected_error().figures["not_ahead"]
    fresh = made_ahead(800, 13)
    table = step_table(fresh, SHAPE)
    costs = CalibratedCosts(made, pipeline_depth=1)
    lines = [costs.decode_line(int(n)).ns(int(ctx), 0) for n, ctx in zip(table.n, table.ctx, strict=True)]
    end = fresh.steps.end_ns
    alone = ~np.append(table.mixed[1:], True) & np.append(False, ~table.mixed[:-1])
    quiet = np.flatnonzero(~table.mixed & alone)
    took = end[quiet] - end[quiet - 1]
    assert np.abs(np.array(lines)[quiet] / took - 1).mean() < 0.005


def test_a_host_that_is_slow_for_a_while_is_no_slow_gpu():
    slow = replace(TRUTH, curve=TRUTH.curve + 0.4e6)
    runs = [
        CalibrationRun(made_run(2000, 7)),
        CalibrationRun(made_run(2000, 8, slow)),
        CalibrationRun(made_ahead(3000, 12)),
    ]
    plain = calibrate([runs[0], runs[2]], "own", replicates=0)
    both = calibrate(runs, "own", replicates=0)
    lines = [
        CalibratedCosts(made, pipeline_depth=1).decode_line(64).ns(64_000, 1000) for made in (plain, both)
    ]
    assert lines[1] == pytest.approx(lines[0], rel=0.002)
    assert both.host.step_ns == pytest.approx(STEP_NS + 0.2e6, rel=0.15)


def test_ends_heard_of_late_are_grouped_and_tell_how_long_launching_takes():
    run = made_ahead(2000, 14, launch_ns=15e6)
    table = step_table(run, SHAPE)
    result = ahead_of(run, table, SHAPE, 0)
    assert result.launch_ns == pytest.approx(15e6, rel=0.01)
    steps = np.bincount(result.group)
    assert steps.max() > 1 and (steps == 1).sum() > 500
    _, device, _ = replace(TRUTH, curve=TRUTH.curve - STEP_NS).sides(result.table, SHAPE)
    assert np.abs(result.summed(device) / result.ns - 1).mean() < 0.005
    step_by_step = np.diff(run.steps.end_ns)[table.index[1:] - 1] / TRUTH.sides(table, SHAPE)[1][1:]
    assert np.abs(step_by_step - 1).mean() > 0.1
    made = calibrate([CalibrationRun(made_run(3000, 7)), CalibrationRun(run)], "own", replicates=0)
    assert made.host.single_ns == pytest.approx(15e6, rel=0.01)
    chunk = Batch(0, 0, 0, ((2000, 0),))
    assert CalibratedCosts(made, pipeline_depth=1).launch_ns(chunk) == pytest.approx(15e6, rel=0.05)


def test_what_a_steps_first_context_tokens_cost_more_is_in_both_kinds_of_step():
    truth = replace(TRUTH, terms={**TRUTH.terms, "first_kv_token": 8.0})
    made = calibrate([CalibrationRun(made_run(6000, 15, truth))], "own", replicates=0)
    assert made.terms_ns["first_kv_token"] == pytest.approx(8.0, rel=0.2)
    first, costs = first_tokens(SHAPE), CalibratedCosts(made)
    each = made.terms_ns["first_kv_token"]

    def decode(ctx: int) -> int:
        return costs.decode_line(16).ns(ctx, ctx // 16)

    def beside(ctx: int) -> int:
        return costs.device_ns(Batch(16, ctx, ctx // 16, ((64, 0),)))

    for took in (decode, beside):
        near, far = took(first) - took(first // 2), took(2 * first) - took(3 * first // 2)
        assert near - far == pytest.approx(each * first / 2, rel=0.01)


def test_prompts_read_a_context_once_and_leave_a_light_step_its_clocks():
    truth = replace(TRUTH, terms={**TRUTH.terms, "light_prompt_tile": 10_000.0, "prompt_kv_token": 20.0})
    made = calibrate([CalibrationRun(made_run(6000, 19, truth))], "own", replicates=0)
    assert made.terms_ns["light_prompt_tile"] == pytest.approx(10_000, rel=0.1)
    assert made.terms_ns["prompt_tile"] == pytest.approx(60_000, rel=0.02)
    assert made.terms_ns["prompt_kv_token"] == pytest.approx(20, rel=0.15)
    costs = CalibratedCosts(made)

    def attention_ns(tokens: int) -> int:
        near, far = (costs.device_ns(Batch(0, 0, 0, ((tokens, ctx),))) for ctx in (8192, 16_384))
        return far - near

    spans = [[prompt_span(SHAPE, [(n, ctx)]) for ctx in (8192, 16_384)] for n in (256, 8000)]
    blocks = [far - near for near, far in spans]
    each = [(attention_ns(n) - 20 * 8192) / work for n, work in zip((256, 8000), blocks, strict=True)]
    assert each == pytest.approx([50_150, 59_400], rel=0.05)


def test_sharing_a_short_prefix_spares_more_of_each_token_and_never_all_of_it():
    made = calibrate([CalibrationRun(made_run(2000, 16))], "own", replicates=0)
    terms = {**made.terms_ns, "shared_token": 16.0}
    costs = CalibratedCosts(replace(made, terms_ns=terms))
    each = [costs.shared_ns(prefix * 15, 16) / (prefix * 15) for prefix in (64, 1024, 32_768)]
    assert each == pytest.approx([16.0, 12.0, 8.0], abs=0.3)
    greedy = CalibratedCosts(replace(made, terms_ns={**terms, "shared_token": 80.0}))
    assert greedy.shared_ns(1000, 2) == pytest.approx(1000 * made.terms_ns["kv_token"], rel=0.001)


def test_costs_fitted_to_one_gpu_are_less_sure_of_another():
    run = made_run(2000, 17)
    one = calibrate([CalibrationRun(run), CalibrationRun(made_run(2000, 18))], "own", replicates=0).noise
    again = made_run(2000, 18)
    runs = [replace(r, meta={**r.meta, "gpu_id": gpu}) for r, gpu in ((run, "0247579e"), (again, "39c6fbf4"))]
    two = calibrate([CalibrationRun(each) for each in runs], "own", replicates=0).noise
    same = calibrate([CalibrationRun(run), CalibrationRun(runs[1])], "own", replicates=0).noise
    assert one.gpu_sd == same.gpu_sd > two.gpu_sd > 0.006
    assert one.total_sd > two.total_sd
