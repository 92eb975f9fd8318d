"""Corrections from times of single batches, in the forms that tools write."""

import json

import numpy as np
import pandas as pd
import pytest
from pagecast.planner_app.cli import run
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.measured.corrections import Corrections, read_corrections
from pagecast.sim.fitting.from_bench import corrected
from pagecast.sim.fitting.from_steps import device_s, fit_steps
from pagecast.sim.runs.timed_steps import read_timed_steps
from pagecast.sim.scenario import Scenario

SCENARIO = Scenario(model="Qwen/Qwen3-14B", gpu="H100")
REAL = Corrections("real", 0.0, 1.1, 0.92)


def case(name, shapes, median_us, **rank):
    requests = [
        {"query_len": query, "kv_len": kv, "num_draft_tokens": drafts, "chunked": False}
        for query, kv, drafts in shapes
    ]
    return {"case": name, "requests": requests, "median_us": median_us, "ranks": [{"num_tokens": 1, **rank}]}


def forward(costs):
    """As `vllm bench forward --output-json` of 0.33 writes them."""
    cases = []
    for requests in (1, 8, 64):
        for kv in (500, 4000):
            took = device_s(costs, Batch(requests, requests * (kv - 1), kv - 1, ()))
            cases.append(case(f"decode{requests}", [(1, kv, 0)] * requests, 1e6 * took))
    for tokens in (512, 4096):
        took = device_s(costs, Batch(2, 2 * 999, 999, ((tokens, 1000),)))
        cases.append(
            case(f"mix{tokens}", [(tokens, tokens + 1000, 0), (1, 1000, 0), (1, 1000, 0)], 1e6 * took)
        )
    return cases


def test_device_times_of_batches_tell_both_factors_and_leave_the_host(tmp_path, capsys):
    costs = corrected(SCENARIO.step_costs(), REAL)
    verified = case("verify", [(4, 1000, 3)], 9000.0)
    (tmp_path / "forward.json").write_text(json.dumps([*forward(costs), verified]))
    (tmp_path / "setup.yaml").write_text("model: Qwen/Qwen3-14B\ngpu: H100\n")
    given = ["--from-steps", str(tmp_path / "forward.json"), "--scenario", str(tmp_path / "setup.yaml")]
    assert run(["calibrate", *given, "--out", str(tmp_path / "mine.json")]) == 0
    printed = capsys.readouterr()
    assert "1 cases with draft tokens are left out" in " ".join(printed.err.split())
    assert "forward, 8 steps, median error: DECODE -9.1% before" in printed.out
    fitted = read_corrections(tmp_path / "mine.json")
    assert fitted.step_s == 0
    assert (fitted.decode, fitted.prompt) == (pytest.approx(1.1, rel=0.02), pytest.approx(0.92, rel=0.02))
    replayed = ["replay", "chat", "--limit", "5", "--model", "Qwen/Qwen3-14B", "--gpu", "H100"]
    assert run([*replayed, "--costs", str(tmp_path / "mine.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["costs"] == "mine"


def fpm(costs, host_s):
    """As `aisimulate onboard collect-fpm` publishes them: two deployments, sums over a batch."""
    rows = []
    for requests in (1, 16, 128):
        for kv in (300, 3000):
            rows.append(("decode", requests, 0, requests * kv, Batch(requests, requests * kv, kv, ())))
    for requests, tokens in ((1, 2048), (4, 8000)):
        chunks = ((tokens // requests, 0),) * requests
        rows.append(("prefill", requests, tokens, 0, Batch(0, 0, 0, chunks)))
    names = ["workload_kind", "batch_size", "total_prefill_tokens", "total_kv_read_tokens"]
    table = pd.DataFrame([row[:4] for row in rows], columns=names)
    table["latency_ms"] = [1e3 * (device_s(costs, row[4]) + host_s) for row in rows]
    fields = {"model_path": "Qwen/Qwen3-14B", "system": "h100_sxm", "pp": 1, "dp": 1, "moe_tp": 1}
    table = table.assign(tp=1, **fields)
    other = table.assign(tp=2, moe_tp=2, latency_ms=table["latency_ms"] / 2)
    return pd.concat([table, other])


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_times_of_whole_iterations_tell_the_host_too(form, tmp_path):
    table, file = fpm(corrected(SCENARIO.step_costs(), REAL), 0.5e-3), tmp_path / f"fpm_forward_perf.{form}"
    table.to_parquet(file) if form == "parquet" else table.to_csv(file, index=False)
    measured = read_timed_steps(file, 1)
    assert len(measured.batches) == 8 and "Qwen/Qwen3-14B, h100_sxm" in measured.notes[0]
    fitted = fit_steps([measured], SCENARIO, "mine")
    assert fitted.step_s == pytest.approx(0.5e-3, abs=0.3e-3)
    costs = corrected(SCENARIO.step_costs(), fitted)
    ratios = [device_s(costs, b) / s for b, s in zip(measured.batches, measured.seconds, strict=True)]
    assert np.abs(np.log(ratios)).max() < 0.03


def test_what_is_not_times_of_batches_is_told_so(tmp_path):
    file = tmp_path / "x.json"

    def refusal(document, name="x.json"):
        (tmp_path / name).write_text(document if isinstance(document, str) else json.dumps(document))
        with pytest.raises(BadInput) as error:
            read_timed_steps(tmp_path / name)
        return str(error.value)

    assert "is no list of cases; give the --output-json of `vllm bench forward`" in refusal({"a": 1})
    assert "case 1: field median_us is missing" in refusal([{"case": "a", "requests": []}])
    assert "--exclude-drafter" in refusal([case("a", [(1, 9, 0)], 5.0, drafter={})])
    assert "no case without draft tokens" in refusal([case("a", [(4, 9, 3)], 5.0)])
    assert "case 1: median_us is 0" in refusal([case("a", [(1, 9, 0)], 0)])
    assert "query_len 9, kv_len 3" in refusal([case("a", [(9, 3, 0)], 5.0)])
    assert "columns workload_kind, batch_size" in refusal("a,b\n1,2\n", "x.csv")
    table = fpm(SCENARIO.step_costs(), 0.0)
    table.loc[0, "system"] = "b200"
    table.to_csv(tmp_path / "y.csv", index=False)
    with pytest.raises(BadInput, match="rows of 2 deployments, by system; keep those of one"):
        read_timed_steps(tmp_path / "y.csv")
    with pytest.raises(BadInput, match="has no rows of 8 GPUs"):
        read_timed_steps(tmp_path / "y.csv", 8)
    assert file.exists()
