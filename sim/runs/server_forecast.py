"""A server's metrics beside a forecast: a trace with the load that they show, and its replay's figures."""

from __future__ import annotations

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay.result import Result
from pagecast.sim.replay.simulation import replay
from pagecast.sim.runs.server_metrics import ServerFigures
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace, table
from pagecast.traces.seeds import checked_seed
from pagecast.traces.shared_prefix import with_hit_rate

_LEAST = 20  # requests between scrapes: fewer say nothing of a load
_NS = 1e-9


def trace_of_metrics(
    server: ServerFigures,
    *,
    rate: float | None = None,
    requests: int | None = None,
    seed: int = 0,
    name: str = "metrics",
) -> Trace:
    """A trace with the load of a server: its rate over time, lengths, and hit rate.

    Between two times of a range query come as many requests as came then, at random; else they are a
    Poisson process. `rate`: requests per second, where the metrics do not tell (a single dump) or another is
    meant. `requests`: how many, at the rate of the whole span [those of the span]. Errors: BadInput.
    """
    if server.inputs is None or server.outputs is None:
        raise BadInput(f"{name}: no lengths of prompts and answers among the metrics; requests are needed")
    per_s = rate if rate is not None else server.requests_per_s
    if not per_s:
        raise BadInput(
            f"{name}: the metrics do not tell a load per second; give --rate, or two dumps and --seconds, or "
            "a range query"
        )
    random = np.random.default_rng(checked_seed(seed))
    spread = rate is None and requests is None and len(server.times_s) > 2
    if spread:
        pairs = zip(server.times_s, server.times_s[1:], server.counts, strict=False)
        parts = [a + (b - a) * random.random(round(count)) for a, b, count in pairs]
        arrival = np.sort(np.concatenate(parts))
        how = (
            f"{len(arrival):,} requests over {server.seconds:,.0f} s, as many between two times as came then"
        )
    else:
        count = round(server.requests) if requests is None else requests
        if count < 1:
            raise BadInput(f"{name}: no request came in the span of the metrics")
        gaps = random.exponential(1.0, count)
        # As many per second as are asked for, not by chance a few more or less.
        arrival = np.cumsum(gaps) * ((count - 1) / per_s / max(gaps[1:].sum(), 1e-12) if count > 1 else 1.0)
        how = f"{count:,} requests, a Poisson process of {per_s:.3g} per second"
    if not len(arrival):
        raise BadInput(f"{name}: no request came in the span of the metrics")
    columns = {
        "arrival_s": arrival - arrival[0],
        "input_tokens": server.inputs.drawn(len(arrival), random),
        "output_tokens": server.outputs.drawn(len(arrival), random),
    }
    kinds = "one length each: their mean" if len(server.inputs.bounds) == 1 else "lengths by their histograms"
    notes = (f"made from metrics of {server.engine}: {how}; {kinds} (seed {seed})", *server.notes)
    trace = Trace(name, table(columns), notes=notes, lengths_only=True)
    hit_rate = server.figures.get("hit_rate")
    if not hit_rate:
        return trace
    return with_hit_rate(trace, hit_rate, block_tokens=server.block_size or 16, seed=seed)


def figures_of_replay(result: Result) -> dict[str, float]:
    """The figures of a replay that a server's metrics have, by the same names, over its arrivals' span."""
    requests = result.requests
    served = requests[requests["state"] == "completed"]
    arrival = requests["arrival_s"].to_numpy(np.float64)
    span = float(arrival.max() - arrival.min())
    means = {name: float(served[name].mean()) for name in ("ttft_s", "tpot_s", "e2e_s", "queue_s")}
    figures = {
        "hit_rate": float(result.summary["token_hit_rate"] or 0.0),
        "preemptions": float(result.summary["preemptions"]),
        **means,
    }
    if span > 0:
        rate = (len(requests) - 1) / span
        figures |= {
            "requests_per_s": rate,
            "prompt_tokens_per_s": rate * float(requests["input_tokens"].mean()),
            "output_tokens_per_s": rate * float(requests["output_tokens"].mean()),
            "running": rate * (means["e2e_s"] - means["queue_s"]),  # Little's law
            "waiting": rate * means["queue_s"],
        }
    usage = _usage(result, arrival)
    return figures if usage is None else figures | {"kv_usage": usage}


def _usage(result: Result, arrival: np.ndarray) -> float | None:
    """The mean share of KV blocks in use while requests arrived."""
    steps = result.steps
    if not len(steps) or not result.pool_blocks:
        return None
    begin = steps["start_ns"].to_numpy(np.float64) * _NS
    used = steps["used_blocks"].to_numpy(np.float64) / result.pool_blocks
    first, last = float(arrival.min()), float(arrival.max())
    within = (begin >= first) & (begin <= last)
    if not within.any():
        return None
    ends = np.append(begin[1:], begin[-1])
    return float((used * (ends - begin))[within].sum() / (ends - begin)[within].sum())


def forecast_of_metrics(
    server: ServerFigures,
    scenario: Scenario,
    *,
    requests: int | None = None,
) -> dict[str, float]:
    """The figures that `scenario` would show at a server's load. Errors: BadInput."""
    if server.requests < _LEAST:
        raise BadInput(
            f"{server.requests:.0f} requests came in the span of the metrics; {_LEAST} tell a load"
        )
    trace = trace_of_metrics(server, requests=requests)
    return figures_of_replay(replay(trace, scenario))
