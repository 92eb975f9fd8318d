"""The traffic that an answer is about, in a line."""

from __future__ import annotations

from pagecast.planner_app.planner.capacity.users import requests_per_s
from pagecast.planner_app.wording.quantities import counted
from pagecast.sim.core.errors import BadInput
from pagecast.traces.schema import Trace


def traffic(trace: Trace, *, paced: bool = True) -> str:
    """`chat: 2,000 requests at 16.6/s, mean prompt 2,194 tokens, output 202`.

    The rate is the one that `plan` counts: all requests of the sessions that start in a second. With a limit
    on requests at a time there is none. `paced`: arrivals or such a limit set the pace, and are told.
    """
    prompt, output = (trace.integers(name).mean() for name in ("input_tokens", "output_tokens"))
    requests = f"{counted(len(trace), 'request')}{_pace(trace) if paced else ''}"
    text = f"{trace.name}: {requests}, mean prompt {prompt:,.0f} tokens, output {output:,.0f}"
    if trace.assumed_reuse is not None:
        return f"{text}; no contents: {trace.assumed_reuse:.0%} reuse assumed"
    return f"{text}; no contents: reuse unknown" if trace.lengths_only else text


def _pace(trace: Trace) -> str:
    if trace.concurrency is not None:
        return f", {trace.concurrency.most:,} at a time"
    try:
        rate = requests_per_s(trace)
    except BadInput:  # all come at once
        return ""
    return f" at {rate:,.0f}/s" if rate >= 100 else f" at {rate:.3g}/s"
