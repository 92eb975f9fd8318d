"""Savings of sliding windows: blocks, requests at once, TTFT and throughput of models that have them.

    python examples/windows.py [--models openai/gpt-oss-20b,google/gemma-3-27b] [--tokens 2000,16000]

Each model is replayed as it is, and with every token kept in every layer
(`--disable-hybrid-kv-cache-manager`). Users in a closed loop send prompts of some length and get answers of
200 tokens.
"""

from __future__ import annotations

import argparse
from functools import partial

from pagecast.sim.replay.clients import ClosedLoop
from pagecast.sim.replay.simulation import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace, table

ANSWER = 200


def workload(requests: int, tokens: int) -> Trace:
    """Prompts that share nothing."""
    columns = {
        "arrival_s": [0.0] * requests,
        "input_tokens": [tokens] * requests,
        "output_tokens": [ANSWER] * requests,
    }
    return Trace("closed loop", table(columns))


def main() -> None:
    """Prints a table per model."""
    options = argparse.ArgumentParser(description="Savings of sliding windows.")
    options.add_argument("--models", default="openai/gpt-oss-20b,google/gemma-3-27b")
    options.add_argument("--gpu", default="H100")
    options.add_argument("--users", type=int, default=64)
    options.add_argument("--requests", type=int, default=192)
    options.add_argument("--tokens", default="2000,16000", help="tokens of a prompt")
    given = options.parse_args()
    for number, model in enumerate(given.models.split(",")):
        if number:
            print()
        print(f"{model} on {given.gpu}, {given.users} users")
        print("prompt  windows   peak KV usage   most at once   mean TTFT   mean TPOT   tokens/s")
        for tokens in (int(text) for text in given.tokens.split(",")):
            for windows in (True, False):
                scenario = Scenario(
                    model=model,
                    gpu=given.gpu,
                    max_model_len=tokens + ANSWER,
                    disable_hybrid_kv_cache_manager=not windows,
                )
                clients = partial(ClosedLoop, users=given.users)
                result = replay(workload(given.requests, tokens), scenario, arrivals=clients)
                print(_row(tokens, windows, result.summary, int(result.steps["running"].max())), flush=True)


def _row(tokens: int, windows: bool, s: dict, most: int) -> str:  # type: ignore[type-arg]
    return (
        f"{tokens:>6}  {'yes' if windows else 'no':>7}{s['peak_kv_usage']:>16.1%}{most:>15}"
        f"{s['ttft_s']['mean']:>10.2f} s{s['tpot_s']['mean'] * 1e3:>9.1f} ms"
        f"{s['output_tokens_per_s']:>11,.0f}"
    )


if __name__ == "__main__":
    main()
