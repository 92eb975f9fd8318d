"""Gain of speculation by load: mean time per output token and throughput by load, with several drafters.

    python examples/speculation.py [--acceptance 0.7]

Users in a closed loop ask for 300 tokens after a prompt of 1000, each as soon as it has the answer before.
"""

from __future__ import annotations

import argparse
from functools import partial

from pagecast.sim.replay.clients import ClosedLoop
from pagecast.sim.replay.result import Kept
from pagecast.sim.replay.simulation import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace, table

USERS = (1, 4, 16, 64, 128, 256)
ROUNDS = 4  # requests of each user


def workload(users: int) -> Trace:
    """Prompts of 1000 tokens that share nothing, answers of 300."""
    count = users * ROUNDS
    columns = {"arrival_s": [0.0] * count, "input_tokens": [1000] * count, "output_tokens": [300] * count}
    return Trace("closed loop", table(columns))


def main() -> None:
    """Prints a row for each number of users."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--acceptance", default="0.7", help="chance that a draft token is accepted after accepted ones"
    )
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("--gpu", default="H200")
    options = parser.parse_args()
    ways = [None, *(f"{way}:{options.acceptance}" for way in ("ngram:3", "eagle:1", "eagle:3", "eagle:5"))]
    print("users  " + "".join(f"{way or 'none':>22}" for way in ways))
    for users in USERS:
        cells = []
        for way in ways:
            scenario = Scenario(model=options.model, gpu=options.gpu, speculative_config=way)
            clients = partial(ClosedLoop, users=users)
            summary = replay(workload(users), scenario, arrivals=clients, kept=Kept(steps=False)).summary
            tpot_ms = summary["tpot_s"]["mean"] * 1e3
            cells.append(f"{tpot_ms:9.2f} ms {summary['output_tokens_per_s']:6,.0f}/s")
        print(f"{users:5}  " + "".join(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
