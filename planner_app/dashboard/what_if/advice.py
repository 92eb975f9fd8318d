"""Advice on the cards of the what-if: one sentence each that says what to do.

The rules look at the replay's own figures: what most of TTFT is, how full the KV cache was, what was evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.dashboard.shell.workload import hits_of
from pagecast.sim.replay import Result
from pagecast.traces.schema import Trace

FULL = 0.95  # of the KV blocks in use at peak: requests wait for blocks
_LITTLE = 0.5  # of the KV blocks: more memory would stay empty
_RAISE = {
    "KV blocks": "To serve more users, raise the HBM budget or add a replica.",
    "batch size": "To serve more users, raise the batch size (sequences at once).",
    "token budget": "To serve more users, raise the batched tokens per step.",
    "compute": "To serve more users, take a faster GPU or add a replica.",
}
_NEGLIGIBLE = 0.005  # of block references


def lost_hits(view: PageView, trace: Trace, result: Result) -> float | None:
    """Share of block references that a cache of this size misses and an endless one would find.

    None where nothing was evicted, and for layers that keep different tokens, which are not counted so.
    """
    if not result.summary["evicted_blocks"] or not result.scenario.layout().plain:
        return None
    if result.room is not None and result.room.enough_blocks:
        return 0.0
    reuse = hits_of(view, trace)
    return float(reuse.infinite - reuse.ratio(result.summary["num_gpu_blocks"]))


def advice_on(
    figure: str, result: Result, verdicts: Sequence[tuple[str, bool]], lost: float | None = None
) -> str:
    """Advice on a figure, by its name in `summary_figures`; `lost` as `lost_hits` gives it."""
    holds = all(holds for _, holds in verdicts) if verdicts else None
    if figure.startswith("ttft"):
        return _on_ttft(result, holds)
    if figure.startswith("tpot"):
        return _on_tpot(result, holds)
    return _on_reuse(result, lost)


def advice_on_load(binding: str, users: int | None) -> str:
    """Advice on how to admit more than `users`; `binding` is the limit of the static envelope."""
    if users is None:
        return "Wait for the simulation before you plan with this figure."
    if not users:
        return "Take a faster GPU or loosen the SLO: one user alone breaks it, so no further replica helps."
    return _RAISE.get(binding, "Plan for fewer users than this.")


def advice_on_cost(priced: bool, result: Result) -> str:
    """Advice on how to pay less per token."""
    if not priced:
        return f"Type a price for {result.scenario.gpu} in the side bar."
    if result.summary["peak_kv_usage"] < _LITTLE and not result.summary["preemptions"]:
        return "Send this replica more traffic, or take a cheaper GPU: the Load page compares them."
    return "Compare GPUs on the Load page."


def _on_ttft(result: Result, holds: bool | None) -> str:
    summary = result.summary
    mean, queue = summary["ttft_s"]["mean"], summary["queue_s"]["mean"]
    if holds:
        return "Nothing to do: TTFT keeps the SLO."
    if not summary["completed"] or not mean:
        return "Serve shorter requests, or give the KV cache more memory: no request got a token."
    if queue < mean / 2:
        return "Most of TTFT is prefill: reuse more prefixes, or take a faster GPU."
    if summary["peak_kv_usage"] >= FULL:
        return "Requests wait for KV blocks: raise the HBM budget or add a replica."
    return (
        "Requests queue for compute or a place in the batch: add a replica, or raise the sequences at once."
    )


def _on_tpot(result: Result, holds: bool | None) -> str:
    if holds:
        return "Nothing to do: TPOT keeps the SLO."
    if result.summary["preemptions"]:
        return "Requests are preempted and computed twice: admit fewer sequences at once."
    return "Shorten the steps: fewer sequences at once, fewer batched tokens, or a faster GPU."


def _on_reuse(result: Result, lost: float | None) -> str:
    summary = result.summary
    if not result.scenario.enable_prefix_caching:
        return "Switch prefix caching on."
    if not summary["eligible_prefix_tokens"]:
        return "Nothing to do: the prompts are shorter than a block."
    if lost is not None and lost > _NEGLIGIBLE:
        return (
            f"Give the KV cache more memory: an endless one would find {lost:.1%} more of the prefixes. The "
            "Tune page shows how much pays."
        )
    if lost is not None:
        return "Nothing to do: nobody asked again for what was evicted."
    if summary["evicted_blocks"]:
        return "Prefixes were evicted; the Tune page shows what they cost."
    return "Nothing to do: no prefix was evicted, so a larger cache would find no more."
