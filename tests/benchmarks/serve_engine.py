"""The engine behind HTTP beside the engine alone, on the 256-request benchmark: output tokens per second.

    python tests/benchmarks/serve_engine.py [--model Qwen/Qwen3-0.6B] [--record DIR]

Offline: `pagecast.engine.bench`. Behind HTTP: `pagecast serve` with the same options, and a client that sends
the same 256 requests at once, as token ids; from the first byte sent to the last one read. Each has a process
of its own, with random weights; the faster of two runs counts. With --record, a second server records a run
in which a part of the clients leaves, for `pagecast validate`.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from typing import Any

from stream_client import Stream, load

OPTIONS = ["--random-weights", "--max-num-batched-tokens", "16384", "--max-model-len", "4096"]
RUNS = 2


def offline(model: str, requests: int) -> None:
    """Prints the engine's own tokens per second."""
    from pagecast.engine.bench import bench
    from pagecast.engine.engine import Engine

    with Engine(model, random_weights=True, max_num_batched_tokens=16384, max_model_len=4096) as engine:
        best = 0.0
        for _ in range(RUNS):
            best = max(best, bench(engine, requests=requests).tokens_per_s)
            engine.loop.restart()  # the prompts are the same: nothing of them may be in the cache
    print(best, flush=True)


def served(model: str, *options: str) -> tuple[subprocess.Popen[str], int]:
    """A server of the engine, and its port."""
    command = [sys.executable, "-m", "pagecast", "serve", "--model", model, "--port", "0"]
    process = subprocess.Popen([*command, *OPTIONS, *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit("the server did not start; see above")
    return process, int(line.rsplit(":", 1)[1])


def bodies(requests: int, turn: int, *, stream: bool) -> list[dict[str, Any]]:
    """The benchmark's requests; other token ids in each turn, so that nothing of them is in the cache."""
    from pagecast.engine.bench import workload

    prompts, outputs = workload(requests, 100, 1024, 0)
    return [
        {
            "prompt": [(token + turn) % 10_000 for token in prompt],
            "max_tokens": tokens,
            "temperature": 0.6,
            "ignore_eos": True,
            "stream": stream,
        }
        for prompt, tokens in zip(prompts, outputs, strict=True)
    ]


def rate(port: int, asked: list[dict[str, Any]]) -> tuple[float, list[Stream]]:
    """Output tokens per second over all requests."""
    streams = load(port, asked)
    if any(stream.status != 200 for stream in streams):
        sys.exit("some requests were not served")
    seconds = max(stream.last_s for stream in streams) - min(stream.begun_s for stream in streams)
    return sum(body["max_tokens"] for body in asked) / seconds, streams


def record_departures(model: str, folder: str, requests: int) -> None:
    """Records a run in which a third of the clients leave after some chunks."""
    rng = random.Random(0)
    process, port = served(model, "--record", folder, "--max-num-seqs", "24", "--num-gpu-blocks", "700")
    asked = []
    for number in range(requests):
        shared = [7] * (16 * rng.randrange(12))
        prompt = shared + [rng.randrange(10_000) for _ in range(rng.randrange(4, 300))]
        tokens = rng.randrange(1, 200)
        asked.append({"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": number % 3 > 0})
    leave = [rng.randrange(1, 60) if number % 3 == 0 else None for number in range(requests)]
    try:
        load(port, asked, 60.0, leave)
        time.sleep(0.5)
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--record")
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.offline:
        offline(given.model, given.requests)
        return
    again = [sys.executable, __file__, "--offline", "--model", given.model, "--requests", str(given.requests)]
    alone = float(subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])
    print("| what | output tokens/s | of offline |\n|---|---|---|", flush=True)
    print(f"| offline | {alone:,.0f} | |", flush=True)
    process, port = served(given.model)
    try:
        for kind, stream in (("streams", True), ("whole answers", False)):
            runs = [
                rate(port, bodies(given.requests, turn + 3 * stream, stream=stream)) for turn in range(RUNS)
            ]
            best = max(runs, key=lambda run: run[0])
            print(f"| behind HTTP, {kind} | {best[0]:,.0f} | {best[0] / alone:.1%} |", flush=True)
            if stream:
                chunks = sum(one.chunks for one in best[1])
                first = sum(one.first_s - one.begun_s for one in best[1]) / len(best[1])
                print(f"streams: {chunks:,} chunks, mean TTFT {first:.3f} s", flush=True)
    finally:
        process.terminate()
        process.wait(60)
    if given.record:
        record_departures(given.model, given.record, 120)


if __name__ == "__main__":
    main()
