"""Load on one simulated server: streams at once, output tokens per second, lateness, and CPU time per token.

    python tests/benchmarks/serve.py --streams 2000 --tokens 600 --time-scale 1

starts `pagecast serve --simulate` and a client of plain sockets, each a process of its own. The rate with all
streams open is that between the first and the last sample of `/metrics`, once a second, with all of them
running.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from stream_client import load

_OPENED_PER_S = 500


def cpu_s(pid: int) -> float:
    """CPU seconds a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def scraped(url: str) -> dict[str, float]:
    """The server's metrics by name, without labels."""
    lines = urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines()
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}


def sample(url: str, over: threading.Event, samples: list[tuple[float, float, float]]) -> None:
    """Notes time, running requests and tokens so far, once a second."""
    while not over.wait(1.0):
        values = scraped(url)
        row = (values["vllm:num_requests_running"], values["vllm:generation_tokens_total"])
        samples.append((time.monotonic(), *row))


def bodies(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The requests: prompts of token ids that share nothing."""
    asked = []
    for number in range(given.streams):
        ids = [number * 7 % 50_000 + 10, *range(given.prompt - 1)]
        asked.append({"prompt": ids, "max_tokens": given.tokens, "stream": True})
    return asked


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--time-scale", type=float, default=1.0)
    given = parser.parse_args()
    options = ["--simulate", "--gpu", "H200", "--port", "0", "--max-num-seqs", str(given.streams)]
    options += ["--max-num-batched-tokens", "16384", "--time-scale", str(given.time_scale)]
    command = [sys.executable, "-m", "pagecast", "serve", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().split()[-1]
    over = threading.Event()
    samples: list[tuple[float, float, float]] = []
    try:
        threading.Thread(target=sample, args=(url, over, samples)).start()
        before, started = cpu_s(server.pid), time.monotonic()
        opened = load(int(url.rsplit(":", 1)[1]), bodies(given), _OPENED_PER_S)
        seconds, used = time.monotonic() - started, cpu_s(server.pid) - before
        values = scraped(url)
    finally:
        over.set()
        server.terminate()
        server.wait(30)
    tokens = values["vllm:generation_tokens_total"]
    late = values["pagecast:step_lateness_seconds_sum"] / values["pagecast:step_lateness_seconds_count"]
    tpot = values["vllm:request_time_per_output_token_seconds_sum"] / given.streams / given.time_scale
    seen = sum((s.last_s - s.first_s) / (given.tokens - 1) for s in opened) / len(opened)
    print(f"{given.streams} streams of {given.tokens} tokens: {tokens:,.0f} tokens in {seconds:.1f} s")
    print(f"{tokens / seconds:,.0f} tokens/s in the mean, ramp and end included")
    full = [(at, count) for at, running, count in samples if running == given.streams]
    if len(full) > 1:
        lasted = full[-1][0] - full[0][0]
        print(
            f"{(full[-1][1] - full[0][1]) / lasted:,.0f} tokens/s over {lasted:.0f} s with all streams open"
        )
    else:
        print("at no time were all streams open: ask for more --tokens")
    print(
        f"server CPU {used:.1f} s: {used / tokens * 1e6:.1f} us per token, {tokens / used:,.0f} tokens per s"
    )
    print(f"mean lateness {late * 1e3:.2f} ms; TPOT {tpot * 1e3:.3f} ms simulated, {seen * 1e3:.3f} ms seen")


if __name__ == "__main__":
    main()
