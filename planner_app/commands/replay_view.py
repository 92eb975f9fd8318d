"""A replay's figures as tables on the console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagecast.planner_app import console
from pagecast.planner_app.commands.screen import show_block
from pagecast.planner_app.planner.traffic import traffic
from pagecast.planner_app.wording.assumed import beside_step_times, rules, step_times
from pagecast.planner_app.wording.costs_name import costs_name
from pagecast.planner_app.wording.engine_defaults import engine_defaults
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.planner_app.wording.quantities import counted, gpus_there, replicas_there, told_apart
from pagecast.sim.replay import Result
from pagecast.sim.replay.metrics import STATISTICS, telling
from pagecast.sim.replay.replicates import Spread
from pagecast.traces.schema import Trace
from rich.table import Table

_LATENCIES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"))
_OF_ALL = (
    *("requests", "rejected", "output", "prefix hits", "prompt tokens"),
    *("KV cache", "sequence", "pressure", "steps"),
)
_UNKNOWN_REUSE = "unknown, for the trace has no contents (counted as none: --assume-reuse)"
_FEWER = ("mean", "p50", "p99")  # statistics that have room beside their intervals


def show_answer(
    work: Trace,
    result: Result,
    spread: Spread | None = None,
    unshared: Result | None = None,
) -> None:
    """Prints how the trace was served, how long requests took, what was reused, and what that rests on.

    `unshared`: the same without the reuse that was assumed.
    """
    s, scenario = result.summary, result.scenario
    facts = _fact_rows(s, scenario.tensor_parallel_size)
    lines = [
        traffic(work),
        f"on {_place(result)} with {scenario.model}: {_served(work, result)}",
        *console.table_lines(_latencies(s, spread)),
        *([] if unshared is None else [without_reuse_line(unshared)]),
        *(f"{title}: {text}" for title, text in facts if title == "rejected"),
        f"prefix reuse: {_reuse(s)}; output {s['output_tokens_per_s']:,.0f} tokens/s",
        f"KV cache: {_kv_cache(s)}, {counted(s['preemptions'], 'preemption')}",
    ]
    if fleet := s.get("fleet"):
        even = f"busiest replica {fleet['imbalance']:.2f} x an even share"
        facts.append(("router", f"{fleet['router']}; {even}"))
    more = [step_times(scenario, scenario.step_costs()), *_of_some(facts), rules(scenario)]
    show_block(lines, beside_step_times(result.notes), console.seconds(s["wall_s"]), more=more)


def without_reuse_line(result: Result) -> str:
    """The other end of what an assumed reuse brackets."""
    s = result.summary
    times = ", ".join(
        f"{title} {console.seconds(s[key]['mean'])} (p99 {console.seconds(s[key]['p99'])})"
        for title, key in _LATENCIES
    )
    return f"without reuse: {times}"


def _of_some(facts: list[tuple[str, str]]) -> list[str]:
    """The facts on what not every server has, as a host tier, speculation or tenants."""
    return [f"{title}: {text}" for title, text in facts if title not in _OF_ALL]


def _reuse(s: dict[str, Any]) -> str:
    rate = s["token_hit_rate"]
    return _UNKNOWN_REUSE if rate is None else f"{rate:.1%} of eligible prompt tokens"


def _place(result: Result) -> str:
    scenario = result.scenario
    if fleet := result.summary.get("fleet"):
        return f"{replicas_there(fleet)}, {gpus_there(fleet)},"
    return f"{scenario.tensor_parallel_size} x {scenario.gpu}"


def _served(work: Trace, result: Result) -> str:
    """How many requests were served in what time, and at what rate or beside the time of their arrivals.

    Beside the trace's own rate, one of what was served reads as overload wherever sessions go on for a while
    after the last of them has begun.
    """
    s, arrival_s = result.summary, result.requests["arrival_s"]
    lost = [f"{s[state]:,} {state}" for state in ("rejected", "cancelled") if s[state]]
    done = "all" if s["completed"] == s["requests"] else f"{s['completed']:,}"
    if work.concurrency is not None and s["makespan_s"]:
        pace = f"{s['completed'] / s['makespan_s']:.3g}/s"
    else:
        last_s = float(arrival_s.max() - arrival_s.min()) if len(arrival_s) else 0.0
        last = "turn" if (work.integers("after") >= 0).any() else "request"  # turns wait for answers
        pace = f"the last {last} came after {console.seconds(last_s)}"
    return "; ".join([f"served {done} in {console.seconds(s['makespan_s'])}, {pace}", *lost])


def _latencies(s: dict[str, Any], spread: Spread | None) -> Table:
    """TTFT, TPOT and E2E; with a spread fewer statistics, each with its interval."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    statistics = STATISTICS if spread is None else _FEWER
    for name in statistics:
        table.add_column(name, justify="right", no_wrap=True)
        if spread is not None:
            table.add_column("90% interval", justify="right", no_wrap=True)
    for title, key in _LATENCIES:
        cells = []
        for name in statistics:
            cells.append(console.seconds(s[key][name]))
            if spread is not None:
                low, high = (bounds.get(f"{key}.{name}") for bounds in (spread.low, spread.high))
                cells.append(f"{console.seconds(low)} to {console.seconds(high)}")
        table.add_row(title, *cells)
    return table


def show(work: Trace, result: Result, out: Path | None, spread: Spread | None = None) -> None:
    """Prints a result as tables, with its intervals, and what the figures mean and how far to trust them."""
    s, scenario = result.summary, result.scenario
    if fleet := s.get("fleet"):
        where = f"{replicas_there(fleet)}, {gpus_there(fleet)}"
    else:
        where = f"{scenario.tensor_parallel_size} x {scenario.gpu}"
    console.out.print(
        f"{result.trace}: {s['requests']:,} requests on {scenario.model}, {where}, "
        f"{scenario.profile.label}, costs {costs_name(s['costs'])}",
        soft_wrap=True,
    )
    if defaults := engine_defaults(scenario):
        console.out.print(defaults, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in STATISTICS:
        table.add_column(name, justify="right", no_wrap=True)
    for title, key in _rows(result):
        table.add_row(title, *(console.seconds(s[key][statistic]) for statistic in STATISTICS))
        for side, bounds in (("low", spread.low), ("high", spread.high)) if spread else ():
            values = (bounds.get(f"{key}.{statistic}") for statistic in STATISTICS)
            table.add_row(f"  {side}", *(console.seconds(value) for value in values), style="dim")
    console.out.print(table)
    facts = _fact_rows(s, scenario.tensor_parallel_size)
    console.out.print(_facts(facts))
    for note in result.notes:
        console.out.print(f"note: {sentence(note)}", soft_wrap=True, markup=False)
    written = f"; written to {out}" if out else ""
    console.out.print(f"replayed in {s['wall_s']:.2f} s{written}", soft_wrap=True)


def _rows(result: Result) -> list[tuple[str, str]]:
    """Latencies, parts below their sum: queue, lookup and prefill make TTFT, and with decode E2E.

    TTFT with and without a prefix hit, at equal queues, where enough requests can be compared.
    """
    rows = [
        ("E2E", "e2e_s"),
        ("  TTFT", "ttft_s"),
        ("    queue", "queue_s"),
        ("    lookup", "prefix_lookup_s"),
        ("    prefill", "prefill_s"),
        ("  decode", "decode_s"),
        ("TPOT", "tpot_s"),
    ]
    rows += [("ITL", "itl_s")] if "itl_s" in result.summary else []
    sides = [("TTFT cached", "ttft_cached_s"), ("TTFT uncached", "ttft_uncached_s")]
    return rows + (sides if telling(result.requests) else [])


def _facts(facts: list[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for title, text in facts:
        table.add_row(title, text)
    return table


def _fact_rows(s: dict[str, Any], gpus: int) -> list[tuple[str, str]]:
    """What a replay counted beside latencies, by title."""
    rows: list[tuple[str, str]] = []

    def add(title: str, text: str) -> None:
        rows.append((title, text))

    endings = f"{s['completed']:,} completed"
    endings += "".join(f", {s[state]} {state}" for state in ("rejected", "cancelled") if s[state])
    rate = s["completed"] / s["makespan_s"] if s["makespan_s"] else 0.0
    add("requests", f"{endings} in {console.seconds(s['makespan_s'])} ({rate:.3g}/s)")
    if reasons := s.get("rejected_reasons"):
        reason, count = max(reasons.items(), key=lambda pair: pair[1])
        others = f", and {s['rejected'] - count:,} for other reasons" if s["rejected"] > count else ""
        add("rejected", f"{count:,}: {reason}{others}")
    add("output", f"{s['output_tokens_per_s']:,.0f} tokens/s, {s['output_tokens']:,} tokens")
    add(
        "prefix hits",
        _reuse(s)
        if s["token_hit_rate"] is None
        else f"{_reuse(s)} reused, {console.seconds(s['prefill_avoided_s'])} of prefill avoided",
    )
    if sources := told_apart(s["prompt_tokens_by_source"]):
        add("prompt tokens", sources)
    add("KV cache", _kv_cache(s))
    over = f", over all {gpus} GPUs" if gpus > 1 else ""
    add("sequence", f"{console.size(s['bytes_per_sequence'])} of KV at its end, on average{over}")
    add("pressure", f"{s['preemptions']:,} preemptions, {s['failed_allocations']:,} failed allocations")
    for title, facts in _eviction_rows(s.get("eviction", {})):
        add(title, facts)
    add("steps", f"{s['steps']:,}")
    if partial := s.get("partial_reuse"):
        add(
            "partial hits",
            f"{partial['tokens']:,} tokens, {partial['copied_blocks']:,} blocks copied, "
            f"{partial['taken_blocks']:,} taken over",
        )
    if swap := s.get("swap"):
        add("swapped", f"{swap['out_tokens']:,} tokens out, {swap['in_tokens']:,} back")
    if rollout := s.get("rollout"):
        add("rollout", f"{rollout['forced_miss_tokens']:,} hit tokens lost; {_old_blocks(rollout)}")
    if peak := s.get("peak"):
        add(
            "at peak",
            f"{peak['uncached_tokens_per_s_at_peak']:,.0f} uncached tokens/s can be admitted, "
            f"{peak['uncached_tokens_per_s_asked']:,.0f} were asked for",
        )
    if scrubbing := s.get("scrubbing"):
        add("scrubbing", f"{scrubbing['blocks']:,} blocks, {console.seconds(scrubbing['seconds'])}")
    if price := s.get("isolation"):
        add(
            "isolation",
            f"{price['lost_hit_tokens']:,} hit tokens lost ({price['lost_hit_rate']:.1%} of eligible ones), "
            f"mean TTFT {console.seconds(price['ttft_mean_s'])} instead of "
            f"{console.seconds(price['ttft_mean_shared_s'])}",
        )
    for name, tenant in s.get("tenants", {}).items():
        add(
            f"tenant {name or '-'}",
            f"{tenant['completed']:,} of {tenant['requests']:,} completed, p99 TTFT "
            f"{console.seconds(tenant['ttft_p99_s'])}, {console.share(tenant['token_hit_rate'])} hits, "
            f"{_number(tenant['evicted_blocks'])} blocks evicted",
        )
    if offloading := s.get("offloading"):
        add("hits by tier", _hits_by_tier(offloading))
        add("host tier", _host_tier(offloading))
        add("transfers", _transfers(offloading))
        if "disk_blocks" in offloading:
            add("disk", _disk(offloading))
    if speculation := s.get("speculation"):
        add("draft tokens", _drafts(speculation))
    return rows


def _kv_cache(s: dict[str, Any]) -> str:
    """Blocks, and how many were used and evicted; a fleet's are of all its replicas, its peak is of one."""
    evicted = f"{s['evicted_blocks']:,} cached blocks evicted"
    blocks, share = f"{s['num_gpu_blocks']:,} blocks", f"{s['peak_kv_usage']:.1%} held by requests at peak"
    replicas = s["fleet"]["replicas"] if "fleet" in s else 1
    if replicas == 1:
        return f"{blocks}, {share}, {evicted}"
    return f"{blocks} on {replicas:,} replicas together, {evicted}; {share} on the fullest"


def _eviction_rows(eviction: dict[str, Any]) -> list[tuple[str, str]]:
    """What the eviction order counted or learned, by tenant where each has an order of its own."""
    if "tenants" in eviction:
        return [
            (f"eviction {name or '-'}", _eviction(figures)) for name, figures in eviction["tenants"].items()
        ]
    return [("eviction", _eviction(eviction))] if eviction else []


def _eviction(figures: dict[str, Any]) -> str:
    facts = []
    if "evicted_by_priority" in figures:
        evicted = ", ".join(
            f"{counted(blocks, 'block')} of priority {priority}"
            for priority, blocks in figures["evicted_by_priority"].items()
        )
        facts.append(evicted or "none")
        if figures["reverted_blocks"]:
            facts.append(f"priorities of {counted(figures['reverted_blocks'], 'block')} ended before")
    if "reuse_probability" in figures:
        likely = ", ".join(f"{each:.0%}" for each in figures["reuse_probability"])
        facts.append(f"probability of reuse after 0, 1, 2... reuses: {likely}")
    return "; ".join(facts)


def _old_blocks(rollout: dict[str, Any]) -> str:
    """What became of the cached blocks of the old revision."""
    first = rollout["old_blocks_at_rollout"]
    left = rollout["old_blocks_at_end"]
    delay = rollout["old_blocks_gone_after_s"]
    if not (first or left or delay):
        return "no old blocks"
    rest = f"{left:,} at the end" if left else f"the last gone after {console.seconds(delay)}"
    return f"{counted(first, 'old block')} at the rollout, {rest}"


def _number(count: int | None) -> str:
    """A count, or a dash where nobody counts."""
    return "-" if count is None else f"{count:,}"


def _hits_by_tier(tiers: dict[str, Any]) -> str:
    requests = counted(tiers["requests_with_host_hit"], "request")
    disk = ""
    if tiers.get("disk_hit_tokens"):
        disk = f" ({tiers['disk_hit_rate']:.1%} from the disk behind it)"
    return (
        f"{tiers['device_hit_rate']:.1%} of prompt tokens found on the GPU, "
        f"{tiers['host_hit_rate']:.1%} loaded from the host{disk}, for {requests}"
    )


def _host_tier(tiers: dict[str, Any]) -> str:
    refused = f", {tiers['refused_stores']:,} stores without room" if tiers["refused_stores"] else ""
    return (
        f"{tiers['host_blocks']:,} blocks, {tiers['used_host_blocks']:,} used at the end, "
        f"{tiers['evicted_host_blocks']:,} evicted{refused}"
    )


def _disk(tiers: dict[str, Any]) -> str:
    refused = f", {tiers['refused_promotions']:,} blocks without room" if tiers["refused_promotions"] else ""
    losses = {"promotion": tiers["lost_disk_loads"], "store": tiers["lost_disk_stores"]}
    lost = "".join(f", {counted(number, noun)} failed" for noun, number in losses.items() if number)
    return (
        f"{tiers['disk_blocks']:,} blocks; {tiers['disk_loads']:,} promotions "
        f"({console.size(tiers['disk_load_bytes'])}, busy {tiers['disk_load_busy']:.1%}){refused}, "
        f"{tiers['disk_stores']:,} stores ({console.size(tiers['disk_store_bytes'])}, "
        f"busy {tiers['disk_store_busy']:.1%}){lost}"
    )


def _transfers(tiers: dict[str, Any]) -> str:
    failures = f", {counted(tiers['lost_loads'], 'load')} failed" if tiers["lost_loads"] else ""
    return (
        f"{tiers['loads']:,} loads ({console.size(tiers['load_bytes'])}, busy {tiers['load_busy']:.1%}), "
        f"{tiers['stores']:,} stores ({console.size(tiers['store_bytes'])}, busy {tiers['store_busy']:.1%}), "
        f"steps waited {console.seconds(tiers['flush_wait_s'])} for stores{failures}"
    )


def _drafts(speculation: dict[str, Any]) -> str:
    """How many draft tokens were accepted, and what a step yields with them."""
    if not speculation["num_drafts"]:
        return "none"
    each = ", ".join(f"{rate:.0%}" for rate in speculation["acceptance_rates_per_position"])
    accepted = f"{speculation['num_accepted_tokens']:,} of {speculation['num_draft_tokens']:,} accepted"
    length = speculation["mean_acceptance_length"]
    return f"{accepted} (by position {each}), {length:.2f} tokens per verifying step"
