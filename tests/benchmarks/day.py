"""A day of ServeGen traffic: fixed fleets against autoscaled ones, by attainment of the SLO and cost.

    python tests/benchmarks/day.py                # 24 hours at one request per second on average
    python tests/benchmarks/day.py --rate 0.5     # half of the traffic
    python tests/benchmarks/day.py --plan         # the fewest replicas that keep the SLO all day

ServeGen's clients of DeepSeek-R1 give the daily curve: rates for every ten minutes of a day, from a third of
the mean to more than twice of it. Attainment is the share of requests that completed and kept every bound of
the SLO, over the day and in its worst hour. Costs are the roofline's.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from pagecast.planner_app.planner.fleet.sizing import fewest
from pagecast.planner_app.planner.slo import Slo
from pagecast.sim.fleet.figures import ready_over_time
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import FleetResult, replay_fleet
from pagecast.sim.replay.result import Kept
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from pagecast.traces.servegen import load_clients, servegen

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
DAY_S = 86_400.0
SLO = "goodput(ttft<5s,tpot<50ms)>0.99"
SCALING = (("queue", 1.0), ("kv", 0.5), ("kv", 0.3), ("ttft", 1.0))
STARTUP = {"source": "disk", "disk_bytes_per_s": 2e9, "engine_s": 40.0}


def day(rate: float, seed: int = 0) -> Trace:
    """24 hours of the published clients, at so many requests per second on average."""
    clients = load_clients(SHARED / "traces" / "servegen_reason_deepseek-r1.tar.zst")
    return servegen(clients, duration_s=DAY_S, rate=rate, seed=seed, name="day")


def fixed(replicas: int, price: float) -> FleetSettings:
    """The same replicas all day."""
    return FleetSettings.make(
        {
            "groups": [{"replicas": replicas}],
            "router": {"policy": "least-loaded"},
            "price_per_gpu_hour": price,
        }
    )


def scaled(metric: str, target: float, least: int, most: int, price: float) -> FleetSettings:
    """Between `least` and `most` replicas, as the autoscaler finds."""
    fields = fixed(least, price).model_dump()
    scaling = {"metric": metric, "target": target, "least": least, "most": most}
    return FleetSettings.make({**fields, "scaling": scaling, "startup": STARTUP})


def attainment(result: FleetResult, level: Slo) -> tuple[float, float]:
    """Share of requests that kept every bound: over all, and in the worst hour of arrival."""
    good = level.good(result.requests)
    hours = (result.requests["arrival_s"].to_numpy(np.float64) // 3600).astype(int)
    by_hour = np.bincount(hours, weights=good) / np.maximum(np.bincount(hours), 1)
    return float(good.mean()), float(by_hour[np.bincount(hours) > 0].min())


def row(name: str, result: FleetResult, level: Slo, wall_s: float) -> str:
    """A fleet's line."""
    summary: dict[str, Any] = result.summary
    fleet = summary["fleet"]
    replicas = ready_over_time(result.timeline)["replicas"]
    fewest, most = replicas.min(), replicas.max()
    overall, worst = attainment(result, level)
    cells = (
        name,
        f"{fewest} to {most}" if fewest != most else f"{most}",
        f"{overall:.2%}",
        f"{worst:.1%}",
        f"{summary['ttft_s']['p99']:.2f} s",
        f"{fleet['gpu_hours']:.1f}",
        f"{fleet['cost']:.2f}",
        f"{wall_s:.0f} s",
    )
    return f"| {' | '.join(cells)} |"


def plan(trace: Trace, scenario: Scenario, level: Slo, price: float, most: int) -> None:
    """Prints the fewest replicas that keep the SLO all day, and what one less keeps."""
    answer = fewest(trace, scenario, fixed(1, price), level, most=most)
    fleet = answer.result.summary["fleet"]
    shown = ", ".join(f"{term.text}: {term.value:.4f}" for term in answer.verdict.terms)
    below = answer.below.terms if answer.below is not None else ()
    less = ", ".join(f"{term.value:.4f}" for term in below)
    print(
        f"fewest replicas: {answer.replicas}, {fleet['gpu_hours']:.1f} GPU hours; {shown}; one less: {less}"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second on average")
    parser.add_argument("--gpu", default="L40S")
    parser.add_argument("--slo", default=SLO)
    parser.add_argument("--price", type=float, default=1.0, help="of a GPU hour")
    parser.add_argument("--fixed", type=int, nargs="*", default=[3, 4, 5, 6, 7])
    parser.add_argument("--plan", action="store_true", help="the fewest fixed replicas, and nothing else")
    parser.add_argument("--most", type=int, default=10, help="replicas of an autoscaled fleet")
    options = parser.parse_args()
    if not SHARED.is_dir():
        print("no ../shared beside the project")
        return
    begun = time.perf_counter()
    trace = day(options.rate)
    scenario = Scenario(gpu=options.gpu, costs="roofline")
    level = Slo.parse(options.slo)
    print(f"{len(trace):,} requests in 24 hours, {scenario.model} on {options.gpu}; SLO: {level.text}\n")
    if options.plan:
        plan(trace, scenario, level, options.price, options.most)
        print(f"\n{time.perf_counter() - begun:.0f} s in all")
        return
    print("| fleet | replicas | attainment | worst hour | TTFT p99 | GPU hours | cost | replayed in |")
    print("|---|---|---|---|---|---|---|---|")
    fleets = [(f"fixed, {count}", fixed(count, options.price)) for count in options.fixed]
    for metric, target in SCALING:
        fleets.append(
            (f"autoscaled by {metric}, {target:g}", scaled(metric, target, 1, options.most, options.price))
        )
    for name, settings in fleets:
        started = time.perf_counter()
        result = replay_fleet(trace, scenario, settings, kept=Kept(steps=False))
        print(row(name, result, level, time.perf_counter() - started), flush=True)
    print(f"\n{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
