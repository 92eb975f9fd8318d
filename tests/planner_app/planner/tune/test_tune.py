"""Tuning: what a block size and an HBM budget change, and a recommendation that follows from the figures."""

import json
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
from pagecast.planner_app.cli import run as pagecast
from pagecast.planner_app.commands.tune import as_dict
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.planning import plan
from pagecast.planner_app.planner.execution.executor import executor
from pagecast.planner_app.planner.execution.options import Many
from pagecast.planner_app.planner.sweep.options import SweepOptions
from pagecast.planner_app.planner.sweep.question import SweepQuestion
from pagecast.planner_app.planner.sweep.study import sweep
from pagecast.planner_app.planner.tune.knobs import _at_top, budget_knob, recommend, tune
from pagecast.planner_app.planner.tune.options import TuneOptions
from pagecast.planner_app.planner.tune.tables import admits, cannot_run, tables
from pagecast.planner_app.reports.html_page import plain_figures
from pagecast.planner_app.reports.tune_report import tune_report
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.replay import Kept, replay
from pagecast.sim.replay.clients import ClosedLoop
from pagecast.sim.scenario import Scenario
from pagecast.traces.bundled import resolve
from pagecast.traces.read import read
from pagecast.traces.schema import Trace, table


def tuned_by(many, *arguments, **options):
    """A tuning whose replays run where `many` says."""
    with executor(many) as run:
        return tune(*arguments, run=run, **options)


@pytest.fixture(scope="module")
def chat():
    return read(resolve("chat"), limit=100)


def test_larger_blocks_waste_more_and_hold_shorter_tables(chat):
    tuned = tune(chat, Scenario(costs="roofline"), "block_size", TuneOptions(values="8,32,128", static=True))
    table = tuned.table.set_index("block_size")
    assert table["tail_waste_tokens"].is_monotonic_increasing
    assert table["table_entries"].is_monotonic_decreasing
    assert table["lookup_blocks"].is_monotonic_decreasing
    assert table["reused_prefix_tokens"].is_monotonic_decreasing
    held = (chat.requests["input_tokens"] + chat.requests["output_tokens"] - 1).to_numpy()
    assert table["tail_waste_tokens"][32] == pytest.approx((-held % 32).mean())
    assert table["table_bytes"][32] == pytest.approx(4 * (-(-held // 32)).mean())
    assert tuned.recommended in (8, 32)


def test_a_pool_of_exactly_four_sequences_admits_four():
    # Four blocks per sequence, prompt and answer; nothing is shared.
    columns = {"arrival_s": [0.0] * 40, "input_tokens": [33] * 40, "output_tokens": [32] * 40}
    trace = Trace("even", table(columns))
    scenario = Scenario(costs="roofline", num_gpu_blocks=16)
    result = tune(trace, scenario, "block_size", TuneOptions(values="16")).table
    assert result["admissible_concurrency"].tolist() == [4]


def test_users_beyond_the_batch_are_admitted_where_the_level_lets_them_wait():
    # Four places and answers of one length: who has to wait for a place waits as long as one takes.
    columns = {"arrival_s": [0.0] * 40, "input_tokens": [33] * 40, "output_tokens": [32] * 40}
    trace, scenario = Trace("even", table(columns)), Scenario(costs="roofline", max_num_seqs=4)
    alone = replay(trace, scenario, arrivals=partial(ClosedLoop, users=1), kept=Kept(steps=False))
    answer_s = alone.summary["e2e_s"]["max"]
    some = tune(trace, scenario, "block_size", TuneOptions(values="16", slo=f"e2e_p99<{2.6 * answer_s:.4f}s"))
    assert 4 < some.table["admissible_concurrency"][0] < 16
    assert not some.table["admissible_at_limit"][0] and admits(some) == ""
    for slo, most, why in (("", 4, "more would only wait"), ("e2e_p99<60s", 16, "4 times max_num_seqs (4)")):
        tuned = tune(trace, scenario, "block_size", TuneOptions(values="16", slo=slo))
        header, rows = tables(tuned)[-1]
        assert dict(zip(header, rows[0], strict=True))["users admitted"] == f">= {most}"
        assert why in admits(tuned)


def test_a_limit_that_every_setting_reaches_is_not_drawn():
    pytest.importorskip("plotly")
    columns = {"arrival_s": [0.0] * 40, "input_tokens": [33] * 40, "output_tokens": [32] * 40}
    scenario = Scenario(costs="roofline", max_num_seqs=4)
    page = tune_report(
        tune(Trace("even", table(columns)), scenario, "block_size", TuneOptions(values="16,32"))
    )
    names = [series["name"] for figure in plain_figures(page) for series in figure["data"]]
    assert "static concurrency" in names and "admissible concurrency" not in names


def test_more_hbm_never_has_fewer_hits_here_and_the_least_that_is_enough_is_recommended(chat):
    scenario = Scenario(
        costs="roofline",
        gpu="RTX 4090",
        model="Qwen/Qwen3-0.6B",
        max_model_len=4096,
        max_num_batched_tokens=8192,
    )
    tuned = tuned_by(
        Many(workers=2),
        chat,
        scenario,
        budget_knob(scenario),
        TuneOptions(values="0.01,0.1:0.9:0.2", static=True),
    )
    ran = tuned.table[tuned.table["reason"] == ""]
    assert "leaves no room for a KV cache" in tuned.table["reason"].iloc[0]
    assert ran["kv_gib"].is_monotonic_increasing
    assert ran["reused_prefix_tokens"].is_monotonic_increasing
    enough = ran[ran["reused_prefix_tokens"] >= 0.99 * ran["reused_prefix_tokens"].max()]
    assert tuned.recommended >= enough["gpu_memory_utilization"].min()
    assert f"gpu_memory_utilization {tuned.recommended:g}, the smallest" in tuned.reason
    room = ran.set_index("gpu_memory_utilization")["static_concurrency"][tuned.recommended]
    assert f"room for {int(room)} requests at once" in tuned.reason


@pytest.mark.parametrize("values", ["16,32", "32,16"])
def test_the_order_in_which_block_sizes_are_written_does_not_matter(chat, values):
    scenario = Scenario(costs="roofline", max_num_seqs=64)
    tuned = tune(chat, scenario, "block_size", TuneOptions(values=values, static=True))
    assert tuned.table["block_size"].tolist() == [16, 32]
    assert tuned.recommended == 32
    assert "Nothing larger that runs was tried" in tuned.reason


@pytest.mark.parametrize("values", ["0.6,0.9", "0.9,0.6"])
def test_the_order_in_which_budgets_are_written_does_not_matter(chat, values):
    scenario = Scenario(costs="roofline", max_num_seqs=64)
    tuned = tune(chat, scenario, budget_knob(scenario), TuneOptions(values=values, static=True))
    assert tuned.table["gpu_memory_utilization"].tolist() == [0.6, 0.9]
    assert tuned.recommended == 0.6
    assert "Nothing smaller that runs was tried" in tuned.reason


def rows(**columns):
    count = len(next(iter(columns.values())))
    plain = {
        "rejected": 0,
        "unserved": 0,
        "meets": True,
        "reason": "",
        "reused_prefix_tokens": 1000,
        "ttft_mean_s": 0.1,
        "e2e_mean_s": 1.0,
        "static_concurrency": 64,
        "completed": 100,
    }
    return pd.DataFrame({name: [value] * count for name, value in plain.items()} | columns)


@pytest.mark.parametrize(
    ("columns", "best", "sentence"),
    [
        ({"reused_prefix_tokens": [1000, 995, 950]}, 32, "64 would mean 5.0% fewer hit tokens"),
        ({"ttft_mean_s": [0.1, 0.104, 0.2]}, 32, "64 would mean 100.0% longer mean TTFT"),
        ({"static_concurrency": [64, 63, 62]}, 16, "32 would mean 1.6% less room for requests at once"),
        ({"meets": [True, True, False]}, 32, "64 would mean the SLO is missed"),
        ({"rejected": [0, 0, 3]}, 32, "64 would mean 3 requests rejected"),
        ({"rejected": [0, 0, 1], "unserved": [0, 0, 0]}, 32, "64 would mean 1 request rejected."),
        ({"unserved": [0, 0, 1], "ttft_mean_s": [0.2, 0.2, 0.1]}, 32, "64 would mean 1 request unserved."),
        ({"unserved": [9, 2, 5], "rejected": [0, 1, 1]}, 32, "1 request rejected."),
        ({"reused_prefix_tokens": [1000, 1000, 1000]}, 64, "Nothing larger that runs was tried"),
        ({"reused_prefix_tokens": [1000, 900, 500], "ttft_mean_s": [0.2, 0.1, 0.1]}, 32, "a compromise"),
    ],
)
def test_the_largest_block_that_costs_nothing_is_recommended(columns, best, sentence):
    table = rows(block_size=[16, 32, 64], **columns)
    value, reason = recommend(table, "block_size")
    assert value == best
    assert sentence in reason


def test_a_budget_that_serves_fewer_requests_is_not_recommended_for_its_shorter_times():
    """Two long prompts come at once. The small cache holds one, and the other's client leaves."""
    columns = {
        "arrival_s": [20.0 * (number // 2) for number in range(10)],
        "input_tokens": [30_000] * 10,
        "output_tokens": [1000] * 10,
        "cancel_after_s": [float("nan"), 4.0] * 5,
    }
    trace, scenario = Trace("pairs", table(columns)), Scenario(costs="roofline", max_model_len=32_000)
    tuned = tune(trace, scenario, budget_knob(scenario), TuneOptions(values="0.16,0.5", static=True))
    assert tuned.table["ttft_mean_s"].is_monotonic_increasing
    assert tuned.table["unserved"].tolist() == [5, 0]
    assert tuned.recommended == 0.5
    assert "0.16 would mean 5 requests unserved." in tuned.reason
    header, cells = tables(tuned)[-1]
    at = header.index("unserved")
    assert [row[at] for row in cells] == ["5", "0"]


def test_there_is_no_column_of_unserved_requests_where_all_are_served(chat):
    tuned = tune(
        chat,
        Scenario(costs="roofline"),
        budget_knob(Scenario(costs="roofline")),
        TuneOptions(values="0.6,0.9", static=True),
    )
    assert all("unserved" not in header for header, _ in tables(tuned))


def test_workers_change_nothing_and_a_stopped_tuning_has_what_is_done(chat):
    scenario = Scenario(costs="roofline", max_num_seqs=8)
    one, two = (
        tuned_by(Many(workers=workers), chat, scenario, "block_size", TuneOptions(values="16,64"))
        for workers in (1, 2)
    )
    assert one.table.equals(two.table) and one.reason == two.reason
    part = tune(chat, scenario, "block_size", TuneOptions(values="16,64"), stop=lambda: True)
    assert len(part.table) == 1 and not part.complete


def test_the_command_prints_a_table_a_reason_and_a_page(tmp_path, capsys):
    pytest.importorskip("plotly")
    page = tmp_path / "tune.html"
    command = ["tune", "block-size", "chat", "--limit", "40", "--values", "16,64", "--static"]
    assert pagecast([*command, "--report", str(page), "--explain"]) == 0
    printed = capsys.readouterr().out
    assert "recommended: block_size" in printed and "hit tokens" in printed and "TPOT mean" in printed
    written = page.read_text(encoding="utf-8")
    assert "block_size for chat" in written
    lead, tail = written.split("<h2>")[0], written.split("Scenario</h2>")[1]
    costs = Scenario().step_costs()
    assert f"costs {costs.name}" in printed and f"note: {sentence(costs.expected_error())}" in printed
    assert f"1 x H200 with Qwen/Qwen3-8B, as vLLM 0.33 would; step costs: {costs.name}." in lead
    assert "max_num_batched_tokens" in tail and "step costs used" in tail
    assert pagecast([*command, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [row["block_size"] for row in body["settings"]] == [16, 64]
    assert body["recommended"] in (16, 64)
    assert (body["costs"], body["expected_error"]) == (costs.name, sentence(costs.expected_error()))
    assert body["scenario"]["model"] == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["hbm-budget", "chat", "--num-gpu-blocks", "100"], "num_gpu_blocks fixes the KV cache"),
        (["block-size", "chat", "--values", "0,16"], "block_size is 0"),
        (["block-size", "chat", "--values", "foo"], "pagecast: block_size=foo: block_size is 'foo'"),
        (["block-size", "chat", "--values", "16:64"], "a range needs a step"),
        (["hbm-budget", "chat", "--values", "0.9:2:0.5"], "gpu_memory_utilization is 1.4"),
        (["block-size", "chat", "--slo", "fast"], "SLO term"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(options, named, capsys):
    assert pagecast(["tune", *options, "--limit", "5"]) == 2
    message = capsys.readouterr().err
    assert named in message and message.count("\n") == 1


def test_a_fixed_cache_is_refused_for_a_budget(chat):
    with pytest.raises(BadInput, match="kv_tokens fixes the KV cache"):
        tune(chat, Scenario(kv_tokens=1000), budget_knob(Scenario(kv_tokens=1000)))


def test_a_budget_with_which_the_engine_does_not_start_is_not_recommended(chat):
    """On an L4, 95% of the memory leaves too little for what vLLM does not count within it."""
    scenario = Scenario(gpu="L4", costs="roofline", max_model_len=16_384, max_num_batched_tokens=8192)
    tuned = tune(chat, scenario, budget_knob(scenario), TuneOptions(values="0.5,0.7,0.9,0.95", static=True))
    reasons = tuned.table.set_index("gpu_memory_utilization")["reason"]
    assert reasons[0.9] == ""
    assert reasons[0.95].startswith("Does not start: with gpu_memory_utilization 0.95 ")
    assert tuned.recommended == 0.9
    told = cannot_run(tuned)
    assert told.startswith("can't run: gpu_memory_utilization 0.5, 0.7: ")
    assert "; 0.95: Does not start" in told
    question = SweepQuestion(chat, scenario, SweepOptions(settings=["gpu_memory_utilization=0.9,0.95"]))
    table = sweep(question).table
    assert table["meets"].tolist() == [True, False]
    assert table["reason"][1].startswith("Does not start")


def test_a_fleet_is_asked_for_the_memory_of_each_group(chat):
    scenario = Scenario(
        gpu="L4",
        costs="roofline",
        max_model_len=16_384,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.98,
    )
    space = ["max_num_seqs=8,16"]
    larger = FleetSettings.make({"groups": [{"scenario": {"gpu": "H200"}}]})
    table = sweep(SweepQuestion(chat, scenario, SweepOptions(settings=space), fleet=larger)).table
    assert table["reason"].tolist() == ["", ""]
    with pytest.raises(BadInput, match="Does not start"):
        sweep(SweepQuestion(chat, scenario, SweepOptions(settings=space), fleet=FleetSettings.make({})))


@pytest.mark.parametrize(("knob", "values"), [("block_size", "16,64"), ("gpu_memory_utilization", "0.5,0.9")])
def test_no_value_is_recommended_at_which_nothing_completes(knob, values):
    scenario = Scenario(model="Qwen/Qwen3-0.6B", costs="roofline", max_model_len=10, max_num_seqs=16)
    tuned = tune(read("chat", limit=25), scenario, knob, TuneOptions(values=values))
    assert tuned.recommended is None and not tuned.recommends
    assert tuned.reason == "no request completes at any of these values"


def test_a_reason_not_to_recommend_is_no_recommendation(tmp_path, capsys):
    pytest.importorskip("plotly")
    page = tmp_path / "tune.html"
    options = ["--values", "16,32", "--static", "--costs", "roofline", "--max-model-len", "10"]
    command = ["tune", "block-size", "chat", "--limit", "5", *options, "--report", str(page)]
    assert pagecast(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("no request completes at any of these values\n")
    written = page.read_text(encoding="utf-8")
    assert "No request completes at any of these values. Served on" in written
    assert "Recommended block_size" not in written


def test_the_default_can_be_recommended(chat):
    tuned = tune(
        chat,
        Scenario(costs="roofline"),
        budget_knob(Scenario(costs="roofline")),
        TuneOptions(values="none", static=True),
    )
    assert tuned.recommended is None and tuned.recommends


@pytest.mark.parametrize(("values", "chosen"), [("none,0.95", "0.95"), ("0.2,none", "none")])
def test_the_default_beside_numbers_is_called_none(values, chosen, chat):
    scenario = Scenario(costs="roofline", gpu="L40S")
    tuned = tune(chat, scenario, budget_knob(scenario), TuneOptions(values=values, static=True))
    if chosen == "none":  # as where the number is no good
        tuned = replace(tuned, recommended=None)
    assert tuned.table[tuned.knob].tolist()[-1] is None
    for _, rows in tables(tuned):
        names = [row[0] for row in rows]
        assert f"*{chosen}" in names
        assert [name.lstrip("*") for name in names][-1] == "none"
        assert sum(name.startswith("*") for name in names) == 1
    page = tune_report(tuned)
    assert "nan" not in page.split("<script")[0].lower().split()
    assert as_dict(tuned)["settings"][-1][tuned.knob] is None


def test_a_budget_that_admits_fewer_users_is_not_recommended_and_plan_admits_as_many():
    """There is nothing to hit, and latencies of the few users who come are the same with less room."""
    columns = {"arrival_s": [0.5 * row for row in range(60)], "input_tokens": [160] * 60}
    trace = Trace("even", table({**columns, "output_tokens": [97] * 60}))
    scenario = Scenario(
        costs="roofline", gpu="L4", model="Qwen/Qwen3-0.6B", max_num_seqs=64, max_model_len=1024
    )
    slo = "queue_p99<100ms"
    tuned = tune(trace, scenario, budget_knob(scenario), TuneOptions(values="0.12,0.14,0.16,0.9", slo=slo))
    rows = tuned.table.set_index("gpu_memory_utilization")
    assert rows["admissible_concurrency"].is_monotonic_increasing
    assert tuned.recommended == 0.16
    assert "64 users at once keep the SLO with 0.16, and no value of 0.12, 0.14, " in tuned.reason
    for value, admitted in rows["admissible_concurrency"].items():
        at = scenario.changed(gpu_memory_utilization=value)
        ask = PlanOptions(slo=slo, kinds=("concurrency",), replicates=0, explain=False)
        assert plan(trace, at, ask).concurrency.value == pytest.approx(admitted, abs=2)


def test_a_best_value_at_the_end_of_the_list_is_told_as_that():
    told = " It is the largest that was tried; --values tries others."
    assert _at_top(0.9, [0.5, 0.9], [0.5, 0.9]) == told
    assert _at_top(0.9, [0.5, 0.9, 1.0], [0.5, 0.9]) == " It is the largest that starts."
    assert not _at_top(0.5, [0.5, 0.9], [0.5, 0.9])
