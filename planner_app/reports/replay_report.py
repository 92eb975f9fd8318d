"""The report of a replay: what was served how fast, then why. Needs plotly."""

from __future__ import annotations

from typing import Any

from pagecast.planner_app.reports import charts
from pagecast.planner_app.reports.fleet_charts import replicas_over_time, requests_per_replica
from pagecast.planner_app.reports.html_page import HtmlTable, Section, SummaryCard, page
from pagecast.planner_app.wording.note_sentences import sentences
from pagecast.planner_app.wording.quantities import replicas_there, seconds, share, told_apart
from pagecast.sim.fleet.simulation import FleetResult
from pagecast.sim.replay import Result
from pagecast.sim.replay.metrics import STATISTICS
from pagecast.sim.replay.replicates import Spread

_LATENCIES = {
    "e2e_s": "E2E",
    "ttft_s": "TTFT",
    "queue_s": "queue",
    "prefix_lookup_s": "prefix lookup",
    "prefill_s": "prefill",
    "decode_s": "decode",
    "tpot_s": "TPOT",
    "ttft_cached_s": "TTFT with a prefix hit*",
    "ttft_uncached_s": "TTFT without*",
}


def replay_report(result: Result, spread: Spread | None = None) -> str:
    """The page of a replay with its steps (`Kept.steps`); `spread` adds 90% intervals.

    A fleet's has its replicas instead of steps.
    """
    s, scenario = result.summary, result.scenario
    fleet = result if isinstance(result, FleetResult) else None
    where = f"{scenario.tensor_parallel_size} x {scenario.gpu}"
    if fleet is not None:
        where = f"{replicas_there(s['fleet'])} behind {s['fleet']['router']}"
    lead = (
        f"{s['requests']:,} requests on {where} with "
        f"{scenario.model}, as {scenario.profile.label} would serve them; step costs: {s['costs']}."
    )
    steps = result.steps if fleet is None else result.steps[:0]
    figures = charts.replay_charts(
        result.requests, steps, result.pool_blocks, scenario.max_num_batched_tokens
    )
    sections = [
        Section("Latency in figures", [_latencies(s, spread)]),
        Section("Latency", figures[:4]),
        Section("Reuse, load and the KV cache", figures[4:]),
        *([_fleet(fleet)] if fleet is not None else []),
        Section("Scenario", [_scenario(result)]),
    ]
    return page(f"Forecast of {result.trace}", lead, cards(s), sections, sentences(result.notes))


def cards(s: dict[str, Any]) -> list[SummaryCard]:
    """The summary's figures that people ask for first."""

    def both(name: str) -> tuple[str, str]:
        table = s[name]
        return seconds(table["p50"]), f"p99 {seconds(table['p99'])}"

    rate = s["completed"] / s["makespan_s"] if s["makespan_s"] else 0.0
    blocks = f"of {s['num_gpu_blocks']:,} blocks"
    if s.get("fleet", {}).get("replicas", 1) > 1:
        blocks = "of the blocks of the fullest replica"
    sources = told_apart(s["prompt_tokens_by_source"])
    reuse = f"of eligible prompt tokens; {seconds(s['prefill_avoided_s'])} of prefill avoided"
    reuse = f"{reuse}; {sources}" if sources else reuse
    if s["token_hit_rate"] is None:
        reuse = "the trace has no contents; counted as none"
    unserved = ", ".join(f"{s[state]:,} {state}" for state in ("rejected", "cancelled") if s[state])
    return [
        SummaryCard("TTFT p50", *both("ttft_s")),
        SummaryCard("TPOT p50", *both("tpot_s")),
        SummaryCard("E2E p50", *both("e2e_s")),
        SummaryCard(
            "Throughput", f"{s['output_tokens_per_s']:,.0f} tok/s", f"output tokens; {rate:.3g} requests/s"
        ),
        SummaryCard("Completed", f"{s['completed']:,}", unserved or "none rejected, none cancelled"),
        SummaryCard("Prefix hits", share(s["token_hit_rate"]), reuse),
        SummaryCard("KV cache at peak", f"{s['peak_kv_usage']:.1%}", blocks),
        SummaryCard(
            "Preemptions", f"{s['preemptions']:,}", f"{s['failed_allocations']:,} failed allocations"
        ),
    ]


def _latencies(s: dict[str, Any], spread: Spread | None) -> HtmlTable:
    rows, highlights = [], set()
    for name, title in _LATENCIES.items():
        if s[name]["mean"] is None:
            continue
        rows.append((title, *(seconds(s[name][key]) for key in STATISTICS)))
        for side, bounds in (("low", spread.low), ("high", spread.high)) if spread else ():
            highlights.add(len(rows))
            rows.append((f"  {side}", *(seconds(bounds.get(f"{name}.{key}")) for key in STATISTICS)))
    caption = "Queue, prefix lookup and prefill make TTFT; with decode, E2E. * at equal queue depth."
    if spread:
        caption += " Low and high bound a 90% interval."
    return HtmlTable("", ("", *STATISTICS), rows, caption, frozenset(highlights))


def _fleet(result: FleetResult) -> Section:
    """Replicas over time, and what each of them served."""
    fleet = result.summary["fleet"]
    rows = [
        (
            row["replica"],
            row["gpu"],
            f"{row['requests']:,}",
            share(row["token_hit_rate"]),
            seconds(row["ttft_p99_s"]),
            seconds(row["tpot_p99_s"]),
            f"{row['peak_kv_usage']:.1%}",
            f"{row['evicted_blocks']:,}",
            f"{row['preemptions']:,}",
        )
        for row in fleet["by_replica"]
    ]
    speeds = ("requests", "hits", "TTFT p99", "TPOT p99")
    header = ("replica", "GPU", *speeds, "KV in use at peak", "blocks evicted", "preemptions")
    caption = (
        f"Herding {fleet['herding']:.2f} (0: an even share, 1: all to one replica); "
        f"{fleet['gpu_hours']:.2f} GPU hours; {fleet['retries']:,} requests sent again."
    )
    figures = [
        replicas_over_time([("the fleet", result.timeline, result.summary)]),
        requests_per_replica(fleet),
    ]
    return Section("Replicas", [*figures, HtmlTable("", header, rows, caption)])


def _scenario(result: Result) -> HtmlTable:
    fields = result.scenario.resolved().items()
    rows = [(name, "-" if value is None else str(value)) for name, value in fields]
    return HtmlTable("", ("field", "value"), rows)
