"""Engines of our own behind a router of our own, in wall time; and the same fleet forecast.

    python tests/benchmarks/fleet_engines.py record OUT --model Qwen/Qwen3-8B --random-weights   # two GPUs
    python tests/benchmarks/fleet_engines.py forecast OUT --costs CALIBRATION                    # anywhere

`record` starts an engine per GPU, each a process of its own. The router gets the trace's requests at their
times and counts what it sent and what has ended, as in a fleet's replay. OUT gets a recorded run per engine
(for `pagecast validate` and `calibrate`), `fleet.json`, and `requests.csv` with each request's replica.
`forecast` replays the same requests on a simulated fleet and prints TPOT, E2E and TTFT beside the measured
ones; it exits with 1 where mean TPOT or mean E2E is off by more than 10%. Calibrate from other runs than
these: a forecast is none where its costs were fitted to what it is compared with.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pandas as pd
from pagecast.sim.fleet.gauges import NOTHING
from pagecast.sim.fleet.query import Prompts, Query
from pagecast.sim.fleet.routers.registry import make
from pagecast.sim.fleet.settings import FleetSettings, ReplicaGroup, RouterSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.fleet.view import View
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

_ROUTERS = (
    *("round-robin", "random", "least-loaded", "power-of-two", "session"),
    *("prefix-affinity", "sglang", "aibrix", "production-stack"),
)  # those that need nothing but what this script's router sees


# ---- an engine's process


def run_engine(pipe: Any, number: int, model: str, options: dict[str, Any], trace: Trace, out: Path) -> None:
    """Serves what comes through the pipe, and writes the recorded run."""
    if options.get("device") != "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
    from live_server import Inlet, LiveServer
    from pagecast.engine.described import described
    from pagecast.engine.engine import Engine

    with Engine(model, log_events=True, **options) as engine:
        engine.warm_up()
        described(engine)
        server = LiveServer(engine, trace)
        server._arrivals = Inlet(pipe, lambda: engine.loop.clock)  # type: ignore[assignment]
        limits = engine.limits
        pipe.send((limits.num_blocks, limits.block_size, limits.max_num_seqs))
        pipe.recv()  # the others are ready too
        run = server.run()
        run.write(out)
    pipe.send("written")


# ---- the router's process


class LiveRouter:
    """Sends a trace's requests to engines at their times."""

    def __init__(self, trace: Trace, settings: RouterSettings, pipes: list[Any], seed: int) -> None:
        ready = [pipe.recv() for pipe in pipes]
        self.pipes = pipes
        self.prompts = Prompts(trace)
        self.router, _ = make(settings, seed, ready[0][1])
        self.arrivals = Arrivals(trace)
        self.views = [
            View(
                number,
                f"replica-{number}",
                num_blocks=blocks,
                block_size=size,
                max_num_seqs=most,
                gauges=lambda now: NOTHING,
            )
            for number, (blocks, size, most) in enumerate(ready)
        ]
        self.place: dict[int, View] = {}
        self.sent: list[tuple[int, int, float]] = []

    def run(self) -> None:
        """Serves the whole trace; returns when the last request has ended."""
        for pipe in self.pipes:
            pipe.send("begin")
        begun = time.perf_counter_ns()
        left = len(self.prompts.input_tokens)
        while left:
            now = time.perf_counter_ns() - begun
            while (due := self.arrivals.take(now)) is not None:
                row, arrival_ns = due
                if arrival_ns is not None:
                    self._send(row, now, begun + arrival_ns)
            rest_s = min(max(self.arrivals.next_ns - (time.perf_counter_ns() - begun), 0) / NS, 0.05)
            for pipe in wait(self.pipes, timeout=rest_s):
                row = pipe.recv()
                self._ended(row, time.perf_counter_ns() - begun)
                left -= 1
        for pipe in self.pipes:
            pipe.send(None)
        for pipe in self.pipes:
            pipe.recv()

    def _send(self, row: int, now: int, arrival_ns: int) -> None:
        query = Query(self.prompts, row, now)
        view, _ = self.router.choose(query, self.views)
        view.add(row, query.prompt_tokens)
        self.router.on_dispatch(query, view)
        self.place[row] = view
        self.sent.append((row, view.number, now / NS))
        self.pipes[view.number].send((row, arrival_ns))

    def _ended(self, row: int, now: int) -> None:
        view = self.place.pop(row)
        view.remove(row)
        self.router.on_end(row, view, now, self.prompts.output_tokens[row])
        self.arrivals.ended(row, now)


def record(options: argparse.Namespace) -> int:
    """Starts engines and router, and writes the folder. 0 where that was done."""
    out = new_folder(options.out)
    trace = trace_of(options.trace, options.requests, options.rate)
    engine = engine_options(options)
    if options.no_async_scheduling:
        engine["pipeline_depth"] = 0
    context = get_context("spawn")
    pipes, processes = [], []
    for number in range(options.engines):
        ours, theirs = context.Pipe()
        arguments = (theirs, number, options.model, engine, trace, out / f"engine-{number}")
        process = context.Process(target=run_engine, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that an engine that dies ends the wait for it
        pipes.append(ours)
        processes.append(process)
    settings = RouterSettings(policy=options.router)
    router = LiveRouter(trace, settings, pipes, options.seed)
    router.run()
    for process in processes:
        process.join()
    out.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(router.sent, columns=["row", "replica", "sent_s"])
    table.to_csv(out / "requests.csv", index=False)
    about = {"trace": options.trace, "requests": len(trace), "rate": options.rate, "seed": options.seed}
    about |= {"router": options.router, "engines": options.engines, "model": options.model}
    (out / "fleet.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    shares = table["replica"].value_counts().sort_index().tolist()
    print(f"{out}: {len(table):,} requests behind {options.router}: {shares} per engine")
    return 0


# ---- the forecast


def measured(out: Path, engines: int) -> tuple[pd.DataFrame, list[RecordedRun]]:
    """Latencies of all requests, by row of the trace, and each engine's run."""
    runs = [RecordedRun.load(out / f"engine-{number}") for number in range(engines)]
    table = pd.concat([run.requests.assign(replica=number) for number, run in enumerate(runs)])
    return latencies(table), runs


def forecast(options: argparse.Namespace) -> int:
    """Prints the comparison. 1 where mean TPOT or E2E is off by more than `BOUND`."""
    out = Path(options.out)
    about = json.loads((out / "fleet.json").read_text())
    table, runs = measured(out, about["engines"])
    trace = trace_of(about["trace"], about["requests"], about["rate"])
    scenario, costs = costs_for(runs[0], scenario_for(runs[0], about, options))
    fleet = FleetSettings(
        groups=(ReplicaGroup(replicas=about["engines"]),), router=RouterSettings(policy=about["router"])
    )
    result = replay_fleet(trace, scenario, fleet, change=lambda _: costs, kept=Kept(steps=False))
    made = result.requests.set_index("row").sort_index()
    made = arriving_after(made, options.after)
    table = table.loc[made.index]
    print(f"{len(table):,} requests on {about['engines']} engines behind {about['router']}")
    print(f"costs: {result.summary['costs']}")
    shares = [table["replica"].eq(number).mean() for number in range(about["engines"])]
    predicted = [made["replica"].eq(f"replica-{number}").mean() for number in range(about["engines"])]
    print(f"share of each engine: {_percents(shares)} measured, {_percents(predicted)} forecast")
    return verdict(print_latencies(table, made, ("mean", "p90")))


def _percents(shares: list[float]) -> str:
    return " ".join(f"{share:.1%}" for share in shares)


def command_line() -> argparse.ArgumentParser:
    """The parser of the script."""
    parser, recording = parsers(__doc__, requests=2000)
    recording.add_argument("--engines", type=int, default=2)
    recording.add_argument("--router", choices=_ROUTERS, default="least-loaded")
    recording.add_argument("--no-async-scheduling", action="store_true", help="as a calibration needs it")
    recording.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main("fleet_engines", command_line(), record, forecast)
