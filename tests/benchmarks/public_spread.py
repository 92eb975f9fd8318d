"""Spread of measured operations between public set-ups: of step times, and of a client's share of TTFT.

    python tests/benchmarks/public_spread.py --training DIR --servingsim DIR [--client DIR]

For each run: the factor on all step times with which a replay meets its mean TPOT, and what is then left of
its median TTFT beside the share of the client that `sim.runs.client_share` states. A set-up's value is the
mean of its runs', a spread the root mean square over set-ups. Overloaded runs and ranks that wait for
others, which are not simulated, set no spread. `leave_out` gives the spread of all set-ups but one, by which
that one is judged (`coverage.py --training DIR --servingsim DIR`).

`--client`: inference-sim/inference-sim's eval/ground_truth at e7a4aa37, to which that share was fitted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pagecast.sim.costs.calibration.draw import scaled
from pagecast.sim.costs.measured.spread import MeasuredSpread
from pagecast.sim.replay import Kept, replay
from pagecast.sim.runs.client_share import CLIENT_SHARE, ClientShare
from public_runs import PublicRun, servingsim_runs, training_runs

_ROUNDS = 3  # of the secant
_FIRST = 1.02
_MATCHED_S = 0.05  # by which a server's span may begin after guidellm sent the request


@dataclass(frozen=True)
class RunSpread:
    """Logarithms for one run: real over composed step time, and real over stated share of the client."""

    set_up: str
    level: float
    client: float | None


def main() -> int:
    """Prints a row per run, and the spreads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--training", type=Path)
    parser.add_argument("--servingsim", type=Path)
    parser.add_argument("--client", type=Path)
    options = parser.parse_args()
    if options.client:
        for name in ("jan20-codellama-prefill-1", "jan20-prefill-llama7b-tp1-1"):
            print_client(options.client / name)
    rows = list(run_spreads(public_runs(options.training, options.servingsim), show=True))
    for set_up in (None, *dict.fromkeys(row.set_up for row in rows)) if rows else ():
        spread, client = leave_out(rows, set_up)
        write(
            f"{'without ' + set_up if set_up else 'all':44} step time sd {spread.sd:.3f}, "
            f"freedom {spread.freedom:.0f}, client sd {client.sd:.2f}, freedom {client.freedom:.0f}"
        )
    return 0


def public_runs(training: Path | None, servingsim: Path | None) -> Iterator[PublicRun]:
    """All runs of both sets, with measured costs."""
    if training:
        yield from training_runs(training, "measured")
    if servingsim:
        yield from servingsim_runs(servingsim, "measured")


def run_spreads(runs: Iterable[PublicRun], *, show: bool = False) -> Iterator[RunSpread]:
    """What each run says of the spreads."""
    for run in runs:
        if run.overloaded or run.scenario.moe_data_parallel_size > 1:
            continue
        row = run_spread(run)
        if show:
            client = "" if row.client is None else f", client {100 * math.expm1(row.client):+6.1f}%"
            write(f"{run.name:44} step time {100 * math.expm1(row.level):+6.1f}%{client}")
        yield row


def run_spread(run: PublicRun) -> RunSpread:
    """Step time by the secant on the logarithm of mean TPOT, then the client's share of median TTFT."""
    real = math.log(float(np.nanmean(run.results.tpot_s)))
    before, tpot = 0.0, _latencies(run, 0.0)[0]
    at = math.log(_FIRST)
    here = _latencies(run, at)
    for _ in range(_ROUNDS):
        slope = (here[0] - tpot) / (at - before)
        if abs(here[0] - real) < 1e-3 or slope <= 0:
            break
        before, tpot = at, here[0]
        at += (real - tpot) / slope
        here = _latencies(run, at)
    if run.results.client is None:
        return RunSpread(run.set_up, at, None)
    share = CLIENT_SHARE.fixed_s + CLIENT_SHARE.token_s * run.results.trace.integers("input_tokens").mean()
    left = float(np.median(run.results.ttft_s)) - here[1]
    return RunSpread(run.set_up, at, math.log(max(left, 0.1 * share) / share))


def _latencies(run: PublicRun, level: float) -> tuple[float, float]:
    """Logarithm of mean TPOT, and median TTFT in seconds, with step times exp(level) as long."""
    costs = scaled(run.scenario.step_costs(), math.exp(level))
    requests = replay(run.results.trace, run.scenario, costs=costs, kept=Kept(steps=False)).requests
    return math.log(float(requests["tpot_s"].mean())), float(requests["ttft_s"].median())


def leave_out(rows: Iterable[RunSpread], set_up: str | None) -> tuple[MeasuredSpread, ClientShare]:
    """Spreads over all set-ups but one."""
    levels, clients = defaultdict(list), defaultdict(list)
    for row in rows:
        if row.set_up != set_up:
            levels[row.set_up].append(row.level)
            if row.client is not None:
                clients[row.set_up].append(row.client)
    spread = MeasuredSpread(_root_mean_square(levels), float(len(levels)))
    share = CLIENT_SHARE
    client = ClientShare(share.fixed_s, share.token_s, _root_mean_square(clients), float(len(clients)))
    return spread, client


def _root_mean_square(values: dict[str, list[float]]) -> float:
    means = [float(np.mean(of)) for of in values.values()]
    return float(np.sqrt(np.mean(np.square(means)))) if means else 0.0


# -- the client's share


def print_client(folder: Path) -> None:
    """What guidellm's TTFT holds beside the server's, and the server's beside queue and prefill."""
    spans = server_spans(folder / "traces.json")
    begins = spans[:, 0]
    pairs = []
    for request in client_requests(folder / "guidellm-results.json"):
        sent, ttft = request["request_start_time"], request["time_to_first_token_ms"] / 1e3
        at = int(np.searchsorted(begins, sent))
        if at < len(begins) and begins[at] - sent < _MATCHED_S:
            pairs.append((spans[at, 4] / 1e3, 1e3 * (ttft - spans[at, 1])))
    tokens, share = np.array(pairs).T
    fixed, each = _line(tokens, share)
    least = 1e3 * np.percentile(spans[:, 1] - spans[:, 2] - spans[:, 3], 10)
    write(
        f"{folder.name}: client {fixed:.1f} ms and {each:.1f} ms per 1,000 tokens over the server's TTFT "
        f"({len(pairs)} requests), the server's at least {least:.1f} ms over queue and prefill"
    )


def _line(x: Any, y: Any) -> Any:
    from scipy.optimize import least_squares

    return least_squares(lambda p: y - p[0] - p[1] * x, (5.0, 1.0), loss="soft_l1").x


def server_spans(path: Path) -> Any:
    """Begin, TTFT, queue and prefill (seconds) and prompt tokens of each request, by begin."""
    names = ("latency.time_to_first_token", "latency.time_in_queue", "latency.time_in_model_prefill")
    rows = []
    for line in path.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
                found = {item["key"]: next(iter(item["value"].values())) for item in span["attributes"]}
                if "gen_ai.latency.e2e" not in found:
                    continue
                values = [float(found[f"gen_ai.{name}"]) for name in (*names, "usage.prompt_tokens")]
                rows.append((int(span["startTimeUnixNano"]) / 1e9, *values))
    return np.array(sorted(rows))


def client_requests(path: Path) -> Iterator[dict[str, Any]]:
    """Requests that guidellm completed."""
    for benchmark in json.loads(path.read_text())["benchmarks"]:
        yield from benchmark["requests"]["successful"]


def write(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
