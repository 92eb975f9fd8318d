"""Every router on three public traces, and how fast fleets replay.

    python tests/benchmarks/fleet.py            # the table of routers
    python tests/benchmarks/fleet.py --speed    # requests per second, 1 to 64 replicas
    python tests/benchmarks/fleet.py --million  # 64 replicas, 1,000,000 requests
    python tests/benchmarks/fleet.py --growth   # cost per request at 64 replicas over that at 1, every router

The Mooncake conversation trace runs on 4 replicas of 30,000 blocks, as `make bench` has it on one; agent
sessions and chat on 4 replicas. Costs are the roofline's. Time is the process's own (CPU), since machines are
shared.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import numpy as np
import pandas as pd
from pagecast.sim.fleet.routers.registry import KINDS
from pagecast.sim.fleet.settings import FleetSettings, ReplicaGroup, RouterSettings
from pagecast.sim.fleet.simulation import FleetResult, replay_fleet
from pagecast.sim.replay import Kept, replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.operations import scale
from pagecast.traces.read import read
from pagecast.traces.schema import Spans, Trace

SIZES = (1, 64)
SHARED = Path(__file__).resolve().parents[2].parent / "shared"


def fleet(replicas: int, policy: str) -> FleetSettings:
    """So many equal replicas behind a router with its defaults."""
    return FleetSettings(
        groups=(ReplicaGroup(replicas=replicas),), router=RouterSettings(policy=policy, options={})
    )


def traces() -> list[tuple[str, Trace, Scenario]]:
    """Name, trace and scenario of each table."""
    found = [
        ("agent sessions (code sample), 20,000 blocks", read("code"), _blocks(20_000)),
        ("chat sample, 2,000 blocks", read("chat"), _blocks(2000)),
    ]
    if SHARED.is_dir():
        mooncake = read(SHARED / "traces" / "mooncake_conversation_trace.jsonl.zst")
        found.insert(0, ("Mooncake conversation, 30,000 blocks", mooncake, _blocks(30_000)))
    return found


def _blocks(blocks: int) -> Scenario:
    return Scenario(num_gpu_blocks=blocks, async_scheduling=False, costs="roofline")


def table(replicas: int) -> None:
    """One table per trace, a row per router."""
    for name, trace, scenario in traces():
        print(f"\n{name}, {len(trace):,} requests, {replicas} replicas\n")
        print("| router | hit tokens | TTFT mean | TTFT p99 | TPOT p99 | herding | busiest | stale |")
        print("|---|---|---|---|---|---|---|---|")
        for policy in KINDS:
            result = replay_fleet(trace, scenario, fleet(replicas, policy), kept=Kept(steps=False))
            print(row(policy, result), flush=True)


def row(policy: str, result: FleetResult) -> str:
    """A router's line."""
    s = result.summary
    f = s["fleet"]
    stale = f["stale_tokens"] / f["believed_tokens"] if f["believed_tokens"] else 0.0
    cells = (
        policy,
        f"{s['token_hit_rate']:.1%}",
        f"{s['ttft_s']['mean']:.2f} s",
        f"{s['ttft_s']['p99']:.2f} s",
        f"{1000 * s['tpot_s']['p99']:.1f} ms",
        f"{f['herding']:.2f}",
        f"{f['imbalance']:.2f}",
        f"{stale:.0%}",
    )
    return f"| {' | '.join(cells)} |"


def speed(policies: list[str]) -> None:
    """Requests per CPU second on Mooncake with equal load per replica, and on one without a router."""
    if not SHARED.is_dir():
        print("no ../shared beside the project")
        return
    mooncake = read(SHARED / "traces" / "mooncake_conversation_trace.jsonl.zst")
    scenario = Scenario(num_gpu_blocks=30_000, async_scheduling=False, costs="roofline")
    slow = scale(mooncake, 0.25)
    print(f"one replica, no router: {rate(lambda: replay(slow, scenario, kept=Kept(steps=False))):,.0f}/s")
    for policy in policies:
        for replicas in (1, 4, 16, 64):
            work = scale(mooncake, replicas / 4)
            settings = fleet(replicas, policy)
            each = rate(lambda: replay_fleet(work, scenario, settings, kept=Kept(steps=False)))  # noqa: B023
            print(f"{policy:18}{replicas:4} replicas {each:8,.0f}/s", flush=True)


def rate(run: object) -> float:
    """Requests per CPU second, the better of two runs; Mooncake has 12,031 requests."""
    best = 0.0
    for _ in range(2):
        begun = time.process_time()
        run()  # type: ignore[operator]
        best = max(best, 12_031 / (time.process_time() - begun))
    return best


def texts(count: int, replicas: int) -> Trace:
    """Requests with 20,000 texts, 10 per second and replica; a popular text is a prompt again and again."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(64, 1024, count)
    text = rng.zipf(1.3, count) % 20_000
    requests = pd.DataFrame(
        {
            "arrival_s": np.cumsum(rng.exponential(0.1 / replicas, count)),
            "input_tokens": prompt,
            "output_tokens": rng.integers(16, 256, count),
        }
    )
    zero = np.zeros(count, np.int64)
    return Trace("texts", requests, Spans(np.arange(count + 1), text.astype(np.int64), zero, prompt))


def growth(policies: list[str], count: int) -> None:
    """CPU time per request with 1 and 64 replicas at equal load per replica, the better of two turns.

    Once with texts, and once with Mooncake's conversations.
    """
    scenario = Scenario(num_gpu_blocks=7000, costs="roofline")
    for policy in policies:
        show_growth(policy, "texts", scenario, {replicas: texts(count, replicas) for replicas in SIZES})
    if not SHARED.is_dir():
        return
    mooncake = read(SHARED / "traces" / "mooncake_conversation_trace.jsonl.zst")
    work = {replicas: scale(mooncake, replicas / 4) for replicas in SIZES}
    for policy in policies:
        show_growth(policy, "Mooncake", _blocks(30_000), work)


def show_growth(policy: str, name: str, scenario: Scenario, work: dict[int, Trace]) -> None:
    """One line of `growth`."""
    best = dict.fromkeys(SIZES, float("inf"))
    for _ in range(2):
        for replicas, trace in work.items():
            begun = time.process_time()
            replay_fleet(trace, scenario, fleet(replicas, policy), kept=Kept(steps=False))
            each = 1e6 * (time.process_time() - begun) / len(trace)
            best[replicas] = min(best[replicas], each)
    one, many = best.values()
    print(
        f"{policy:18}{name:10}1: {one:.0f} us, 64: {many:.0f} us per request; {many / one:.2f} times",
        flush=True,
    )


def million(policy: str) -> None:
    """64 replicas, a million requests of 20,000 texts: time and peak memory of the process."""
    count = 1_000_000
    trace = texts(count, 64)
    scenario = Scenario(num_gpu_blocks=7000, costs="roofline")
    begun, cpu = time.perf_counter(), time.process_time()
    result = replay_fleet(trace, scenario, fleet(64, policy), kept=Kept(steps=False))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"64 replicas, {count:,} requests, {policy}: {time.perf_counter() - begun:.0f} s wall, "
        f"{time.process_time() - cpu:.0f} s CPU, peak {peak:.2f} GiB, "
        f"hits {result.summary['token_hit_rate']:.1%}"
    )


def main() -> None:
    """Prints what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--million", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--router", action="append", help="routers of --speed and --million")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--count", type=int, default=40_000, help="requests of --growth")
    options = parser.parse_args()
    if options.million:
        million((options.router or ["least-loaded"])[0])
    elif options.growth:
        growth(options.router or list(KINDS), options.count)
    elif options.speed:
        speed(options.router or ["least-loaded", "prefix-affinity", "cost"])
    else:
        table(options.replicas)


if __name__ == "__main__":
    main()
