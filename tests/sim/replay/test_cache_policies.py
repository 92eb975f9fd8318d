"""Replays with rules of the cache that engines leave to choice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pagecast.planner_app.wording.quantities import told_apart
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import Kept, replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pagecast.traces.schema import Spans, Trace
from pagecast.traces.write import write_parquet
from pandas.testing import assert_frame_equal


@pytest.mark.parametrize("order", ["slru", "lfu", "fifo", "cost"])
def test_an_eviction_order_changes_hits_and_not_what_fast_forward_shows(order: str) -> None:
    trace = read("chat", limit=150)
    scenario = Scenario(num_gpu_blocks=1200, eviction=order, costs="roofline")
    fast = replay(trace, scenario, check_every=50)
    slow = replay(trace, scenario, fast_forward=False)
    assert_frame_equal(fast.requests, slow.requests)
    plain = replay(trace, Scenario(num_gpu_blocks=1200, costs="roofline"))
    assert fast.summary["reused_prefix_tokens"] != plain.summary["reused_prefix_tokens"]


def test_partial_reuse_finds_what_generating_requests_have_filled_by_now(tmp_path: Path) -> None:
    lengths = [1, 5, 6, 1, 5, 8]
    table = pd.DataFrame({"arrival_s": 0.0, "input_tokens": lengths, "output_tokens": [60, 1, 31, 12, 12, 1]})
    spans = Spans(np.arange(7), *np.array([(0, 0, length) for length in lengths]).T)
    scenario = Scenario(
        model="Qwen/Qwen3-0.6B",
        costs="roofline",
        block_size=4,
        num_gpu_blocks=22,
        max_num_seqs=2,
        partial_reuse="copy",
    )
    trace = Trace("partial", table, spans)
    plain, logged = replay(trace, scenario), replay(trace, scenario, kept=Kept(folder=tmp_path / "out"))
    assert_frame_equal(plain.requests, logged.requests)
    assert plain.summary["partial_reuse"]["tokens"] == 1


@pytest.mark.parametrize("depth", [False, True])
def test_retention_with_durations_is_the_same_with_fast_forward_and_without(depth: bool) -> None:
    trace = read("chat", limit=200)
    retention = ["0-512:80:3 512-:50:0.7 decode:10", "0-:90:11.3", None, "decode:5"] * 50
    trace = replace(trace, requests=trace.requests.assign(retention=retention))
    scenario = Scenario(
        num_gpu_blocks=1500,
        eviction="priority",
        retention="decode:40:2.1",
        async_scheduling=depth,
        costs="roofline",
    )
    fast = replay(trace, scenario, check_every=50)
    slow = replay(trace, scenario, fast_forward=False)
    assert_frame_equal(fast.requests, slow.requests)
    assert fast.summary["eviction"] == slow.summary["eviction"]
    assert fast.summary["eviction"]["reverted_blocks"] > 100
    assert {"5", "35", "50"} <= set(fast.summary["eviction"]["evicted_by_priority"])


def test_retention_of_a_trace_is_written_read_and_checked(tmp_path: Path) -> None:
    rows = ["0-512:80:30 decode:10", "0-512:100"]
    lines = [
        json.dumps({"arrival_s": i, "input_tokens": 600, "output_tokens": 5, "retention": row})
        for i, row in enumerate(rows)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines) + "\n")
    trace = read(str(path))
    write_parquet(trace, tmp_path / "t.parquet")
    assert read(str(tmp_path / "t.parquet")).column("retention").tolist() == rows
    path.write_text("\n".join(lines).replace("0-512:100", "0-512:101") + "\n")
    with pytest.raises(BadInput, match="field retention: retention '0-512:101': priorities go from 0 to 100"):
        read(str(path))
    with pytest.raises(BadInput, match="retention"):
        Scenario.make({"retention": "0-5"})


def _of_tenants(count: int) -> Trace:
    """Two tenants whose prompts begin with the same 256 tokens, of a namespace "docs"."""
    rows = [
        {
            "arrival_s": 0.02 * i,
            "input_tokens": 600,
            "output_tokens": 20 + i % 30,
            "spans": [[1, 0, 256], [2 + i % 10, 0, 344]],
            "tenant": "ab"[i % 3 == 0],
            "namespace": "docs",
            "public_tokens": 256,
        }
        for i in range(count)
    ]
    with NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("\n".join(json.dumps(row) for row in rows) + "\n")
        file.flush()
        return read(file.name)


@pytest.mark.parametrize("eviction", ["lru", "cost"])
def test_shares_of_tenants_are_the_same_with_fast_forward_and_without(eviction: str) -> None:
    scenario = Scenario(
        num_gpu_blocks=300,
        tenants="a:weight=2,blocks=120 b:blocks=90",
        isolation="tenant",
        eviction=eviction,
        costs="roofline",
    )
    fast = replay(_of_tenants(150), scenario, check_every=20)
    slow = replay(_of_tenants(150), scenario, fast_forward=False)
    assert_frame_equal(fast.requests, slow.requests)
    assert fast.summary["tenants"] == slow.summary["tenants"]
    assert fast.summary["tenants"]["a"]["evicted_blocks"] > 0


def test_isolation_has_a_price_that_public_namespaces_lower() -> None:
    trace = _of_tenants(60)
    plain = Scenario(num_gpu_blocks=2000, isolation="tenant", isolation_price=True, costs="roofline")
    apart = replay(trace, plain).summary["isolation"]
    public = replay(trace, plain.changed(public_namespaces="docs")).summary["isolation"]
    assert apart["lost_hit_tokens"] > public["lost_hit_tokens"] > 0
    assert apart["hit_tokens"] + apart["lost_hit_tokens"] == apart["hit_tokens_shared"]
    undeclared = plain.changed(public_namespaces="other")
    assert replay(trace, undeclared).summary["isolation"] == apart


def test_a_row_with_more_public_tokens_than_its_prompt_is_named() -> None:
    trace = _of_tenants(3)
    trace = replace(trace, requests=trace.requests.assign(public_tokens=[5, 700, 5]))
    with pytest.raises(BadInput, match="row 1 has 700 public tokens, and 600 in its prompt"):
        replay(trace, Scenario(public_namespaces="docs", num_gpu_blocks=500, costs="roofline"))


@pytest.mark.parametrize("column", ["model", "tokenizer", "adapter", "positional", "salt"])
def test_every_part_of_the_scope_keeps_prefixes_apart(column: str) -> None:
    trace = _of_tenants(2)
    one = replay(trace, Scenario(num_gpu_blocks=500, costs="roofline")).summary
    other = replace(trace, requests=trace.requests.assign(**{column: ["x", "y"]}))
    two = replay(other, Scenario(num_gpu_blocks=500, costs="roofline")).summary
    assert one["reused_prefix_tokens"] == 256
    assert two["reused_prefix_tokens"] == 0


@pytest.mark.parametrize(
    "rules",
    [
        {"admission": "completion"},
        {"admission": "expected", "admission_quantile": 0.5},
        {"admission": "maximum", "max_output_tokens": 300, "preemption_victim": "least-progress"},
        {"watermarks": "0.5:0.8"},
        {"shed_ttft_s": 0.5},
        {"preemption": "swap"},
        {"partial_reuse": "copy"},
        {"partial_reuse": "take", "eviction": "cost"},
    ],
    ids=str,
)
def test_admission_is_the_same_with_fast_forward_and_without(rules: dict[str, Any]) -> None:
    trace = read("chat", limit=150)
    scenario = Scenario(num_gpu_blocks=900, costs="roofline", **rules)
    fast = replay(trace, scenario, check_every=50)
    slow = replay(trace, scenario, fast_forward=False)
    assert_frame_equal(fast.requests, slow.requests)
    plain = replay(trace, Scenario(num_gpu_blocks=900, costs="roofline"))
    assert fast.summary["ttft_s"]["mean"] != plain.summary["ttft_s"]["mean"]
    if "shed_ttft_s" in rules:
        assert set(fast.summary["rejected_reasons"]) == {"predicted TTFT is above 0.5 s"}
        assert fast.summary["ttft_s"]["p90"] < plain.summary["ttft_s"]["p90"]


def test_nothing_is_shed_at_a_load_that_needs_none() -> None:
    trace = read("chat", limit=300)
    summary = replay(trace, Scenario(shed_ttft_s=0.5, costs="roofline")).summary
    assert summary["ttft_s"]["max"] < 0.4
    assert summary["rejected"] == 0


def test_scenarios_refuse_watermarks_that_cannot_be() -> None:
    for text in ("0.5", "0.9:0.5", "0:0.5", "0.5:1.5", "a:b"):
        with pytest.raises(BadInput, match="watermarks"):
            Scenario.make({"watermarks": text})


@pytest.mark.parametrize("eviction", ["fifo", "priority", "lfu", "slru", "cost"])
def test_models_with_windows_take_every_order(eviction: str) -> None:
    scenario = Scenario(model="openai/gpt-oss-20b", num_gpu_blocks=1200, max_num_seqs=8, costs="roofline")
    trace = read("chat", limit=150)
    plain = replay(trace, scenario).summary
    changed = scenario.changed(eviction=eviction)
    fast = replay(trace, changed, check_every=50)
    slow = replay(trace, changed, fast_forward=False)
    assert fast.requests.equals(slow.requests)
    assert fast.summary["evicted_blocks"] == slow.summary["evicted_blocks"]
    if eviction in ("lfu", "slru"):
        assert fast.summary["reused_prefix_tokens"] > 1.02 * plain["reused_prefix_tokens"]


@pytest.mark.parametrize("shares", ["*:weight=1", "*:blocks=500"])
def test_tenants_of_models_with_windows_have_accounts_of_what_they_lose(shares: str) -> None:
    scenario = Scenario(
        model="openai/gpt-oss-20b",
        num_gpu_blocks=600,
        max_num_seqs=8,
        isolation="tenant",
        tenants=shares,
        costs="roofline",
    )
    summary = replay(_of_tenants(100), scenario, check_every=50).summary
    lost = [figures["evicted_blocks"] for figures in summary["tenants"].values()]
    assert min(lost) > 0
    assert sum(lost) <= summary["evicted_blocks"]


def test_a_rollout_forces_misses_and_says_when_old_blocks_are_gone() -> None:
    trace = read("chat", limit=300)
    scenario = Scenario(num_gpu_blocks=1500, rollout_at_s=20.0, costs="roofline")
    summary = replay(trace, scenario, check_every=50).summary
    rollout = summary["rollout"]
    assert rollout["forced_miss_tokens"] > 0
    assert rollout["old_blocks_at_rollout"] > 100
    assert 0 < rollout["old_blocks_gone_after_s"] < summary["makespan_s"] - 20
    assert rollout["old_blocks_at_end"] == 0
    assert (
        summary["peak"]["uncached_tokens_per_s_at_peak"]
        > summary["peak"]["uncached_tokens_per_s_asked"] / 100
    )
    small = replay(trace, scenario.changed(max_num_batched_tokens=512)).summary["peak"]
    assert small["uncached_tokens_per_s_at_peak"] < 0.8 * summary["peak"]["uncached_tokens_per_s_at_peak"]
    roomy = replay(trace, scenario.changed(num_gpu_blocks=100_000)).summary["rollout"]
    assert roomy["old_blocks_gone_after_s"] is None
    assert roomy["old_blocks_at_end"] >= roomy["old_blocks_at_rollout"] > 0


def test_scrubbing_takes_time_for_evicted_blocks_of_tenants() -> None:
    trace = _of_tenants(150)
    scenario = Scenario(num_gpu_blocks=300, isolation="tenant", tenants="*:weight=1", costs="roofline")
    plain = replay(trace, scenario).summary
    scrubbed = replay(trace, scenario.changed(scrub_private_blocks=True)).summary
    assert scrubbed["scrubbing"]["blocks"] == scrubbed["evicted_blocks"] > 0
    assert scrubbed["scrubbing"]["seconds"] > 0
    assert scrubbed["e2e_s"]["mean"] > plain["e2e_s"]["mean"]


def _with_retries() -> Trace:
    """Four requests, of which the client gives up two; each has a retry, and a turn that follows it."""
    rows: list[dict[str, Any]] = []
    for i in range(4):
        first = {"arrival_s": float(i), "input_tokens": 400, "output_tokens": 200}
        rows.append(first | ({"cancel_after_s": 0.1} if i % 2 else {}))
    for i in range(4):
        rows.append({"after": i, "gap_s": 0.5, "retry": 1, "input_tokens": 400, "output_tokens": 20})
    for i in range(4):
        rows.append({"after": 4 + i, "gap_s": 0.2, "input_tokens": 300, "output_tokens": 20})
    with NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("\n".join(json.dumps(row) for row in rows) + "\n")
        file.flush()
        return read(file.name)


def test_a_retry_is_sent_only_where_it_is_needed() -> None:
    result = replay(_with_retries(), Scenario(num_gpu_blocks=500, costs="roofline"), check_every=1)
    table = result.requests.set_index("row")
    assert table.index.tolist() == [0, 1, 2, 3, 5, 7, 8, 9, 10, 11]
    assert table["state"].loc[[0, 1, 2, 3]].tolist() == ["completed", "cancelled"] * 2
    assert table["arrival_s"][5] == pytest.approx(table["finished_s"][1] + 0.5)
    assert table["arrival_s"][8] == pytest.approx(table["finished_s"][0] + 0.2)
    assert table["arrival_s"][9] == pytest.approx(table["finished_s"][5] + 0.2)


def test_a_retry_needs_the_request_that_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"arrival_s": 0, "input_tokens": 4, "output_tokens": 4, "retry": 1}) + "\n")
    with pytest.raises(BadInput, match="retry"):
        read(str(path))


def test_prompt_tokens_are_told_apart_by_their_source() -> None:
    trace = read("chat", limit=200)
    plain = replay(trace, Scenario(num_gpu_blocks=2000, costs="roofline")).summary
    partly = replay(trace, Scenario(num_gpu_blocks=2000, partial_reuse="copy", costs="roofline"))
    for summary in (plain, partly.summary):
        sources = summary["prompt_tokens_by_source"]
        assert sum(sources.values()) == summary["input_tokens"]
        assert sources["exact"] == summary["reused_prefix_tokens"]
    assert (
        plain["prompt_tokens_by_source"]["partial"]
        == 0
        < partly.summary["prompt_tokens_by_source"]["partial"]
    )
    found = partly.summary["prompt_tokens_by_source"]["partial"]
    assert partly.requests["partial_tokens"].sum() == found > 0


def test_hits_by_kind_are_said_where_there_are_several() -> None:
    sources = {"exact": 1000, "partial": 24, "host": 512, "disk": 0, "missed": 2000}
    assert told_apart(sources) == "1,000 exact, 24 partial, 512 host hits, 2,000 missed"
    assert not told_apart({**sources, "partial": 0, "host": 0})


@pytest.mark.parametrize(
    ("at_s", "old_blocks", "gone_after_s"),
    [(0.0, 0, 0.0), (1e6, 2787, None)],
    ids=["at the start", "after the end"],
)
def test_a_rollout_that_no_old_block_comes_or_goes_after_is_told_right(
    at_s: float, old_blocks: int, gone_after_s: float | None
) -> None:
    trace = read("chat", limit=60)
    rollout = replay(trace, Scenario(rollout_at_s=at_s, costs="roofline")).summary["rollout"]
    assert rollout["old_blocks_at_rollout"] == rollout["old_blocks_at_end"] == old_blocks
    assert rollout["old_blocks_gone_after_s"] == gone_after_s


@pytest.mark.parametrize("fields", [{"model": "openai/gpt-oss-20b"}, {"engine": "sglang"}], ids=str)
def test_evictions_by_tenant_that_nobody_counts_are_not_told(fields: dict[str, Any]) -> None:
    summary = replay(
        _of_tenants(100), Scenario(num_gpu_blocks=300, block_size=16, costs="roofline", **fields)
    ).summary
    assert summary["evicted_blocks"] > 0
    for tenant in summary["tenants"].values():
        assert tenant["evicted_blocks"] is tenant["evicted_by"] is None


def test_rejections_by_a_ceiling_are_counted_together() -> None:
    scenario = Scenario(tenants="*:blocks=10", num_gpu_blocks=2000, costs="roofline")
    summary = replay(_of_tenants(60), scenario).summary
    assert summary["rejected_reasons"] == {"needs more than its tenant's 10 blocks of 16 tokens": 60}


def test_rejected_requests_are_no_output_of_their_tenant() -> None:
    trace = _of_tenants(8)
    trace.requests["output_tokens"] = [50, 50, 50, 50, 9000, 9000, 9000, 50]
    summary = replay(trace, Scenario(max_model_len=2000, costs="roofline")).summary
    tenants = summary["tenants"].values()
    assert summary["rejected"] == sum(tenant["rejected"] for tenant in tenants) == 3
    assert [tenant["output_tokens"] for tenant in tenants] == [150, 100]
    assert summary["output_tokens"] == 250
