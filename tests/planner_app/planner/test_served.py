"""Requests that nobody served count against an SLO, wherever one is judged."""

import json

import numpy as np
import pandas as pd
import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.planning import plan
from pagecast.planner_app.planner.served import RequestCounts
from pagecast.planner_app.planner.slo import Slo
from pagecast.planner_app.planner.sweep.options import SweepOptions
from pagecast.planner_app.planner.sweep.question import SweepQuestion
from pagecast.planner_app.planner.sweep.study import sweep
from pagecast.planner_app.planner.sweep.study_view import answer
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.replay import replay
from pagecast.sim.replay.rejections import at_any_load, is_kind
from pagecast.sim.replay.replicates import summary_figures
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pagecast.traces.schema import Trace
from pagecast.traces.write import write

NAN = float("nan")
SCENARIO = Scenario(num_gpu_blocks=400, max_num_seqs=8, costs="roofline")


def requests(rows):
    """A table of requests from their state, TTFT, and reason."""
    table = pd.DataFrame(rows, columns=["state", "ttft_s", "reason"])
    done = table["state"] == "completed"
    return table.assign(
        first_token_s=table["ttft_s"],
        finished_s=5.0,
        e2e_s=np.where(done, 5.0, NAN),
        tpot_s=np.where(done, 0.01, NAN),
        queue_s=table["ttft_s"] / 2,
    )


def of_rate(per_s, count=240, **columns):
    """Requests at a steady rate, of 400 prompt tokens and 60 output tokens."""
    table = pd.DataFrame({"arrival_s": np.arange(count) / per_s, "input_tokens": 400, "output_tokens": 60})
    return Trace("steady", table.assign(**columns))


SERVED, SHED = ("completed", 0.5, ""), ("rejected", NAN, "predicted TTFT 3 s is above 1 s")
LEFT, LEFT_LATER = ("cancelled", NAN, ""), ("cancelled", 0.5, "")
TOO_LONG = ("rejected", NAN, "900 prompt + 200 output tokens exceed max_model_len 1000")


@pytest.mark.parametrize("lost", [SHED, LEFT])
def test_a_percentile_is_infinite_where_more_requests_than_it_leaves_out_were_not_served(lost):
    table = requests([SERVED] * 96 + [lost] * 4)
    for name in ("ttft", "e2e", "queue"):
        verdict = Slo.parse(f"{name}_p90<6s,{name}_p97<6s,{name}_mean<6s,{name}_max<6s").verdict(table)
        assert [term.holds for term in verdict.terms] == [True, False, False, False, True]
        assert np.isfinite(verdict.terms[0].value)
        assert [term.value for term in verdict.terms[1:-1]] == [np.inf] * 3
    assert Slo.parse("tpot_p99<20ms").verdict(table).holds  # the pace of those that were served


def test_a_percentile_between_a_served_and_an_unserved_request_is_infinite():
    table = requests([SERVED] * 3 + [SHED])
    terms = Slo.parse("ttft_p66<1s,ttft_p67<1s").verdict(table).terms
    assert [term.value for term in terms[:2]] == [0.5, np.inf]


def test_an_slo_needs_most_requests_to_be_served_whatever_it_bounds():
    """TPOT is of the requests that were served, so a bound on it alone holds where nearly all are shed."""
    few, most = (requests([SERVED] * served + [SHED] * (100 - served)) for served in (94, 95))
    slo = Slo.parse("tpot_p99<20ms")
    assert not slo.verdict(few).holds
    assert [term.text for term in slo.verdict(few).broken] == ["served>=0.95"]
    assert slo.verdict(most).holds
    assert Slo.parse("tpot_p99<20ms,goodput(tpot<20ms)>0.5").verdict(few).holds


@pytest.mark.parametrize("command", ["plan", "sweep", "tune"])
def test_no_command_recommends_what_serves_few(command, tmp_path, capsys):
    trace = read("chat", limit=80)
    trace.requests["cancel_after_s"] = 0.02  # nobody waits longer for a first token
    path = tmp_path / "impatient.parquet"
    write(trace, str(path))
    scenario = ["--gpu", "L4", "--max-model-len", "16384", "--costs", "roofline"]
    scenario += ["--slo", "tpot_p95<1s", "--workers", "1", "--json"]
    options = {
        "plan": ["plan", str(path), "--router", "round-robin", "--most-replicas", "1"],
        "sweep": ["sweep", str(path), "--set", "max_num_seqs=8,64", "--price", "L4=1"],
        "tune": ["tune", "block-size", str(path), "--values", "16,32"],
    }
    code = run([*options[command], *scenario])
    answer = json.loads(capsys.readouterr().out)
    if command == "plan":
        assert code == 1
        assert answer["routers"][0]["replicas"] is None
    elif command == "sweep":
        assert answer["cheapest"] is None
    else:
        assert not any(row["meets"] for row in answer["settings"])


def test_a_client_that_leaves_after_the_first_token_has_its_ttft_and_no_e2e():
    verdict = Slo.parse("ttft_max<1s,e2e_max<6s").verdict(requests([SERVED, LEFT_LATER]))
    assert [term.value for term in verdict.terms] == [0.5, 5.0]


def test_requests_that_are_too_long_at_any_load_are_left_out_and_counted():
    table = requests([SERVED] * 5 + [TOO_LONG, LEFT, LEFT_LATER, SHED])
    assert Slo.parse("ttft_max<1s").verdict(table[:6]).holds
    counts = RequestCounts.of(table)
    assert counts == RequestCounts(9, 5, 2, 1, 2, 2)
    assert counts.sentence == (
        "of 9 requests 5 completed, 2 rejected (1 at any load), 2 cancelled (1 before the first token)"
    )
    assert RequestCounts.of(table[:5]).sentence == ""


@pytest.mark.parametrize(
    ("fields", "tokens", "always"),
    [
        ({"max_model_len": 300}, 400, True),
        ({}, 40_000, True),
        ({"engine": "sglang", "block_size": 1}, 40_000, True),
        (
            {"engine": "trtllm-static", "enable_chunked_prefill": False, "max_num_batched_tokens": 300},
            400,
            True,
        ),
        ({"tenants": "a:blocks=5"}, 400, True),
        ({"shed_ttft_s": 1e-6}, 400, False),
    ],
)
def test_rejections_for_length_are_told_from_those_for_load(fields, tokens, always):
    trace = of_rate(10.0, 4, input_tokens=tokens, tenant="a")
    result = replay(trace, Scenario.make({**SCENARIO.flat(), **fields}, "test"))
    reasons = set(result.requests["reason"])
    assert reasons
    assert {at_any_load(reason) for reason in reasons} == {always}
    assert all(is_kind(reason) for reason in result.summary["rejected_reasons"])


def test_a_request_whose_replica_was_lost_is_unserved():
    settings = FleetSettings.model_validate(
        {"incidents": [{"at_s": 1.0, "replica": "replica-0"}], "retries": {"most": 0}}
    )
    result = replay_fleet(of_rate(20.0, 40), SCENARIO, settings)
    counts = RequestCounts.of(result.requests)
    assert counts.unserved == counts.rejected > 0
    assert not Slo.parse("ttft_p99<1min").verdict(result).holds


def test_a_summary_with_requests_that_did_not_complete_gets_no_verdict_on_ttft():
    result = replay(of_rate(10.0, cancel_after_s=1e-3), SCENARIO)
    figures = summary_figures(result)
    with pytest.raises(BadInput, match="no summary tells who was served"):
        Slo.parse("ttft_p99<1s").verdict(figures)
    assert not Slo.parse("ttft_p99<1s").verdict(result).holds


@pytest.mark.parametrize("slo", ["ttft_p99<1s", "tpot_p99<1s", "ttft_p50<1s"])
@pytest.mark.parametrize("kind", ["rate", "concurrency"])
def test_a_plan_stays_below_the_load_at_which_requests_are_shed(slo, kind):
    """Who is shed has no TTFT: percentiles over the others alone stay below any bound, at any load."""
    shedding = SCENARIO.changed(shed_ttft_s=0.5)
    result = plan(
        of_rate(4.0),
        shedding,
        PlanOptions(slo=slo, kinds=[kind], replicates=0, explain=False, most_requests=240),
    ).answers[kind]
    counts = result.at.counts
    assert counts.unserved <= 0.05 * counts.requests
    assert not result.at_limit
    above = [outcome for outcome in result.tried if outcome.amount > result.value]
    assert above and not any(outcome.holds for outcome in above)


def test_a_plan_counts_clients_that_gave_up_waiting():
    impatient = of_rate(4.0, cancel_after_s=1.0)
    result = plan(
        impatient,
        SCENARIO,
        PlanOptions(slo="ttft_p90<2s", kinds=["rate"], replicates=0, explain=False, most_requests=480),
    ).answers["rate"]
    counts = result.at.counts
    assert result.value is not None
    assert counts.unserved <= 0.1 * counts.requests
    assert not result.at_limit


def test_the_plan_of_a_command_tells_how_requests_ended(tmp_path, capsys, planned_once):
    path = tmp_path / "steady.jsonl"
    write(of_rate(4.0, input_tokens=[2000] * 5 + [400] * 235), path)
    fields = [
        "--costs",
        "roofline",
        "--num-gpu-blocks",
        "400",
        "--max-num-seqs",
        "8",
        "--max-model-len",
        "1000",
    ]
    command = ["plan", str(path), *fields, "--slo", "ttft_p90<1s", "--replicates", "0", "--workers", "1"]
    command += ["--most-requests", "480"]
    assert run([*command, "--shed-ttft-s", "0.5", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "5 of 240 requests (2.1%) are rejected at any load" in text
    assert " completed, " in text
    assert " rejected (" in text
    assert run([*command, "--shed-ttft-s", "0.5", "--json"]) == 0
    at = json.loads(capsys.readouterr().out)["rate"]["at"]
    assert at["completed"] + at["rejected"] + at["cancelled"] == at["requests"]
    assert at["rejected_at_any_load"] > 0


def test_a_fleet_that_sheds_is_too_small(tmp_path, capsys):
    path = tmp_path / "busy.jsonl"
    write(of_rate(60.0), path)
    fields = ["--costs", "roofline", "--num-gpu-blocks", "400", "--max-num-seqs", "8", "--shed-ttft-s", "0.5"]
    command = [
        "plan",
        str(path),
        *fields,
        "--slo",
        "ttft_p99<1s",
        "--router",
        "least-loaded",
        "--workers",
        "1",
    ]
    assert run([*command, "--most-replicas", "1"]) == 1
    assert "least-loaded: of 240 requests " in capsys.readouterr().out
    assert run([*command, "--json"]) == 0
    (router,) = json.loads(capsys.readouterr().out)["routers"]
    assert router["replicas"] > 1
    assert router["counts"]["unserved"] <= 2


def test_a_check_fails_where_requests_are_shed_and_says_how_many(tmp_path, capsys):
    write(of_rate(60.0), tmp_path / "busy.jsonl")
    file = tmp_path / "check.yaml"
    file.write_text(
        "num_gpu_blocks: 400\nmax_num_seqs: 8\ncosts: roofline\nshed_ttft_s: 0.5\n"
        "check: {trace: busy.jsonl, slo: 'ttft_p99<1s'}\n"
    )
    assert run(["check", "--scenario", str(file)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "FAILED ttft_p99 1 replay infinite <1s requests were not served" in text
    assert "note: of 240 requests " in text
    assert run(["check", "--scenario", str(file), "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["counts"]["unserved"] == body["counts"]["rejected"] > 0
    assert body["checks"][0]["numbers"]["value"] is None


@pytest.mark.parametrize(
    ("fields", "columns", "words"),
    [
        ({"shed_ttft_s": 0.5}, {}, "the load is too high, and max_num_seqs="),
        ({}, {"cancel_after_s": 0.3}, " requests are not served)"),
        ({"max_model_len": 300}, {}, "more HBM or a longer max_model_len would"),
    ],
)
def test_a_sweep_without_an_answer_says_why(fields, columns, words):
    scenario = SCENARIO.changed(**fields)
    space = ["max_num_seqs=4,8"]
    question = SweepQuestion(
        of_rate(600.0, **columns), scenario, SweepOptions(settings=space, slo="ttft_p99<1s")
    )
    result = sweep(question)
    assert result.cheapest is None
    assert words in answer(result)
