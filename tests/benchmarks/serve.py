"""Load on one simulated server: streams at once, output tokens per second, lateness, and CPU time per token.

    python tests/benchmarks/serve.py --streams 2000 --tokens 300 --time-scale 1

starts `pagecast serve --simulate` and a client of plain sockets, each a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
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
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--time-scale", type=float, default=1.0)
    given = parser.parse_args()
    options = ["--simulate", "--gpu", "H200", "--port", "0", "--max-num-seqs", str(given.streams)]
    options += ["--max-num-batched-tokens", "16384", "--time-scale", str(given.time_scale)]
    command = [sys.executable, "-m", "pagecast.planner_app", "serve", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().split()[-1]
    try:
        before, started = cpu_s(server.pid), time.monotonic()
        opened = load(int(url.rsplit(":", 1)[1]), bodies(given), _OPENED_PER_S)
        seconds, used = time.monotonic() - started, cpu_s(server.pid) - before
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    finally:
        server.terminate()
        server.wait(30)
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line[0] != "#"
    }
    tokens = values["vllm:generation_tokens_total"]
    begun = sorted(stream.first_s for stream in opened)[-1]
    over = sorted(stream.last_s for stream in opened)[0]
    late = values["pagecast:step_lateness_seconds_sum"] / values["pagecast:step_lateness_seconds_count"]
    tpot = values["vllm:request_time_per_output_token_seconds_sum"] / given.streams / given.time_scale
    seen = sum((s.last_s - s.first_s) / (given.tokens - 1) for s in opened) / len(opened)
    print(f"{given.streams} streams of {given.tokens} tokens: {tokens:,.0f} tokens in {seconds:.1f} s")
    print(f"all at once for {over - begun:.1f} s; {tokens / seconds:,.0f} tokens/s in the mean")
    print(
        f"server CPU {used:.1f} s: {used / tokens * 1e6:.1f} us per token, {tokens / used:,.0f} tokens per s"
    )
    print(f"mean lateness {late * 1e3:.2f} ms; TPOT {tpot * 1e3:.3f} ms simulated, {seen * 1e3:.3f} ms seen")


if __name__ == "__main__":
    main()
