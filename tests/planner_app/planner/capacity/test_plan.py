"""`pagecast plan`: one answer wherever it is computed, said in words a user can act on."""

import json
import subprocess
import sys

import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.commands.plan_view import show, show_answer
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.planning import plan, steps
from pagecast.planner_app.planner.execution.executor import executor
from pagecast.planner_app.planner.execution.options import Many
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario
from pagecast.traces.bundled import resolve
from pagecast.traces.read import read

SLO = "ttft_p99<2s,tpot_p95<20ms"
SMALL = ("--limit", "40", "--most-requests", "40", "--num-gpu-blocks", "3000", "--max-num-seqs", "16")


def pagecast(*arguments, capsys):
    code = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def planned(**where):
    updates = []
    with executor(Many(**where)) as workers:
        result = plan(
            read(resolve("rag"), limit=40),
            Scenario(num_gpu_blocks=3000, max_num_seqs=8),
            PlanOptions(slo=SLO, most_requests=40),
            run=workers,
            progress=updates.append,
        )
    assert updates[-1] == steps(2, 5)
    assert updates == sorted(updates)
    return result


def figures(result):
    return {key: value for key, value in result.to_dict().items() if key != "wall_s"}


@pytest.fixture(scope="module")
def by_one():
    return planned(workers=1)


@pytest.fixture(scope="module")
def alone(by_one):
    return figures(by_one)


@pytest.mark.slow
def test_eight_workers_answer_as_one_does(alone):
    assert figures(planned(workers=8)) == alone


@pytest.mark.slow
def test_a_dask_cluster_answers_as_one_process_does(alone):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        assert figures(planned(cluster=cluster.scheduler_address)) == alone


def test_the_answer_keeps_the_level_and_one_more_does_not(alone):
    for kind in ("concurrency", "rate"):
        answer = alone[kind]
        assert answer["at"]["holds"]
        assert not answer["beyond"]["holds"]
        assert answer["at"]["amount"] == pytest.approx(answer["value"])
        assert answer["low"] <= answer["value"] <= answer["high"]
    assert alone["replays"] >= 12


def test_progress_can_stop_a_plan():
    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan(read(resolve("chat"), limit=30), Scenario(), PlanOptions(slo=SLO, replicates=0), progress=stop)


def test_the_table_says_what_is_admitted_what_breaks_and_what_binds_and_json_likewise(capsys, planned_once):
    code, out, err = pagecast(
        "plan", "rag", *SMALL, "--slo", SLO, "--replicates", 0, "--workers", 1, "--explain", capsys=capsys
    )
    assert (code, err) == (0, "")
    for words in (
        "admissible concurrency",
        "highest request rate",
        "requests/s",
        " binds: at 25% more load ",
        "room by arithmetic: ",
        "not <",
        "replays",
    ):
        assert words in out
    code, out, err = pagecast(
        "plan", "rag", *SMALL, "--slo", SLO, "--replicates", 0, "--workers", 1, "--json", capsys=capsys
    )
    assert (code, err) == (0, "")
    body = json.loads(out)
    assert body["concurrency"]["value"] >= 1
    assert body["concurrency"]["binding"]["limit"] in ("KV blocks", "batch size", "token budget", "compute")
    assert body["envelope"]["concurrency"] >= 1


def test_an_impossible_level_is_one_line_that_tells_the_unloaded_latency(capsys):
    code, out, _ = pagecast(
        "plan", "rag", *SMALL, "--slo", "ttft_p99<1us", "--replicates", 0, "--workers", 1, capsys=capsys
    )
    assert code == 1
    lines = [line for line in out.splitlines() if line.startswith("admissible concurrency")]
    assert len(lines) == 1
    assert "none; ttft_p99<1us can't be kept: ttft_p99 is " in lines[0]
    assert lines[0].endswith("ms with one user alone")


def test_requests_that_arrive_together_are_named_where_no_rate_holds(tmp_path, capsys):
    path = tmp_path / "bursts.csv"
    rows = [f"{burst},{8000},8" for burst in range(5) for _ in range(6)]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    code, out, _ = pagecast(
        "plan", path, *SMALL, "--slo", "ttft_p99<1s", "--replicates", 0, "--explain", capsys=capsys
    )
    assert code == 1
    assert "up to 6 requests of this trace arrive at the same instant" in " ".join(out.split())


def test_a_level_that_never_breaks_says_how_far_it_was_tried(capsys):
    code, out, _ = pagecast(
        "plan",
        "rag",
        *SMALL,
        "--slo",
        "e2e_p99<600min",
        "--max-preemption-rate",
        100,
        "--replicates",
        0,
        "--most-users",
        30,
        "--workers",
        1,
        capsys=capsys,
    )
    assert code == 0
    assert "the SLO still holds at 30 users, the most that was tried" in out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--max-model-len", "5"], "tokens exceed max_model_len 5"),
        (["--num-gpu-blocks", "4"], "the pool has 4"),
    ],
)
def test_a_server_that_takes_no_request_is_one_line_that_says_why(options, reason, capsys):
    command = ["plan", "chat", "--limit", "20", "--slo", "ttft_p99<2s", *options]
    code, out, err = pagecast(*command, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "none of its 20 requests can be served" in err and reason in err


def test_how_many_are_rejected_is_told_of_the_whole_trace():
    trace = read(resolve("chat"), limit=40)
    longest = int((trace.requests["input_tokens"] + trace.requests["output_tokens"]).max())
    result = plan(
        trace,
        Scenario(max_model_len=longest - 1),
        PlanOptions(slo=SLO, kinds=("concurrency",), replicates=0, explain=False, most_requests=40),
    )
    assert "1 of 40 requests (2.5%) are rejected" in result.rejects


def test_the_answer_is_one_screen_that_says_what_to_buy_what_breaks_and_how_sure_it_is(by_one, capsys):
    show_answer(read("rag", limit=40), by_one)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 12 and max(map(len, lines)) <= 100
    answer = by_one.concurrency
    assert lines[1].endswith(", SLO ttft_p99<2s,tpot_p95<20ms")
    assert lines[2].startswith("take ") and " for 5.36 requests/s" in lines[2]
    assert any(line.startswith(f"admissible concurrency (closed loop){answer.value:8.0f}") for line in lines)
    broken = answer.beyond.broken[0].text.partition("<")[0]
    assert any(line.startswith(f"at {answer.beyond.amount:.0f} user") and broken in line for line in lines)
    assert any("step times ±2% (90%)" in line for line in lines)
    assert "--explain tells all" in lines[-1]


def test_few_draws_are_named_and_doubted(by_one, capsys):
    show(by_one)
    out = capsys.readouterr().out
    assert "90% interval: from 5 draws of costs, noise and traffic" in out
    assert "Their width may be off by a factor of 2.4" in out


def test_the_rate_is_said_to_have_lasted(by_one, capsys):
    show(by_one)
    rate = by_one.answers["rate"]
    assert (
        "the highest request rate was tried on a long load: 40 requests repeated" in capsys.readouterr().out
    )
    assert 2 * 40 - 2 <= rate.at.requests <= 4 * 40 + 2  # of up to six times as many, two thirds at most
    assert [term.text for term in rate.at.terms][-1] == "backlog_growth<=0.2"
    assert rate.at.requests_per_s == pytest.approx(rate.value, rel=0.05)
    tried = [(outcome.amount, outcome.holds) for outcome in rate.tried]
    assert all(holds == (amount <= rate.value) for amount, holds in tried)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--slo", "ttft_q99<2s"], "SLO term 'ttft_q99<2s': 'q99' is no statistic"),
        (["--slo", "ttft_p99<2s", "--replicates", "3"], "replicates is 3"),
        (["--slo", "ttft_p99<2s", "--most-users", "0"], "most-users"),
        (
            ["--slo", "ttft_p99<2s", "--max-preemption-rate", "inf"],
            "--max-preemption-rate is inf; it must be a finite number",
        ),
        (["--slo", "ttft_p99<2s", "--think-time", "-1"], "think-time"),
        (["--slo", "ttft_p99<2s", "--report", "/nowhere/at/all.html"], "--report"),
        ([], "--slo"),
    ],
)
def test_a_bad_option_is_one_line_with_a_way_out(options, words, capsys):
    code, out, err = pagecast("plan", "chat", "--limit", 20, *options, capsys=capsys)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_a_rate_asked_of_a_trace_without_times_is_refused():
    trace = read(resolve("chat"), limit=1)
    with pytest.raises(BadInput, match="start at once"):
        plan(trace, Scenario(), PlanOptions(slo=SLO, kinds=("rate",), replicates=0))


def test_help_of_other_commands_loads_no_planner():
    code = (
        "import sys; from pagecast.planner_app.cli import run; run(['--help']); "
        "sys.exit('pagecast.planner_app.planner.capacity.planning' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_rate_beyond_which_only_the_queue_grows_lies_within_its_interval():
    """Brief loads, in which no queue has time to grow, gave 22.7 to 42.4 requests/s for 22.7."""
    result = plan(
        read(resolve("chat")),
        Scenario(gpu="H100", costs="measured"),
        PlanOptions(slo="ttft_p99<2s,tpot_p95<50ms"),
    ).answers["rate"]
    assert result.low < 0.95 * result.value and 1.05 * result.value < result.high < 1.6 * result.value
