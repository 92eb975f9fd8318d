"""N-gram speculation: texts are those without it, decisions the core's, draft tokens vLLM's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.engine.ngram import propose
from pagecast.engine.params import SamplingParams
from pagecast.engine.recording import event_line
from pagecast.engine.serve import TraceServer
from pagecast.sim.core.errors import BadInput
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import DecisionReplay, compare_decisions

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
SMALL = {"num_blocks": 20, "max_num_seqs": 6, "max_num_batched_tokens": 48, "log_events": True}


def by_hand(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """The rule, word for word: the longest n-gram, its first place."""
    for length in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                return tokens[start + length : start + length + most]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 5),
)
def test_drafts_follow_the_longest_ngram_where_it_stood_first(
    tokens: list[int], shortest: int, more: int, most: int
) -> None:
    drafts = propose(np.array(tokens, np.int32), shortest, shortest + more, most)
    assert drafts.tolist() == by_hand(tokens, shortest, shortest + more, most)


def prompts_of(seed: int, vocab: int = 256) -> list[list[int]]:
    """Prompts that repeat themselves, so that n-grams have something to find."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, vocab, int(rng.integers(2, 12))).tolist() * int(rng.integers(1, 5)) for _ in range(10)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_texts_are_those_without_speculation(
    family: str, temperature: float, model_of: Any, engine_of: Any
) -> None:
    folder = model_of(family).folder
    prompts = prompts_of(3)
    params = [
        SamplingParams(40 + i, temperature if i % 3 else 0.0, seed=i, stop_token_ids=(7,), top_k=9 * (i % 2))
        for i in range(len(prompts))
    ]
    plain = engine_of(folder).generate(prompts, params)
    speculating = engine_of(folder, speculative_config=NGRAM)
    ended: list[Any] = []
    speculating.on_end = ended.append
    assert speculating.generate(prompts, params) == plain
    assert sum(sum(sequence.accepted) for sequence in ended) > 5


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_recorded_run_with_ngrams_replays_step_by_step_and_event_by_event(
    seed: int, policy: str, model_of: Any, engine_of: Any, small_trace: Any, tmp_path: Path
) -> None:
    options = {**SMALL, "scheduling_policy": policy, "speculative_config": NGRAM}
    engine = engine_of(model_of("qwen3", num_hidden_layers=1).folder, **options)
    run = RecordedRun.load(TraceServer(engine, small_trace(seed)).run().write(tmp_path))
    report = compare_decisions(run)
    assert report.ok, report.first_mismatch
    replay = DecisionReplay(run, log=True)
    for number in range(len(run.steps)):
        replay.step(number)
    replay.finish()
    assert [event_line(event) for event in replay.scheduler.events or ()] == run.events
    assert {"preempted", "evicted", "reused"} <= {event["kind"] for event in run.events}
    accepted = " ".join(run.inputs["accepted_drafts"]).split()
    assert {"0", "3"} <= set(accepted)
    assert run.meta["config"]["speculative_config"]["prompt_lookup_max"] == 3


def test_a_trace_is_answered_as_without_speculation(model_of: Any, engine_of: Any, small_trace: Any) -> None:
    folder = model_of("qwen3").folder
    trace = small_trace(5, count=30)
    trace = replace(trace, requests=trace.requests.drop(columns="cancel_after_s"))
    with_drafts = TraceServer(engine_of(folder, **SMALL, speculative_config=NGRAM), trace).run()
    without = TraceServer(engine_of(folder, **SMALL, pipeline_depth=0), trace).run()
    assert with_drafts.requests["output_ids"].tolist() == without.requests["output_ids"].tolist()
    assert len(with_drafts.steps) < len(without.steps)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative_config": "eagle:3"}, "method ngram, not eagle"),
        ({"speculative_config": "ngram:3:0.7"}, "acceptance is measured by the engine"),
        (
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3, "match_rate": 0.5}'},
            "match_rate is measured by the engine",
        ),
        (
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3, "model": "x"}'},
            "model is for draft models; leave it out",
        ),
        ({"speculative_config": "ngram"}, "METHOD:DRAFTS"),
        ({"speculative_config": NGRAM.replace('max": 3', 'max": 3, "x": 1')}, "x"),
        ({"speculative_config": NGRAM.replace('min": 1', 'min": 4')}, "prompt_lookup_min"),
        ({"speculative_config": NGRAM, "pipeline_depth": 1}, "no-async-scheduling"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(
    options: dict[str, Any], words: str, model_of: Any, engine_of: Any
) -> None:
    with pytest.raises(BadInput, match=words):
        engine_of(model_of("qwen3").folder, **options)
