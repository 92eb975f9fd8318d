"""Parallel samples: a request asked for n answers is served as n requests with one prompt."""

import json
from pathlib import Path

import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.content import own_output, own_prompt
from pagecast.sim.replay.simulation import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.parallel import expand
from pagecast.traces.read import read

from .making import trace_of


def test_samples_share_the_prompt_and_have_answers_of_their_own() -> None:
    own = own_output(0)
    trace = expand(
        trace_of(
            [[], [(7, 0, 9)], [(own_prompt(0), 0, 5), (own, 0, 3)]],
            n=[3, 1, 2],
            output_content=[own, 8, -1],
            after=[-1, -1, 0],
        )
    )
    assert trace.requests["arrival_s"].tolist() == [0, 0, 0, 1, 2, 2]
    assert trace.requests["output_content"].tolist() == [own, -1, -1, 8, -1, -1]
    assert trace.requests["after"].tolist() == [-1, -1, -1, -1, 2, 2]
    assert trace.spans is not None
    assert [trace.spans.row(row) for row in range(4)] == [*[[(own_prompt(0), 0, 5)]] * 3, [(7, 0, 9)]]
    assert trace.spans.row(5) == [(own_prompt(0), 0, 5), (own, 0, 3)]
    assert trace.notes == ("2 requests ask for several samples: 6 are served in all",)


def test_later_rows_keep_what_they_quote() -> None:
    trace = expand(trace_of([[(1, 0, 4)], [], [(own_prompt(1), 0, 5), (1, 4, 2)]], n=[2, 1, 1]))
    assert trace.spans is not None
    assert trace.spans.row(3) == [(own_prompt(2), 0, 5), (1, 4, 2)]


def test_samples_of_a_file_find_the_first_ones_prompt(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"arrival_s": 0, "input_tokens": 100, "output_tokens": 20, "n": 4}) + "\n")
    scenario = Scenario(costs="roofline", num_gpu_blocks=100)
    result = replay(read(path), scenario, check_every=1)
    assert result.summary["completed"] == 4 and result.summary["output_tokens"] == 80
    assert result.requests["cached_tokens"].tolist() == [0, 96, 96, 96]
    assert result.summary["peak_kv_usage"] == (6 + 4 * 2) / 100


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("n", "words"), [(0, "less than 1"), (100_000_000, "more than 16,384")])
def test_samples_that_nobody_can_serve_are_refused_by_their_line(tmp_path: Path, n: int, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    request = {"arrival_s": 0, "input_tokens": 100, "output_tokens": 20}
    path.write_text(f"{json.dumps(request)}\n{json.dumps({**request, 'n': n})}\n")
    with pytest.raises(BadInput, match=f"line 2, field n: {n} is {words}"):
        read(path)


def test_samples_of_all_requests_together_are_bounded() -> None:
    with pytest.raises(BadInput, match="field n: 20,480,000 samples in all are more than the 20,000,000"):
        expand(trace_of([[]] * 1250, n=[16_384] * 1250))
