"""Replicas for a rate: whole ones, and never fewer than one replica's highest rate allows."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.planner_app.cli import run
from pagecast.planner_app.planner.capacity.replicas import replicas

rates = st.floats(0.01, 1000)


@given(rates, rates)
def test_just_enough_take_the_rate(wanted, each):
    answer = replicas(wanted, each, (None, None), 2)
    assert answer.count * each >= wanted * (1 - 1e-6)
    assert answer.count == 1 or (answer.count - 1) * each < wanted
    assert (answer.low, answer.high, answer.gpus) == (None, None, 2 * answer.count)


def test_a_rate_that_goes_into_it_evenly_takes_no_replica_more():
    assert replicas(0.3, 0.1, (None, None), 1).count == 3


def test_the_interval_is_of_the_rate_of_one():
    answer = replicas(100.0, 10.0, (8.0, 12.5), 1)
    assert (answer.low, answer.count, answer.high) == (8, 10, 13)
    assert answer.sentence == (
        "100 requests/s take 10 replicas (90%: 8 to 13), 10 requests/s each at most; "
        "13 at the low end (8/s, 4% spare)"
    )
    assert "take 13 replicas, not 10: plan for 13" in answer.warning
    assert answer.to_dict()["spare_at_low"] == pytest.approx(0.04)
    assert replicas(100.0, 10.0, (0.0, 12.5), 1).high is None


def test_a_low_end_with_little_to_spare_is_pointed_out():
    tight, roomy = replicas(8.0, 13.2, (8.23, 18.3), 4), replicas(8.0, 13.2, (9.2, 18.3), 4)
    assert tight.sentence == (
        "8 requests/s take 1 replica, 4 GPUs, 13.2 requests/s each at most; "
        "1 at the low end (8.23/s, 3% spare)"
    )
    assert "1 replica can take only 3% more than 8 requests/s" in tight.warning
    assert roomy.warning == ""


def test_gpus_are_told_where_a_replica_has_several():
    assert "take 1 replica, 4 GPUs, 8 requests/s each" in replicas(5.0, 8.0, (None, None), 4).sentence


SMALL = [
    "chat",
    "--limit",
    "40",
    "--most-requests",
    "40",
    "--most-users",
    "8",
    "--slo",
    "ttft_p99<2s",
    "--replicates",
    "0",
    "--workers",
    "1",
]


def test_a_plan_tells_the_replicas_for_the_traces_rate_or_one_that_is_given(capsys):
    assert run(["plan", *SMALL, "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own["replicas"]["requests_per_s"] == own["requests_per_s"]
    assert own["replicas"]["each"] == own["rate"]["value"]
    assert run(["plan", *SMALL, "--replicas-for", "1000000", "--explain"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("replicas: ")]
    assert line.startswith("replicas: 1,000,000 requests/s take ")
    assert line.endswith("if sessions are spread evenly and each keeps to its replica")


def test_no_rate_to_tell_replicas_for_is_refused(capsys):
    assert run(["plan", *SMALL, "--replicas-for", "0"]) == 2
    assert "--replicas-for is 0.0; it must be above 0" in capsys.readouterr().err


def test_a_plan_says_first_what_is_never_served(capsys):
    assert run(["plan", *SMALL, "--num-gpu-blocks", "100", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("SLO: "))
    assert " requests (" in lines[at + 1]
    assert "are rejected at any load, and latencies are of the others" in lines[at + 1]


def test_a_price_gives_dollars_per_hour_and_per_million_output_tokens(capsys, planned_once):
    priced = [*SMALL, "--rate", "4", "--price", "H200=3.6", "--tensor-parallel-size", "2"]
    assert run(["plan", *priced, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["requests_per_s"] == pytest.approx(4)
    cost, at = body["cost"], body["rate"]["at"]
    assert cost["usd_per_replica_hour"] == 7.2
    assert cost["usd_per_hour"] == pytest.approx(7.2 * body["replicas"]["count"])
    tokens_per_s = 4 * at["output_tokens_per_s"] / at["requests_per_s"]
    assert cost["usd_per_million_output_tokens"] == pytest.approx(
        cost["usd_per_hour"] / 3600 / tokens_per_s * 1e6
    )
    assert run(["plan", *priced, "--explain"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cost: ")]
    assert line.startswith(f"cost: ${cost['usd_per_hour']:.2f} per hour for ")
    assert f"${cost['usd_per_million_output_tokens']:.2f} per million output tokens at 4 requests/s" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--price", "L40S=1"), "no price for H200"),
        (("--price", "H200=0"), "a price is above 0"),
        (("--price", "H200"), "write GPU=USD_PER_GPU_HOUR"),
        (("--rate", "0"), "--rate is 0.0; it must be above 0"),
        (("--rate", "4", "--speedup", "2"), "both set the load; give one of them"),
    ],
)
def test_a_price_or_rate_that_cannot_be_used_is_one_line(options, words, capsys):
    assert run(["plan", *SMALL, *options]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
