"""The static envelope: arithmetic that can be checked by drawing, and that more memory never makes less."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.planner_app.planner.capacity.envelope import blocks_in_use, envelope
from pagecast.planner_app.planner.slo import Slo
from pagecast.sim.scenario import Scenario
from pagecast.traces.bundled import resolve
from pagecast.traces.read import read
from pagecast.traces.schema import Spans, Trace, starts, table

SLO = Slo.parse("ttft_p99<2s,tpot_p95<50ms")
lengths = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 800)), min_size=1, max_size=40)


def made(pairs):
    prompt, output = np.array(pairs).T
    columns = {"arrival_s": np.arange(len(pairs)), "input_tokens": prompt, "output_tokens": output}
    return Trace("made", table(columns))


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from([1, 16, 64]))
def test_blocks_are_those_of_every_token_of_every_answer(pairs, size):
    held = np.concatenate([np.ceil((prompt + np.arange(output)) / size) for prompt, output in pairs])
    blocks = blocks_in_use(made(pairs), size)
    assert blocks.mean == pytest.approx(held.mean())
    assert blocks.sd == pytest.approx(held.std(), abs=1e-6)
    assert blocks.most == held.max()


@settings(max_examples=40, deadline=None)
@given(lengths, st.integers(200, 100_000), st.sampled_from([8, 16, 128]))
def test_twice_the_memory_for_kv_never_admits_fewer(pairs, blocks, size):
    few, many = (
        envelope(made(pairs), Scenario(num_gpu_blocks=count, block_size=size, costs="roofline"), SLO)
        for count in (blocks, 2 * blocks)
    )
    assert many.hbm >= few.hbm
    assert many.hbm_shared >= few.hbm_shared
    assert many.concurrency >= few.concurrency


def test_a_higher_share_of_the_gpus_memory_never_admits_fewer():
    trace = read(resolve("chat"), limit=300)
    limits = [envelope(trace, Scenario(gpu_memory_utilization=share), SLO).hbm for share in (0.3, 0.6, 0.9)]
    assert limits == sorted(limits)
    assert limits[0] < limits[-1]


def test_what_is_admitted_overflows_as_rarely_as_was_asked():
    random = np.random.default_rng(0)
    pairs = 1 + np.exp(random.normal([[6], [5]], 0.8, (2, 500))).astype(int)
    blocks = blocks_in_use(made(pairs.T), 16)
    admitted = blocks.admitted(4000, 0.05)
    prompt, output = pairs[:, random.choice(500, (20_000, admitted), p=pairs[1] / pairs[1].sum())]
    held = np.ceil((prompt + np.floor(random.random(prompt.shape) * output)) / 16).sum(axis=1)
    assert (held > 4000).mean() == pytest.approx(0.05, abs=0.015)


def test_the_least_limit_binds():
    trace = read(resolve("rag"), limit=300)
    assert envelope(trace, Scenario(max_num_seqs=4), SLO).binding == "batch size"
    assert envelope(trace, Scenario(num_gpu_blocks=1000), SLO).binding == "KV blocks"
    tight = Scenario(max_num_seqs=8, max_num_batched_tokens=16)
    assert envelope(trace, tight, Slo.parse("ttft_p99<2s")).binding == "token budget"
    assert envelope(trace, Scenario(max_num_seqs=512), Slo.parse("tpot_mean<12ms")).binding == "compute"


def test_turns_of_one_session_do_not_share_with_each_other():
    """Every prompt of a session holds the one before, but only one of them runs at a time."""
    count = 40
    sessions = [f"s{row // 10}" for row in range(count)]
    spans = Spans(
        starts(np.ones(count, np.int64)),
        np.repeat(np.arange(4), 10),
        np.zeros(count, np.int64),
        np.tile(np.arange(1, 11) * 160, 4),
    )
    columns = {"arrival_s": np.arange(count), "input_tokens": spans.length, "session": sessions}
    trace = Trace("turns", table({**columns, "output_tokens": np.full(count, 9)}), spans)
    limits = envelope(trace, Scenario(costs="roofline"), SLO)
    assert limits.shared_prompt == 0
    assert limits.reused_prompt > 0.7
    assert limits.hbm_shared == limits.hbm
