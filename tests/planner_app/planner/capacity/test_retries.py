"""Loads from traces with retries, of which only those that are needed are sent."""

import json

import numpy as np
import pandas as pd
import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.planner.capacity.lasting import Lasting, serve_long
from pagecast.planner_app.planner.capacity.users import Load, serve
from pagecast.sim.scenario import Scenario
from pagecast.traces.operations import select
from pagecast.traces.schema import Trace
from pagecast.traces.write import write

SCENARIO = Scenario(num_gpu_blocks=2000, max_num_seqs=16, costs="roofline")
COUNT = 60


def is_impatient(number):
    return number % 4 == 1


def with_retries(session=True):
    """A request each second, a retry after each; a quarter of the clients give up and need theirs."""
    rows = []
    for number in range(COUNT):
        patience_s = 0.05 if is_impatient(number) else np.nan
        rows += [
            {"arrival_s": float(number), "after": -1, "retry": 0, "cancel_after_s": patience_s},
            {"arrival_s": np.nan, "after": 2 * number, "retry": 1, "cancel_after_s": np.nan},
        ]
    table = pd.DataFrame(rows).assign(input_tokens=400, output_tokens=60, gap_s=0.5)
    if session:
        table["session"] = [f"s{row // 2}" for row in range(2 * COUNT)]
    return Trace("retries", table)


def only_needed(trace):
    """The same trace without the retries that are not sent."""
    rows = [row for row in range(2 * COUNT) if row % 2 == 0 or is_impatient(row // 2)]
    return select(trace, np.array(rows))


@pytest.mark.parametrize("session", [True, False])
@pytest.mark.parametrize(
    "load", [Load("rate", 1.0), Load("concurrency", 4), Load("users", 4, 1.0)], ids=lambda load: load.kind
)
def test_retries_that_are_not_sent_change_no_load(load, session):
    trace = with_retries(session)
    served, expected = (serve(work, SCENARIO, load) for work in (trace, only_needed(trace)))
    assert len(served.result.requests) == COUNT + COUNT // 4
    if load.kind != "users":  # whose think times are drawn row by row
        assert (served.from_s, served.to_s) == (expected.from_s, expected.to_s)
        columns = ["arrival_s", "finished_s", "state"]
        assert served.measured[columns].to_numpy().tolist() == expected.measured[columns].to_numpy().tolist()
    assert served.kept_up == expected.kept_up
    assert len(served.measured) > COUNT // 2
    assert len(served.ended)


def test_a_chain_of_nothing_but_a_retry_that_is_not_sent_is_no_session():
    trace = with_retries()
    trace.requests["session"] = [f"s{row}" for row in range(2 * COUNT)]
    for load in (Load("rate", 1.0), Load("concurrency", 4)):
        served = serve(trace, SCENARIO, load)
        assert 0 < served.from_s < served.to_s
        assert served.to_s == served.result.requests.set_index("row")["arrival_s"][2 * COUNT - 2]


@pytest.mark.parametrize("rate", [1.0, 400.0])
def test_a_long_load_runs_away_with_retries_as_it_does_without(rate):
    trace = with_retries()
    works = [Lasting.of(part, rate, 2 * len(part)) for part in (trace, only_needed(trace))]
    lasted, expected = (serve_long(work, SCENARIO, Load("rate", rate)) for work in works)
    assert (lasted.served is None) is (expected.served is None) is (rate > 1)
    assert (lasted.growth, lasted.most_ended_per_s) == (expected.growth, expected.most_ended_per_s)


def test_plan_and_tune_take_traces_with_retries(tmp_path, capsys):
    path = str(tmp_path / "retries.jsonl")
    write(with_retries(), path)
    options = ("--costs", "roofline", "--num-gpu-blocks", "400", "--max-num-seqs", "16", "--workers", "1")
    plan = ["plan", path, *options, "--slo", "ttft_p99<1s", "--replicates", "0", "--most-requests", "150"]
    assert run([*plan, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["concurrency"]["value"] >= 1
    assert body["rate"]["value"] > body["requests_per_s"] == pytest.approx(2)
    assert any("60 retries" in note and "only where they are needed" in note for note in body["notes"])
    assert run(["tune", "block-size", path, *options, "--values", "16,32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommended"] in (16, 32)
