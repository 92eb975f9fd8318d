"""Request-level results of benchmarks, in the forms that users have."""

import json

import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.runs.bench_results import read_results

# Two requests: sent 5 s apart, 100 and 50 prompt tokens, 3 and 1 generated.
VLLM = {
    "start_times": [105.0, 100.0, 101.0],
    "input_lens": [50, 100, 70],
    "output_lens": [1, 3, 0],
    "ttfts": [0.2, 0.1, 0.0],
    "itls": [[], [0.02, 0.03], []],
}
GUIDELLM = {
    "benchmarks": [
        {
            "requests": {
                "successful": [
                    {
                        "request_start_time": start,
                        "request_latency": latency,
                        "time_to_first_token_ms": ttft,
                        "prompt_tokens": inputs,
                        "output_tokens": outputs,
                    }
                    for start, latency, ttft, inputs, outputs in (
                        (9.0, 0.15, 100, 100, 3),
                        (14.0, 0.2, 200, 50, 1),
                    )
                ]
            }
        }
    ]
}


def aiperf(start_ns, inputs, outputs, ttft_ms, e2e_ms):
    values = {
        "input_sequence_length": (inputs, "tokens"),
        "output_sequence_length": (outputs, "tokens"),
        "time_to_first_token": (ttft_ms, "ms"),
        "request_latency": (e2e_ms, "ms"),
    }
    metrics = {name: {"value": value, "unit": unit} for name, (value, unit) in values.items()}
    return json.dumps(
        {"metadata": {"request_start_ns": start_ns, "benchmark_phase": "profiling"}, "metrics": metrics}
    )


FORMS = {
    "vllm.json": json.dumps(VLLM),
    "guidellm.json": json.dumps(GUIDELLM),
    "aiperf.jsonl": "\n".join(
        (aiperf(10**18 + 5 * 10**9, 50, 1, 200, 200), aiperf(10**18, 100, 3, 100, 150))
    ),
    "own.csv": "arrival_s,input_tokens,output_tokens,ttft_s,e2e_s\n7,100,3,0.1,0.15\n12,50,1,0.2,0.2\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_requests(tmp_path, name):
    (tmp_path / name).write_text(FORMS[name])
    found = read_results(tmp_path / name)
    assert found.trace.seconds("arrival_s").tolist() == pytest.approx([0, 5], abs=1e-6)
    assert found.trace.integers("input_tokens").tolist() == [100, 50]
    assert found.trace.integers("output_tokens").tolist() == [3, 1]
    assert found.ttft_s.tolist() == pytest.approx([0.1, 0.2])
    assert found.e2e_s.tolist() == pytest.approx([0.15, 0.2])
    assert found.tpot_s.tolist()[0] == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (json.dumps({**VLLM, "ttfts": None}), "no request in it has latencies"),
        (json.dumps({**VLLM, "ttfts": [1.0]}), "equally many"),
        ('{"start_times": [], "ttfts": [', "broken JSON"),
        ('{"benchmarks": [{"requests": {}}]}', "benchmark 1 has no requests.successful"),
        ("arrival_s,ttft_s\n1,2\n", "no known format"),
        (FORMS["own.csv"].replace("0.15", "x"), "line 2, field e2e_s: 'x' is no number"),
        (
            FORMS["own.csv"].replace("0.15", "0.05"),
            "request 1, in order of arrival, has a TTFT of 0.1 s and an E2E of 0.05 s",
        ),
        (FORMS["own.csv"].replace("100,3", "nan,3"), "line 2.*not finite"),
        (FORMS["own.csv"].replace("100,3", "100,inf"), "line 2.*not finite"),
        (FORMS["own.csv"].replace("100,3", "100,0.5"), "line 2.*no whole number"),
        (FORMS["own.csv"].replace("100,3", "1e18,3"), "line 2.*no whole number"),
        (json.dumps({**VLLM, "itls": [[], ["x"], []]}), "field itls: must be a list of lists of numbers"),
        (json.dumps({**VLLM, "input_lens": [None, 1, 1]}), "field input_lens: must be a list of numbers"),
        (
            aiperf(1, 1, 1, 1, 1).replace("time_to_first_token", "other"),
            "no request in it has a TTFT; measure with streaming",
        ),
    ],
)
def test_bad_results_name_the_place(tmp_path, text, match):
    path = tmp_path / "results"
    path.write_text(text)
    with pytest.raises(BadInput, match=match):
        read_results(path)


def test_the_longest_time_between_tokens_is_kept(tmp_path):
    """Not of means, nor of tokens that came several at a time."""
    document = {**VLLM, "output_lens": [4, 3, 5], "ttfts": [0.2, 0.1, 0.1]}
    document["itls"] = [[0.01, 0.09, 0.02], [0.03, 0.03], [0.02, 0.06]]
    (tmp_path / "run.json").write_text(json.dumps(document))
    results = read_results(tmp_path / "run.json")
    assert results.longest_gap_s == pytest.approx([float("nan"), float("nan"), 0.09], nan_ok=True)
    (tmp_path / "run.json").write_text(FORMS["own.csv"])
    assert read_results(tmp_path / "run.json").longest_gap_s is None
