"""`pagecast replay`: serve a trace on a simulated replica and read the forecast."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from pagecast.planner_app import console
from pagecast.planner_app.trace_view import read_with_progress
from pagecast.sim.core.errors import BadInput
from pagecast.sim.metrics import STATISTICS
from pagecast.sim.replay import Result, replay
from pagecast.sim.replicates import Spread, Study, with_intervals
from pagecast.sim.resample import resample, what_is_lost
from pagecast.sim.scenario import Scenario
from pagecast.traces.bundled import sample_names
from pagecast.traces.operations import scale
from pagecast.traces.schema import Trace
from rich.table import Table

Opt = typer.Option
_BLOCKS = "usable KV blocks, instead of a budget (vLLM's own number counts its null block too: give one less)"


def replay_command(
    trace: Annotated[
        str, typer.Argument(help="trace file of any known format, a sample's name, or a folder of --out")
    ],
    scenario: Annotated[Path | None, Opt(help="YAML file of scenario fields; options given here win")] = None,
    model: Annotated[str | None, Opt(help="known model or folder with config.json [Qwen/Qwen3-8B]")] = None,
    gpu: Annotated[str | None, Opt(help="GPU type [H200]")] = None,
    profile: Annotated[str | None, Opt(help="engine to behave as: vllm, nano-vllm [vllm]")] = None,
    costs: Annotated[
        str | None, Opt(help="step costs: a calibration's name or file, roofline, auto [auto: what fits]")
    ] = None,
    transfer_costs: Annotated[
        bool | None, Opt("--transfer-costs", help="allow a calibration of another model or GPU, scaled")
    ] = None,
    block_size: Annotated[int | None, Opt(help="tokens in a KV block [16, vLLM's]")] = None,
    gpu_memory_utilization: Annotated[
        float | None, Opt(help="fraction of HBM the engine may use [0.9, vLLM's; newer vLLM: 0.92]")
    ] = None,
    free_gpu_memory_fraction: Annotated[
        float | None, Opt(help="fraction of what is free after loading that KV may use (TensorRT-LLM)")
    ] = None,
    kv_tokens: Annotated[int | None, Opt(help="most KV tokens; of the three limits the lesser wins")] = None,
    num_gpu_blocks: Annotated[
        int | None,
        Opt("--num-gpu-blocks", "--num-gpu-blocks-override", help=_BLOCKS),
    ] = None,
    max_num_seqs: Annotated[int | None, Opt(help="most running requests [256, vLLM's]")] = None,
    max_num_batched_tokens: Annotated[int | None, Opt(help="most tokens in a step [8192, vLLM's]")] = None,
    max_model_len: Annotated[
        int | None, Opt(help="reject longer prompt + output [no limit; vLLM's is the model's]")
    ] = None,
    kv_cache_dtype: Annotated[str | None, Opt(help="auto, bfloat16, fp8 ... [auto, vLLM's]")] = None,
    tensor_parallel_size: Annotated[int | None, Opt(help="GPUs per replica [1, vLLM's]")] = None,
    scheduling_policy: Annotated[str | None, Opt(help="fcfs or priority [fcfs, vLLM's]")] = None,
    async_scheduling: Annotated[
        bool | None,
        Opt("--async-scheduling/--no-async-scheduling", help="plan a step while the last runs [on, vLLM's]"),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        Opt("--enable-prefix-caching/--no-enable-prefix-caching", help="reuse cached prefixes [on, vLLM's]"),
    ] = None,
    speedup: Annotated[
        float, Opt(help="divide arrival times by this: 2 doubles the load; think times stay")
    ] = 1.0,
    limit: Annotated[int | None, Opt(help="replay only the first N requests")] = None,
    sort: Annotated[bool, Opt("--sort", help="put requests out of order in order of arrival")] = False,
    tokenizer: Annotated[Path | None, Opt(help="transformers folder, for traces that hold texts")] = None,
    session_rate: Annotated[
        float | None, Opt(help="sessions per second, for traces that have no absolute times")
    ] = None,
    seed: Annotated[int | None, Opt(help="of whatever is drawn at random [0]")] = None,
    replicates: Annotated[
        int, Opt(min=0, help="replays behind 90% intervals: costs, noise and workload drawn again [0: none]")
    ] = 0,
    fixed_workload: Annotated[
        bool, Opt("--fixed-workload", help="leave the workload's uncertainty out of the intervals")
    ] = False,
    out: Annotated[Path | None, Opt(help="folder for summary, requests, steps, events and scenario")] = None,
    json: Annotated[bool, Opt("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Replays TRACE on one replica and prints TTFT, TPOT, throughput, prefix hits and KV pressure."""
    options = locals()
    trace, scenario = _folder_of_a_replay(trace, scenario)
    chosen = _scenario(scenario, options)
    work = load_trace(
        trace, chosen, speedup=speedup, limit=limit, sort=sort, tokenizer=tokenizer, session_rate=session_rate
    )
    with console.progress("replaying", len(work)) as update:
        result = replay(work, chosen, keep_steps=False, out=out, progress=update)
    result = replace(result, notes=(*_unused(work, chosen), *result.notes))
    spread = None
    if replicates:
        study = Study(work, chosen, chosen.seed, None if fixed_workload else resample)
        with console.progress("replicates", replicates + 2) as update:
            spread = study.spread(replicates, progress=update)
    if json:
        console.print_json(with_intervals(result.summary, spread) if spread else result.summary)
    else:
        show(result, out, spread)
        if spread and not fixed_workload:
            console.out.print(f"note: {what_is_lost(work, chosen.seed)}", soft_wrap=True, markup=False)


def _scenario(file: Path | None, options: dict[str, Any]) -> Scenario:
    """The file's scenario, or the default one, with the options that were given."""
    given = {name: options[name] for name in Scenario.model_fields if options.get(name) is not None}
    return Scenario.load(file, **given) if file else Scenario.make(given, "options")


def _folder_of_a_replay(trace: str, scenario: Path | None) -> tuple[str, Path | None]:
    """The trace and the scenario in a folder that `--out` wrote; other traces as they are."""
    folder = Path(trace)
    if trace in sample_names() or not os.path.isfile(folder / "trace.parquet"):
        return trace, scenario
    beside = folder / "scenario.yaml"
    return str(folder / "trace.parquet"), scenario or (beside if beside.is_file() else None)


def load_trace(name: str, scenario: Scenario, *, speedup: float, **options: Any) -> Trace:
    """Reads a trace with `read`'s options and compresses its time. Errors: BadInput."""
    if not 0 < speedup < float("inf"):
        raise BadInput(f"--speedup is {speedup}; it must be above 0")
    trace = read_with_progress(name, seed=scenario.seed, **options)
    return trace if speedup == 1 else scale(trace, speedup)


def _unused(trace: Trace, scenario: Scenario) -> tuple[str, ...]:
    """What was asked for and has no effect on this trace."""
    if scenario.scheduling_policy != "priority" or np.ptp(trace.integers("priority")):
        return ()
    return ("every request has the same priority: --scheduling-policy priority serves as fcfs does",)


def show(result: Result, out: Path | None, spread: Spread | None = None) -> None:
    """Prints a result as tables, with its intervals, and what the figures mean and how far to trust them."""
    s, scenario = result.summary, result.scenario
    console.out.print(
        f"{result.trace}: {s['requests']} requests on {scenario.model}, {scenario.tensor_parallel_size} x "
        f"{scenario.gpu}, profile {scenario.profile}, costs {s['costs']}",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in STATISTICS:
        table.add_column(name, justify="right", no_wrap=True)
    for title, key in _rows(s):
        table.add_row(title, *(console.seconds(s[key][statistic]) for statistic in STATISTICS))
        for side, bounds in (("low", spread.low), ("high", spread.high)) if spread else ():
            values = (bounds.get(f"{key}.{statistic}") for statistic in STATISTICS)
            table.add_row(f"  {side}", *(console.seconds(value) for value in values), style="dim")
    console.out.print(table)
    console.out.print(_facts(s, scenario.tensor_parallel_size))
    for note in result.notes:
        console.out.print(f"note: {note}", soft_wrap=True, markup=False)
    written = f"; written to {out}" if out else ""
    console.out.print(f"replayed in {s['wall_s']:.2f} s{written}", soft_wrap=True)


def _rows(s: dict[str, Any]) -> list[tuple[str, str]]:
    """Latencies, parts below their sum: queue, lookup and prefill make TTFT, and with decode E2E."""
    rows = [
        ("E2E", "e2e_s"), ("  TTFT", "ttft_s"), ("    queue", "queue_s"), ("    lookup", "prefix_lookup_s"),
        ("    prefill", "prefill_s"), ("  decode", "decode_s"), ("TPOT", "tpot_s"),
    ]  # fmt: skip
    sides = [("TTFT cached", "ttft_cached_s"), ("TTFT uncached", "ttft_uncached_s")]
    return rows + (sides if all(s[key]["mean"] is not None for _, key in sides) else [])


def _facts(s: dict[str, Any], gpus: int) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    ended = f"{s['completed']} completed"
    ended += "".join(f", {s[state]} {state}" for state in ("rejected", "cancelled") if s[state])
    rate = s["completed"] / s["makespan_s"] if s["makespan_s"] else 0.0
    table.add_row("requests", f"{ended} in {console.seconds(s['makespan_s'])} ({rate:.3g}/s)")
    if reasons := s.get("rejected_reasons"):
        reason, count = max(reasons.items(), key=lambda pair: pair[1])
        others = f", and {s['rejected'] - count:,} for other reasons" if s["rejected"] > count else ""
        table.add_row("rejected", f"{count:,}: {reason}{others}")
    table.add_row("output", f"{s['output_tokens_per_s']:,.0f} tokens/s, {s['output_tokens']:,} tokens")
    table.add_row(
        "prefix hits",
        f"{s['token_hit_rate']:.1%} of eligible prompt tokens reused, "
        f"{console.seconds(s['prefill_avoided_s'])} of prefill avoided",
    )
    table.add_row(
        "KV cache",
        f"{s['num_gpu_blocks']:,} blocks, {s['peak_kv_usage']:.1%} in use at peak, "
        f"{s['evicted_blocks']:,} evicted",
    )
    over = f", over all {gpus} GPUs" if gpus > 1 else ""
    table.add_row("sequence", f"{console.size(s['bytes_per_sequence'])} of KV at its end, in the mean{over}")
    table.add_row(
        "pressure", f"{s['preemptions']:,} preemptions, {s['failed_allocations']:,} failed allocations"
    )
    table.add_row("steps", f"{s['steps']:,}")
    return table
