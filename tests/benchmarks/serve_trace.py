"""A trace that a client sends to `pagecast serve --simulate`, beside the same trace replayed offline.

    python tests/benchmarks/serve_trace.py [--requests 60] [--time-scale 0.25]

The official openai client sends texts of words that are a token each, at the trace's arrivals, and streams
the answers. Some prompts begin alike, so there are prefix hits. The client's mean TTFT and TPOT, and those
that the server recorded, are compared with those of `replay(trace, scenario)`, which knows of no server. The
recording's decisions are replayed. Ends with 1 where a mean differs by more than 2%, or a decision at all.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pagecast.sim.replay import replay
from pagecast.sim.runs.validate import compare_decisions
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from serve_clients import MODEL, Server, made_up_words

TOLERANCE = 0.02
_SHARED = 512


def make_trace(count: int, rate: float, seed: int, vocabulary: int) -> Trace:
    """Poisson arrivals; a third of the prompts begin with one of two texts of 512 tokens."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocabulary, (2, _SHARED))
    prompts = []
    for _ in range(count):
        own = rng.integers(0, vocabulary, int(rng.integers(200, 3000)))
        head = shared[rng.integers(2)] if rng.random() < 1 / 3 else own[:0]
        prompts.append(np.concatenate([head, own]))
    table = pd.DataFrame(
        {
            "arrival_s": np.cumsum(rng.exponential(1 / rate, count)),
            "input_tokens": [len(prompt) for prompt in prompts],
            "output_tokens": rng.integers(16, 160, count),
        }
    )
    return Trace("sent by a client", table, token_ids=prompts)


async def send(trace: Trace, words: list[str], server: Server) -> pd.DataFrame:
    """Sends a trace at its arrivals, token n as the n-th word; TTFT and TPOT in the server's seconds."""
    import openai

    client: Any = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    await client.models.list()  # it loads parts of itself and connects at its first request
    start = time.perf_counter()
    rows: list[tuple[float, float]] = [(0.0, 0.0)] * len(trace.requests)

    async def ask(row: int, arrival_s: float, prompt: str, output: int) -> None:
        await asyncio.sleep(start + arrival_s / server.scale - time.perf_counter())
        begun = time.perf_counter()
        answer = await client.completions.create(
            model=server.model,
            prompt=prompt,
            max_tokens=output,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        first = 0.0
        last = begun
        async for _ in answer:
            last = time.perf_counter()
            first = first or last
        rows[row] = ((first - begun) * server.scale, (last - first) * server.scale / max(output - 1, 1))

    assert trace.token_ids is not None
    table = trace.requests
    texts = ["".join(f" {words[token]}" for token in tokens) for tokens in trace.token_ids]
    arguments = zip(table["arrival_s"], texts, table["output_tokens"], strict=True)
    await asyncio.gather(*[ask(row, *one) for row, one in enumerate(arguments)])
    await client.close()
    return pd.DataFrame(rows, columns=["ttft", "tpot"])


def latencies(requests: pd.DataFrame, end: str, tokens: str) -> pd.DataFrame:
    """TTFT and TPOT of requests in a table of a replay or a recorded run."""
    decode = requests[end] - requests["first_token_s"]
    ttft = requests["first_token_s"] - requests["arrival_s"]
    return pd.DataFrame({"ttft": ttft, "tpot": decode / (requests[tokens] - 1).clip(lower=1)})


def main() -> None:
    """Prints both sides' means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second of the server's time")
    parser.add_argument("--time-scale", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.engine = None
    words = made_up_words()
    trace = make_trace(given.requests, given.rate, given.seed, len(words))
    with tempfile.TemporaryDirectory() as folder:
        server = Server(given, Path(folder))
        try:
            sent = asyncio.run(send(trace, words, server))
        finally:
            server.end()
        run = server.recorded()
    served, sent_tokens = run.requests["input_tokens"], trace.requests["input_tokens"]
    assert sorted(served) == sorted(sent_tokens)
    alone = replay(trace, Scenario(model=MODEL, gpu="H200")).requests
    sides = {
        "client": sent,
        "recorded": latencies(run.requests, "finish_s", "tokens_out"),
    }
    expected = latencies(alone, "finished_s", "output_tokens")
    agree = True
    print("| | mean TTFT | mean TPOT |\n|---|---|---|")
    ttft, tpot = (expected[what].mean() * 1e3 for what in ("ttft", "tpot"))
    print(f"| replayed offline | {ttft:,.1f} ms | {tpot:,.2f} ms |")
    for name, side in sides.items():
        cells = []
        for what, places in (("ttft", 1), ("tpot", 2)):
            off = side[what].mean() / expected[what].mean() - 1
            agree = agree and abs(off) <= TOLERANCE
            cells.append(f"{side[what].mean() * 1e3:,.{places}f} ms: {off:+.2%}")
        print(f"| {name} | {' | '.join(cells)} |")
    hits = int(alone["cached_tokens"].sum()), int(run.requests["cached_tokens"].sum())
    print(f"cached tokens: {hits[0]:,} offline, {hits[1]:,} recorded")
    decisions = compare_decisions(run)
    print(f"decisions replayed: {'equal' if decisions.ok else decisions.first_mismatch}")
    sys.exit(0 if agree and decisions.ok else 1)


if __name__ == "__main__":
    main()
