"""One engine of ours that computes prompts for another one, in wall time; and the same fleet forecast.

    python tests/benchmarks/handoff_engines.py record OUT --model Qwen/Qwen3-8B --random-weights   # on GPUs
    python tests/benchmarks/handoff_engines.py forecast OUT                                        # anywhere

`record` starts two engines, each a process of its own, on a GPU of its own where there are two; on one GPU
they take turns, which the forecast does not model. The prefill engine gets the requests at their times and
computes their prompts; the decode engine reads the KV blocks over the link between the two GPUs and
generates (`engine/handoff.py`). OUT gets a recorded run per engine, `prefill` and `decode`, and `fleet.json`.
`forecast` replays the same requests on a simulated pair, and prints TPOT, E2E and TTFT beside the measured
ones. It exits with 1 where mean TPOT or mean E2E is off by more than 10%. The link's rate is
NVLink's data sheet's, and its latency the settings' default: neither is fitted to the run.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.replay.clients import Arrivals
from pagecast.sim.replay.result import Kept
from pagecast.sim.replica.arrivals import NS
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.traces.schema import Trace
from recorded_engines import (
    arriving_after,
    costs_for,
    engine_options,
    latencies,
    main,
    new_folder,
    parsers,
    print_latencies,
    scenario_for,
    trace_of,
    verdict,
)

ROLES = ("prefill", "decode")
NVLINK_BYTES_PER_S = 450e9  # one way, of an H100's or H200's 18 links (NVIDIA's data sheet)

# ---- an engine's process


def run_engine(
    role: str,
    router: Any,
    peer: Any,
    number: int,
    model: str,
    options: dict[str, Any],
    trace: Trace,
    out: Path,
) -> None:
    """Serves what comes through the pipes, and writes the recorded run."""
    import torch
    from handoff_servers import DecodeServer, PrefillServer
    from pagecast.engine.described import described
    from pagecast.engine.engine import Engine

    if options.get("device") != "cpu":
        torch.cuda.set_device(number % torch.cuda.device_count())
    with Engine(model, log_events=True, **options) as engine:
        engine.warm_up()
        described(engine)
        server = (PrefillServer if role == "prefill" else DecodeServer)(engine, trace, router, peer)
        server.connect()
        router.send("ready")
        router.recv()
        run = server.run()
        run.write(out)
        server.close()
        router.send("written")
        router.recv()  # the other engine may still read this one's memory


# ---- the router's process


def serve(trace: Trace, prefill: Any, decode: Any) -> None:
    """Sends the trace's requests to the prefill engine at their times; returns when all have ended."""
    for pipe in (prefill, decode):
        pipe.recv()
    for pipe in (prefill, decode):
        pipe.send("begin")
    begun = time.perf_counter_ns()
    arrivals = Arrivals(trace)
    left = len(trace)
    while left:
        now = time.perf_counter_ns() - begun
        while (due := arrivals.take(now)) is not None:
            row, arrival_ns = due
            if arrival_ns is not None:
                prefill.send((row, begun + arrival_ns))
        rest_s = min(max(arrivals.next_ns - (time.perf_counter_ns() - begun), 0) / NS, 0.001)
        for pipe in (decode, prefill):
            while pipe.poll(rest_s if pipe is decode else 0):
                arrivals.ended(pipe.recv(), time.perf_counter_ns() - begun)
                left -= 1
                rest_s = 0.0
    for pipe in (prefill, decode):
        pipe.send(None)
    for pipe in (prefill, decode):
        pipe.recv()
    for pipe in (prefill, decode):
        pipe.send("close")


def record(options: argparse.Namespace) -> int:
    """Starts both engines, serves the trace and writes the folder. 0 where that was done."""
    out = new_folder(options.out)
    trace = trace_of(options.trace, options.requests, options.rate)
    engine = engine_options(options)
    context = get_context("spawn")
    ours, theirs = zip(*(context.Pipe() for _ in ROLES), strict=True)
    peers = context.Pipe()
    processes = []
    for number, role in enumerate(ROLES):
        part = trace
        if role == "prefill":
            part = replace(trace, requests=trace.requests.assign(output_tokens=1))
        arguments = (role, theirs[number], peers[number], number, options.model, engine, part, out / role)
        process = context.Process(target=run_engine, args=arguments, daemon=True)
        process.start()
        theirs[number].close()  # so that an engine that dies ends the wait for it
        peers[number].close()
        processes.append(process)
    serve(trace, *ours)
    for process in processes:
        process.join()
    about = {"trace": options.trace, "requests": len(trace), "rate": options.rate, "model": options.model}
    (out / "fleet.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    moved = RecordedRun.load(out / "decode").requests
    size = moved["moved_bytes"].astype(float).sum()
    copying = (moved["copy_end_s"].astype(float) - moved["copy_start_s"].astype(float)).sum()
    print(f"{out}: {len(trace):,} requests, {size / 1e9:.2f} GB in {copying:.3f} s of copies")
    return 0


# ---- the forecast


def measured(out: Path) -> tuple[pd.DataFrame, list[RecordedRun]]:
    """Latencies of all requests by row of the trace, as their clients saw them, and both runs."""
    runs = [RecordedRun.load(out / role) for role in ROLES]
    return latencies(runs[1].requests), runs


def forecast(options: argparse.Namespace) -> int:
    """Prints the comparison. 1 where mean TPOT or E2E is off by more than `BOUND`."""
    out = Path(options.out)
    about = json.loads((out / "fleet.json").read_text(encoding="utf-8"))
    table, runs = measured(out)
    trace = trace_of(about["trace"], about["requests"], about["rate"])
    scenarios = [scenario_for(run, about, options) for run in runs]
    scenario, costs = costs_for(runs[1], scenarios[1])
    groups = [
        {"name": role, "role": role, "scenario": {"num_gpu_blocks": each.num_gpu_blocks}}
        for role, each in zip(ROLES, scenarios, strict=True)
    ]
    link = {"bytes_per_s": NVLINK_BYTES_PER_S, "after_step": True}  # as engine/handoff.py
    fleet = FleetSettings.make({"groups": groups, "disaggregation": link})
    result = replay_fleet(trace, scenario, fleet, change=lambda _: costs, kept=Kept(steps=False))
    made = result.requests.set_index("row").sort_index()
    made = arriving_after(made, options.after)
    table = table.loc[made.index]
    gpus = len({run.meta.get("gpu_id") for run in runs})
    place = "on two GPUs" if gpus > 1 else "both on one GPU"
    print(f"{len(table):,} requests, one engine prefilling for another, {place}")
    print(f"costs: {result.summary['costs']}")
    worst = print_latencies(table, made)
    real = runs[1].requests["moved_bytes"].astype(float).sum() / 1e9
    ours = result.summary["fleet"]["handoff"]["moved_bytes"] / 1e9
    print(f"moved: {real:.2f} GB measured, {ours:.2f} forecast")
    return verdict(worst)


if __name__ == "__main__":
    main("handoff_engines", parsers(__doc__, requests=1000)[0], record, forecast)
