"""Sweeps: the right answer, and the same one whatever happens on the way."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.planner_app.cli import run as pagecast
from pagecast.planner_app.planner.capacity.admitted import keeps_rate
from pagecast.planner_app.planner.execution.executor import executor
from pagecast.planner_app.planner.execution.options import Many
from pagecast.planner_app.planner.sweep.options import SweepOptions
from pagecast.planner_app.planner.sweep.pareto import front
from pagecast.planner_app.planner.sweep.question import SweepQuestion
from pagecast.planner_app.planner.sweep.study import sweep
from pagecast.planner_app.planner.sweep.study_view import answer
from pagecast.planner_app.reports.style import caption_of
from pagecast.planner_app.reports.sweep_charts import against_knob
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.bundled import resolve
from pagecast.traces.read import read

GRID = ["tensor_parallel_size=1,2", "kv_tokens=4000:32000:7000", "block_size=16,64"]
LEVEL = "ttft_p99<4s,goodput(ttft<2s,tpot<20ms)>0.95"


def swept(many, *arguments, **options):
    """A sweep whose replays run where `many` says."""
    with executor(many) as run:
        return sweep(*arguments, run=run, **options)


@pytest.fixture(scope="module")
def chat():
    return read(resolve("chat"), limit=200)


def asked(trace, settings=GRID, scenario=None, **options):
    scenario = scenario or Scenario(costs="roofline")
    return SweepQuestion(trace, scenario, SweepOptions(settings=settings, **options))


@pytest.fixture(scope="module")
def reference(chat):
    """The grid's table, one trial after another in this process."""
    return sweep(asked(chat, slo=LEVEL, price={"H200": 4.0}))


@pytest.mark.parametrize(
    ("objective", "setting", "best"),
    [
        ("output_tokens", "max_model_len=600,400,500", "600"),
        ("num_gpu_blocks", "kv_tokens=16000,8000", "16000"),
        ("preemptions", "kv_tokens=16000,4000", "16000"),
    ],
)
def test_objectives_are_sought_in_the_direction_that_is_better(chat, objective, setting, best):
    result = sweep(asked(chat, [setting], objective=(objective,)))
    knob = setting.partition("=")[0]
    assert [str(value) for value in result.front[knob]] == [best]
    chart = against_knob(result.table, knob, [objective])
    assert f"Best at {knob} {best} " in caption_of(chart)


def test_each_row_is_the_replay_of_its_scenario_and_the_cheapest_meets_the_slo(chat, reference):
    table = reference.table
    assert len(table) == 20
    row = table.iloc[13]
    scenario = Scenario(
        costs="roofline",
        tensor_parallel_size=int(row.tensor_parallel_size),
        block_size=int(row.block_size),
        kv_tokens=int(row.kv_tokens),
    )
    summary = replay(chat, scenario).summary
    assert row.ttft_p99_s == summary["ttft_s"]["p99"]
    assert row.num_gpu_blocks == summary["num_gpu_blocks"]
    assert row.usd_per_hour == 4.0 * scenario.tensor_parallel_size
    spent = row.usd_per_hour * summary["makespan_s"] / 3600
    assert row.usd_per_million_output_tokens == pytest.approx(spent / summary["output_tokens"] * 1e6)
    meets = table[(table["ttft_p99<4s"] < 4) & (table["goodput(ttft<2s,tpot<20ms)>0.95"] > 0.95)]
    assert 0 < len(meets) < len(table)
    assert table.index[table["meets"]].tolist() == meets.index.tolist()
    assert reference.cheapest["usd_per_hour"] == meets["usd_per_hour"].min()
    assert reference.cheapest["number"] in meets["number"].tolist()


def test_of_trials_with_as_much_room_the_one_of_the_lowest_ttft_is_best(reference):
    table = reference.table.assign(meets=True, on_front=True, margin=0.5, ttft_p99_s=2.0, usd_per_hour=4.0)
    table.loc[3, "margin"], table.loc[7, "ttft_p99_s"], table.loc[9, "ttft_p99_s"] = 0.502, 1.0, 0.5
    table.loc[9, "margin"] = 0.45
    assert replace(reference, table=table).cheapest["number"] == 7


def test_a_scenario_that_cannot_run_has_a_reason_and_one_that_rejects_is_no_answer(chat):
    result = sweep(asked(chat, ["num_gpu_blocks=20,4000"]))
    assert result.table["rejected"].tolist()[0] > 0
    assert result.table["meets"].tolist() == [False, True]
    tight = sweep(asked(chat, ["gpu_memory_utilization=0.1,0.9"]))
    assert "leaves no room for a KV cache" in tight.table["reason"][0]
    assert tight.cheapest["number"] == 1
    with pytest.raises(BadInput, match="no scenario of the space can run"):
        sweep(asked(chat, ["gpu_memory_utilization=0.05,0.1"]))


@pytest.mark.slow
def test_workers_change_nothing_in_a_grid_or_a_search(chat, reference):
    again = swept(Many(workers=2), reference.question)
    assert again.table.equals(reference.table)
    pytest.importorskip("optuna")
    question = asked(chat, ["block_size=8:64:8", "kv_tokens=8000:60000"], search=13, generation=6)
    one, two = (swept(Many(workers=workers), question) for workers in (1, 2))
    assert one.table.equals(two.table)
    assert len(one.table) == 13
    longer = sweep(asked(chat, ["block_size=8:64:8", "kv_tokens=8000:60000"], search=18, generation=6))
    assert longer.table["kv_tokens"].tolist()[:13] == one.table["kv_tokens"].tolist()
    other = asked(
        chat,
        ["block_size=8:64:8", "kv_tokens=8000:60000"],
        Scenario(costs="roofline", seed=1),
        search=6,
        generation=6,
    )
    assert sweep(other).table["kv_tokens"].tolist() != one.table["kv_tokens"].tolist()[:6]


def test_a_search_ends_when_the_space_is_used_up_and_finds_the_best(chat, reference):
    pytest.importorskip("optuna")
    question = asked(chat, slo=LEVEL, price={"H200": 4.0}, search=100, generation=8)
    result = sweep(question)
    assert len(result.table) == 20
    same = ["usd_per_hour", "margin", "ttft_p99_s", *result.knobs]
    assert {name: result.cheapest[name] for name in same} == {name: reference.cheapest[name] for name in same}


def test_a_stopped_sweep_goes_on(chat, reference, tmp_path):
    done = []
    part = sweep(reference.question, out=tmp_path, progress=done.append, stop=lambda: max(done) >= 7)
    assert not part.complete
    assert len(part.table) == 7
    rest = swept(Many(workers=2), reference.question, out=tmp_path)
    assert rest.complete and rest.replayed == 13
    assert rest.table.equals(reference.table)
    assert sweep(reference.question, out=tmp_path).replayed == 0


@pytest.mark.parametrize("search", [None, pytest.param("18", marks=pytest.mark.slow)])
def test_killed_and_started_again_it_has_the_same_table(chat, tmp_path, search):
    level = f"ttft_p50<1us,{LEVEL}"  # which none keeps: so no search follows for what the best one takes
    options = [*(part for text in GRID for part in ("--set", text)), "--costs", "roofline", "--slo", level]
    if search:
        pytest.importorskip("optuna")
        options += ["--search", search, "--generation", "6"]
    command = ["sweep", "chat", "--limit", "200", *options]
    assert pagecast([*command, "--out", str(tmp_path / "whole"), "--workers", "1"]) == 1
    out = tmp_path / "killed"
    program = [sys.executable, "-m", "pagecast", *command, "--out", str(out), "--workers", "2"]
    running = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: trials_in(out) >= 4)
        helpers = children_of(running.pid)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    wait_until(lambda: not any(Path(f"/proc/{helper}").exists() for helper in helpers))
    kept = trials_in(out)
    assert pagecast([*command, "--out", str(out), "--workers", "1"]) == 1
    assert kept < 18
    whole, again = (pd.read_parquet(folder / "trials.parquet") for folder in (tmp_path / "whole", out))
    assert again.equals(whole)


def test_a_dask_worker_killed_in_the_middle_changes_nothing(reference, dask_cluster):
    address, (_, *workers) = dask_cluster

    def kill(done):
        if done == 6:
            os.kill(workers[0].pid, signal.SIGKILL)

    result = swept(Many(cluster=address), reference.question, progress=kill)
    assert workers[0].wait(10) == -signal.SIGKILL
    assert result.table.equals(reference.table)


def test_a_scheduler_killed_in_the_middle_is_told_and_what_is_done_is_kept(reference, dask_cluster, tmp_path):
    address, (scheduler, *_) = dask_cluster

    def kill(done):
        if done == 3:
            scheduler.kill()

    with pytest.raises(BadInput, match="the scheduler has gone; start it and run again"):
        swept(Many(cluster=address), reference.question, out=tmp_path / "study", progress=kill)
    assert trials_in(tmp_path / "study") >= 3


@pytest.fixture
def dask_cluster(tmp_path):
    """A Dask scheduler and two workers, started by Dask's own command: the address, and the processes."""
    pytest.importorskip("distributed")
    file = tmp_path / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    common = ["--scheduler-file", str(file), "--no-dashboard"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": tmp_path}
    started = [subprocess.Popen([*dask, "scheduler", "--host", "127.0.0.1", "--port", "0", *common], **quiet)]
    try:
        wait_until(lambda: file.exists() and file.read_text().endswith("}"))
        one = [*dask, "worker", "--no-nanny", "--nthreads", "1", "--host", "127.0.0.1", *common]
        started += [subprocess.Popen(one, **quiet) for _ in range(2)]
        address = json.loads(file.read_text())["address"]
        wait_until(lambda: workers_at(address) == 2)
        yield address, started
    finally:
        for process in started:
            process.kill()
            process.wait()


def workers_at(address):
    from distributed import Client

    with Client(address, set_as_default=False) as client:
        return len(client.scheduler_info(n_workers=-1)["workers"])


def children_of(pid):
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def trials_in(folder: Path):
    try:
        with sqlite3.connect(f"file:{folder}/study.sqlite?mode=ro", uri=True) as database:
            return database.execute("SELECT COUNT(*) FROM trials").fetchone()[0]
    except sqlite3.Error:
        return 0


def wait_until(condition):
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < 60, "nothing happens"
        time.sleep(0.01)


def test_a_folder_of_another_study_is_refused_in_one_line(chat, tmp_path, capsys):
    command = ["sweep", "chat", "--limit", "30", "--costs", "roofline", "--out", str(tmp_path)]
    assert pagecast([*command, "--set", "block_size=16,32"]) == 0
    capsys.readouterr()
    for change, named in {
        ("--set", "block_size=16,64"): "another space (block_size=16,32, not block_size=16,64)",
        ("--set", "block_size=16,32", "--limit", "31"): "another trace",
        ("--set", "block_size=16,32", "--max-num-seqs", "9"): "another scenario (max_num_seqs 1024, not 9)",
        ("--set", "block_size=16,32", "--slo", "ttft_p99<1s"): "another SLO",
        ("--set", "block_size=16,32", "--search", "5"): "another kind",
    }.items():
        assert pagecast([*command, *change]) == 2
        output = capsys.readouterr()
        assert named in output.err and output.err.count("\n") == 1 and not output.out
    # What it costs is no matter of the replays: a grid takes new prices.
    assert pagecast([*command, "--set", "block_size=16,32", "--price", "H200=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cheapest"]["usd_per_hour"] == 3.0


def test_a_broken_study_and_one_in_use_are_told(chat, tmp_path):
    question = asked(chat, ["block_size=16,32"])
    busy = tmp_path / "busy"

    def again(done):
        if done == 1:
            with pytest.raises(BadInput, match="another pagecast is at work"):
                sweep(question, out=busy)

    assert sweep(question, out=busy, progress=again).complete
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "study.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(BadInput, match=r"study.sqlite: .*not a database; name another folder"):
        sweep(question, out=broken)
    with pytest.raises(BadInput, match="can't be written"):
        sweep(question, out=Path("/proc/nowhere"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--price", "H200"], "GPU=USD_PER_GPU_HOUR"),
        (["--price", "H200=0"], "a price is above 0"),
        (["--price", "H300=1"], "unknown GPU"),
        (["--price", "H100=1"], "no price for H200"),
        (["--objective", "speed"], "--objective speed"),
        (["--objective", "usd_per_hour"], "needs prices"),
        (["--slo", "ttft<1s"], "SLO term"),
        (["--search", "0"], "'--search'"),
        (["--set", "kv_tokens=1000:2000"], "a grid needs a step"),
        (["--cluster", "tcp://127.0.0.1:9"], "can't be reached"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(options, named, capsys):
    if "--cluster" in options:
        pytest.importorskip("distributed")
    command = ["sweep", "chat", "--limit", "5", "--set", "block_size=16,32", *options]
    begun = time.monotonic()
    assert pagecast(command) == 2
    message = capsys.readouterr().err
    assert named in message and message.count("\n") == 1
    assert time.monotonic() - begun < 10


COST = st.sampled_from([0.0, 1.0, 2.0, 3.0, float("nan")])


@given(st.lists(st.tuples(COST, COST, COST), min_size=1, max_size=30))
def test_the_front_is_what_no_other_beats(rows):
    costs = np.array(rows)
    kept = front(costs)
    plain = np.where(np.isnan(costs), np.inf, costs)
    beaten = [any((other <= row).all() and (other < row).any() for other in plain) for row in plain]
    assert kept.tolist() == [not lost for lost in beaten]


def test_step_costs_are_named_and_where_they_differ_it_is_said(tmp_path, capsys):
    command = ["sweep", "chat", "--limit", "20", "--workers", "1", "--set"]
    assert pagecast([*command, "gpu=H200,L40S", "--out", str(tmp_path), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    named = [trial["step_costs"] for trial in body["trials"]]
    assert named == ["vllm-0.24-h200-qwen3-8b", "measured"]
    assert pd.read_parquet(tmp_path / "trials.parquet")["step_costs"].tolist() == named
    assert [(each["name"], each["trials"], each["where"]) for each in body["step_costs"]] == [
        (named[0], 1, "gpu H200"),
        (named[1], 1, "gpu L40S"),
    ]
    assert body["scenario"]["model"] == "Qwen/Qwen3-8B"
    for each in body["step_costs"]:
        assert f"{each['name']}: {each['expected_error']}" in body["notes"]
    assert pagecast([*command, "gpu=H200,L40S", "--out", str(tmp_path), "--explain"]) == 0
    out = capsys.readouterr().out
    assert "0 trials replayed; 2 were in the folder already" in out
    assert "Its step costs are vllm-0.24-h200-qwen3-8b, others' are not." in out
    assert "note: Step costs differ within this sweep: vllm-0.24-h200-qwen3-8b (gpu H200, 1 trial), " in out
    assert "--costs roofline gives all trials the same method" in out
    assert pagecast([*command, "block_size=16,32", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "with model Qwen/Qwen3-8B, gpu H200, tensor_parallel_size 1, engine vllm@0.33, step costs v" in out
    assert "Step costs fitted to" in out and "differ" not in out
    assert "best replica: block_size=" in out and "one replica that serves the whole trace" in out


def test_a_study_from_before_trials_told_their_costs_goes_on(chat, reference, tmp_path):
    done = []
    question = reference.question
    before = sweep(question, out=tmp_path, progress=done.append, stop=lambda: max(done) >= 3)
    with sqlite3.connect(tmp_path / "study.sqlite") as database:
        database.execute("ALTER TABLE trials DROP COLUMN costs")
    result = sweep(question, out=tmp_path)
    assert result.table.drop(columns="step_costs").equals(reference.table.drop(columns="step_costs"))
    untold = set(before.table["number"])
    assert len(untold) == 3
    assert result.table["step_costs"].tolist() == ["" if at in untold else "roofline" for at in range(20)]


def test_without_a_service_level_none_is_spoken_of(capsys):
    command = ["sweep", "chat", "--limit", "20", "--costs", "roofline", "--workers", "1"]
    assert pagecast([*command, "--set", "block_size=16,64"]) == 0
    assert "SLO" not in capsys.readouterr().out
    assert pagecast([*command, "--set", "block_size=16,64", "--slo", "ttft_p99<10s", "--explain"]) == 0
    assert "Pareto-optimal replicas, of those that meet the SLO in " in capsys.readouterr().out


def test_the_slos_own_terms_are_shown_and_the_cheapest_is_among_the_optimal(capsys):
    command = ["sweep", "chat", "--limit", "60", "--costs", "roofline", "--workers", "1"]
    space = ["--set", "block_size=16,32,64", "--set", "max_num_seqs=16,64"]
    assert pagecast([*command, *space, "--slo", "ttft_p99<10s,tpot_p99<40ms", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["cheapest"]["number"] in [row["number"] for row in body["front"]]
    assert pagecast([*command, *space, "--slo", "ttft_p99<10s,tpot_p99<40ms", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "on 1 GPU: TTFT p99 " in out and ", TPOT p99 " in out.split("output tokens per s")[0]
    table = out.partition("Pareto-optimal replicas")[2].partition("what each knob")[0]
    assert "p99<40ms" in table and "p99<10s" not in table


def test_a_level_that_no_scenario_meets_is_told_and_exit_code_1(capsys):
    command = ["sweep", "chat", "--limit", "20", "--costs", "roofline", "--workers", "1"]
    assert pagecast([*command, "--set", "block_size=16,64", "--slo", "ttft_p99<1us"]) == 1
    out = capsys.readouterr().out
    assert "no scenario of the space meets ttft_p99<1us; the closest is block_size=" in out
    assert "`pagecast plan` tells what one replica takes, and how many it would need." in out
    assert pagecast([*command, "--set", "num_gpu_blocks=5,6", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["cheapest"] is None


def test_titles_of_tables_are_not_broken_on_a_narrow_terminal(capsys):
    command = ["sweep", "chat", "--limit", "40", "--costs", "roofline", "--workers", "1"]
    knobs = ["max_num_seqs=8,64", "block_size=16,32", "enable_prefix_caching=true,false"]
    assert pagecast([*command, *[part for knob in knobs for part in ("--set", knob)], "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    front = lines[next(i for i, line in enumerate(lines) if line.startswith("Pareto-optimal")) + 1 :]
    titles = [line[:22].rstrip() for line in front[: front.index("")]]
    expected = [
        "trial",
        "max num seqs",
        "block size",
        "enable prefix caching",
        "output tokens per s",
        "TTFT p99",
    ]
    assert titles[:6] == expected
    effects = lines[next(i for i, line in enumerate(lines) if line.startswith("what each knob")) :]
    heads = [" ".join(line.split()) for line in effects if line.startswith("knob")]
    assert set(heads) == {"knob share least mean at greatest mean at"}


def test_every_trial_is_shown_with_what_it_misses_and_the_cheapest_leaves_its_scenario(tmp_path, capsys):
    command = [
        "sweep",
        "chat",
        "--limit",
        "40",
        "--costs",
        "roofline",
        "--workers",
        "1",
        "--out",
        str(tmp_path),
    ]
    space = ["--set", "max_num_seqs=2,64", "--set", "gpu=H200,L4", "--model", "Qwen/Qwen3-8B"]
    assert pagecast([*command, *space, "--slo", "ttft_p99<2s,tpot_p99<40ms"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.partition("\n\n")[2].splitlines() if line[:1].isdigit()}
    assert set(rows) == {"0", "1", "2", "3"}
    assert sum(line.endswith(" best") for line in rows.values()) == 1
    assert any("misses ttft_p99 by " in line for line in rows.values())
    best = Scenario.load(tmp_path / "cheapest.yaml")
    assert (best.gpu, best.max_num_seqs) == ("H200", 64)


def test_the_cheapest_keeps_the_slo_when_the_load_goes_on() -> None:
    """As `plan` judges its rate (4.3 of 7.1/s here): forty requests are over before a queue shows."""
    trace, scenario = read("chat", limit=40), Scenario(gpu="L4", model="Qwen/Qwen3-0.6B")
    ask = SweepOptions(settings=("max_num_seqs=12,64",), slo="ttft_p90<3s,tpot_p90<80ms")
    question = SweepQuestion(trace, scenario, ask)
    alone, sure = sweep(question), sweep(question, confirm=keeps_rate)
    assert alone.cheapest is not None and alone.cheapest["max_num_seqs"] == 64
    assert sure.cheapest is None and not sure.table["lasts"].any()
    assert "breaks when the load goes on" in answer(sure)


def test_trials_that_share_a_replay_have_the_figures_of_their_own(chat, monkeypatch):
    knobs = ["block_size=16,64", "num_gpu_blocks=2000,6000,7000", "max_num_seqs=4,64,90"]
    question = asked(chat, knobs, slo=LEVEL)
    shared = sweep(question)
    assert shared.replayed == 18
    assert shared.replays < 14
    alone = replace(question.work(), shares=False)
    monkeypatch.setattr(SweepQuestion, "work", lambda self: alone)
    apart = sweep(question)
    assert apart.replays == 18
    assert shared.table.equals(apart.table)
