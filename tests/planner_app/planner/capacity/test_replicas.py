"""Replicas for a rate: whole ones, and never fewer than one replica's highest rate allows."""

import json

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
    assert answer.says == "100 requests/s take 10 replicas (90%: 8 to 13), 10 requests/s each at most"
    assert replicas(100.0, 10.0, (0.0, 12.5), 1).high is None


def test_gpus_are_told_where_a_replica_has_several():
    assert "take 1 replica, 4 GPUs, 8 requests/s each" in replicas(5.0, 8.0, (None, None), 4).says


SMALL = [
    "chat",
    "--limit",
    "40",
    "--most-requests",
    "40",
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
    assert run(["plan", *SMALL, "--replicas-for", "1000000"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("replicas: ")]
    assert line.startswith("replicas: 1,000,000 requests/s take ")
    assert line.endswith("if sessions are spread evenly and each keeps to its replica")


def test_no_rate_to_tell_replicas_for_is_refused(capsys):
    assert run(["plan", *SMALL, "--replicas-for", "0"]) == 2
    assert "the rate to tell replicas for is 0.0; it must be above 0" in capsys.readouterr().err


def test_a_plan_says_first_what_is_never_served(capsys):
    assert run(["plan", *SMALL, "--num-gpu-blocks", "100"]) == 0
    line = capsys.readouterr().out.splitlines()[2]
    assert " requests (" in line and "are rejected at any load, and latencies are of the others" in line
