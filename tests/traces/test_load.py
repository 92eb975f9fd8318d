"""Loads: the same requests as `vllm bench serve` makes, and how they are sent."""

import json
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay.held_clients import clients_of
from pagecast.traces.load import Load
from pagecast.traces.read import read
from pagecast.traces.recipe import another, play
from pagecast.traces.schema import Trace, table
from pagecast.traces.write import write

RECORDED = json.loads((Path(__file__).parent / "recorded" / "vllm_bench.json").read_text())["cases"]


def load_of(case: dict[str, Any]) -> Load:
    texts = {
        name: json.dumps(case[name]) for name in ("input_len", "output_len", "range_ratio") if name in case
    }
    burstiness = {"burstiness": float(case["burstiness"])} if "burstiness" in case else {}
    rest = {name: value for name, value in case.items() if name != "seed"}
    return Load(**{**rest, **texts, **burstiness})


def prefixes(trace: Trace) -> list[int]:
    """For each request the first one that has its prefix."""
    contents = [trace.spans.row(row)[0][0] if trace.spans else 0 for row in range(len(trace))]
    return [contents.index(content) for content in contents]


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: json.dumps(record["case"]))
def test_requests_are_those_of_vllms_load_tool_at_the_same_seed(record: dict[str, Any]) -> None:
    trace = load_of(record["case"]).trace(record["case"]["seed"])
    measured = trace.integers("warmup") == 0
    assert trace.integers("input_tokens")[measured].tolist() == record["inputs"]
    assert trace.integers("output_tokens")[measured].tolist() == record["outputs"]
    if "warmup" not in record["case"]:
        assert prefixes(trace) == record["first_of_prefix"]
    assert bool(trace.notes) == (len(trace) < record["case"]["num_prompts"])
    if (
        "times" in record and "num_prefixes" not in record["case"]
    ):  # that data set draws its words from the generator of times
        np.testing.assert_allclose(trace.seconds("arrival_s"), record["times"], atol=2e-9)


@pytest.mark.parametrize(
    "record",
    [record for record in RECORDED if "sent" in record],
    ids=lambda record: json.dumps(record["case"]),
)
def test_requests_are_held_back_and_warmed_up_as_by_vllms_load_tool(record: dict[str, Any]) -> None:
    trace = load_of(record["case"]).trace(record["case"]["seed"])
    took_s = trace.integers("input_tokens") * 1.009e-3 + trace.integers("output_tokens") * 3.017e-3
    clients, under_way, sent = clients_of(trace), [], []
    while len(sent) < len(trace) or under_way:
        now = min([clients.next_ns, *(end for end, _ in under_way[:1])])
        while under_way and under_way[0][0] == now:
            clients.ended(heappop(under_way)[1], now)
        while (taken := clients.take_arrival(now)) is not None:
            row, at = taken
            sent.append(at / 1e9)
            heappush(under_way, (at + round(took_s[row] * 1e9), row))
    np.testing.assert_allclose(sent, record["sent"], atol=1e-7)


OTHERS = [
    case
    for tool in ("aiperf", "guidellm")
    for case in json.loads((Path(__file__).parent / "recorded" / f"{tool}.json").read_text())["cases"]
]


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: json.dumps(case["load"]))
def test_requests_are_those_of_aiperf_and_guidellm_in_distribution(case: dict[str, Any]) -> None:
    load = Load.of({"input_len": "9", "output_len": "9", "num_prompts": 40_000, **case["load"]})
    if "opens" in case:  # the places of a concurrency that grows
        clients = clients_of(replace(load, num_prompts=len(case["opens"])).trace())
        opens = [clients.take_arrival(clients.next_ns)[1] / 1e9 for _ in case["opens"]]
        assert opens == pytest.approx(case["opens"])
        return
    trace = load.trace(11)
    columns = {"gaps": lambda: np.diff(trace.seconds("arrival_s"), prepend=0.0)}
    drawn = columns.get(case["column"], lambda: trace.integers(case["column"]))()
    assert drawn.mean() == pytest.approx(case["mean"], rel=0.02)
    if len(set(case["quantiles"])) == 1:
        np.testing.assert_allclose(drawn, case["mean"])
        return
    # Whole numbers lie on the quantiles: as much is below them as may be, at the least and at the most.
    shares = np.arange(1, len(case["quantiles"]) + 1) / (len(case["quantiles"]) + 1)
    below = np.array([(drawn < value).mean() for value in case["quantiles"]])
    upto = np.array([(drawn <= value).mean() for value in case["quantiles"]])
    assert (below < shares + 0.012).all() and (upto > shares - 0.012).all()


def test_a_concurrency_and_a_seed_make_other_requests_of_the_same_load() -> None:
    trace = Load(input_len="uniform:10-99", output_len="5", num_prompts=20, concurrency=4).trace(3)
    assert trace.concurrency is not None
    assert trace.concurrency.most == 4
    other = another(trace, 0)
    assert other is not None
    assert other.concurrency == trace.concurrency
    assert other.integers("input_tokens").tolist() != trace.integers("input_tokens").tolist()
    again = play(trace.recipe or {}, 3)
    assert again.integers("input_tokens").tolist() == trace.integers("input_tokens").tolist()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_load_comes_back_from_a_file(form: str, tmp_path: Path) -> None:
    load = Load(input_len="50", output_len="9", num_prompts=6, concurrency=2, max_tokens="3x", warmup=2)
    trace, path = load.trace(), tmp_path / f"load.{form}"
    write(trace, path)
    back = read(path)
    assert back.concurrency == trace.concurrency
    assert back.requests.equals(trace.requests)
    assert back.integers("max_tokens").tolist() == [27] * 8
    assert back.integers("warmup").tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_turns_of_a_session_follow_one_another_where_a_load_sends_them() -> None:
    columns = {"arrival_s": [0.0, 1.0, 2.0, 3.0], "input_tokens": [9] * 4, "output_tokens": [1] * 4}
    trace = Trace("sessions", table({**columns, "session": ["a", "b", "a", "b"]}))
    sent = Load(request_rate=2.0, burstiness=float("inf")).sent(trace)
    assert sent.integers("after").tolist() == [-1, -1, 0, 1]
    np.testing.assert_allclose(sent.seconds("arrival_s")[:2], [0.5, 1.0])
    assert np.isnan(sent.seconds("arrival_s")[2:]).all()


def test_prompts_that_are_sent_again_are_equal_and_others_are_not() -> None:
    trace = Load(input_len="40", output_len="2", num_prompts=6, distinct_prompts=2).trace()
    assert prefixes(trace) == [0, 1, 0, 1, 0, 1]
    passes = Load(repeat_prompts=2).sent(Load(input_len="40", output_len="2", num_prompts=2).trace())
    assert sorted(prefixes(passes)) == [0, 0, 1, 1]
    assert sorted(passes.integers("warmup").tolist()) == [0, 0, 1, 1]


def test_max_tokens_are_at_least_the_output() -> None:
    trace = Load(input_len="8", output_len="uniform:1-100", num_prompts=50).trace()
    sent = Load(max_tokens="50").sent(trace)
    outputs = trace.integers("output_tokens")
    assert sent.integers("max_tokens").tolist() == np.maximum(outputs, 50).tolist()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"burstiness": 2.0}, "burstiness has no effect without request_rate"),
        ({"num_prefixes": 2}, "num_prefixes has no effect without prefix_len"),
        ({"ramp_up_strategy": "linear"}, "give ramp_up_start_rps and ramp_up_end_rps"),
        ({"range_ratio": "1"}, "give a number from 0 to below 1"),
        ({"range_ratio": "0.5", "input_len": "uniform:1-9"}, "range_ratio is for a length that is a number"),
        ({"max_tokens": "0.5x", "input_len": "9"}, "factor of at least 1"),
        ({"prefix_len": 8, "num_prefixes": 9, "num_prompts": 8}, "give at least one for each"),
    ],
)
def test_loads_that_cannot_be_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        Load(**fields).trace()


def test_a_load_that_makes_requests_is_not_for_a_trace() -> None:
    with pytest.raises(BadInput, match="leave input_len or the trace out"):
        Load(input_len="9").sent(replace(Load(input_len="9", num_prompts=1).trace(), recipe=None))


def test_a_generated_trace_that_is_sent_is_drawn_again_by_its_generator() -> None:
    sent = Load(concurrency=3, max_tokens="2x").sent(
        Load(input_len="uniform:1-99", num_prompts=9).trace(1), 1
    )
    other = another(sent, 0)
    assert other is not None
    assert other.concurrency == sent.concurrency
    assert other.integers("input_tokens").tolist() != sent.integers("input_tokens").tolist()
    assert other.integers("max_tokens").tolist() == (2 * other.integers("output_tokens")).tolist()
