"""Effects of tiers, windows and speculation: the side bar's scenario beside the same one without them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import streamlit as st
from pagecast.planner_app.dashboard.shell.cards import change
from pagecast.planner_app.dashboard.shell.elements import plain, show_progress
from pagecast.planner_app.dashboard.shell.replays import result_for
from pagecast.planner_app.dashboard.shell.state import Session
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.dashboard.shell.widgets import host_look, speculation_looks, tier_looks, window_look
from pagecast.planner_app.wording.quantities import counted, seconds
from pagecast.sim.replay import Result
from pagecast.sim.replay.replicates import summary_figures
from pagecast.traces.schema import Trace

KNOBS = (*host_look(), *tier_looks(), *window_look(), *speculation_looks(), "speculative_config")
SLOT = "without"

_percent = "{:.1%}".format


@dataclass(frozen=True, slots=True)
class _Row:
    """One figure of the table. `share`: it is one, and its change is in points."""

    title: str
    figure: str
    words: Callable[[float], str]
    share: bool = False


_ROWS = (
    _Row("TTFT, mean", "ttft_s.mean", seconds),
    _Row("TTFT, p99", "ttft_s.p99", seconds),
    _Row("TPOT, mean", "tpot_s.mean", seconds),
    _Row("TPOT, p99", "tpot_s.p99", seconds),
    _Row("Output tokens/s", "output_tokens_per_s", "{:,.0f}".format),
    _Row("Prompt tokens from the GPU's cache", "on_gpu", _percent, share=True),
    _Row("Prompt tokens from host memory", "in_host", _percent, share=True),
    _Row("Prompt tokens from the disk", "on_disk", _percent, share=True),
    _Row("KV in use at peak", "peak_kv_usage", _percent, share=True),
    _Row("Tokens per request and step", "step_tokens", "{:.2f}".format),
)
_ALWAYS = tuple(row.figure for row in _ROWS if row.figure not in ("in_host", "on_disk", "step_tokens"))


def show(own: Session, view: PageView, trace: Trace, result: Result) -> None:
    """Draws the table, where a knob is on; the replay without it is a job if the trace is long."""
    names = active(view)
    if not names:
        return
    plain_view = view.without(KNOBS)
    reference = result_for(own, plain_view, trace, SLOT)
    title = " and ".join(", ".join(names).rsplit(", ", 1))
    if reference is None:
        show_progress(SLOT, f"the same without {title}")
        return
    with st.container(border=True):
        st.markdown(f"**Effect of {plain(title)}**")
        st.table(effects(reference, result))
        for sentence in sentences(result):
            st.caption(plain(sentence))


def active(view: PageView) -> list[str]:
    """The knobs that are on, in words."""
    scenario = view.scenario()
    names = []
    if scenario.host is not None:
        names.append(f"{scenario.host.size_gib:g} GiB of host memory")
        if scenario.host.disk is not None:
            names.append("a disk")
    if scenario.speculation is not None:
        drafts = counted(scenario.speculation.num_speculative_tokens, "draft")
        names.append(f"{drafts} by {scenario.speculation.method}")
    if scenario.disable_hybrid_kv_cache_manager:
        names.append("tokens kept in every layer")
    return names


def effects(reference: Result, result: Result) -> pd.DataFrame:
    """Figures without and with the knobs, and their changes, as Markdown texts."""
    before, after = _figures(reference), _figures(result)
    lines = []
    for row in _ROWS:
        if row.figure not in _ALWAYS and before.get(row.figure) == after.get(row.figure):
            continue
        old, new = before.get(row.figure, math.nan), after.get(row.figure, math.nan)
        lines.append((row.title, *(plain(text) for text in _cells(row, old, new))))
    return pd.DataFrame(lines, columns=["", "without", "with", "change"]).set_index("")


def _cells(row: _Row, old: float, new: float) -> tuple[str, str, str]:
    before, after = ("–" if math.isnan(value) else row.words(value) for value in (old, new))
    if math.isnan(old) or math.isnan(new) or (not old and not row.share):
        return before, after, "–"
    return before, after, change(new, old, share=row.share)


def _figures(result: Result) -> dict[str, float]:
    figures = summary_figures(result)
    sources = result.summary["prompt_tokens_by_source"]
    tokens = sum(sources.values())
    if tokens:
        figures["on_gpu"] = (sources["exact"] + sources["partial"]) / tokens
        figures["in_host"] = sources["host"] / tokens
        figures["on_disk"] = sources["disk"] / tokens
    speculation = result.summary.get("speculation")
    figures["step_tokens"] = speculation["mean_acceptance_length"] if speculation else 1.0
    return figures


def sentences(result: Result) -> list[str]:
    """One sentence per tier or method on how much it was used."""
    texts = []
    if offloading := result.summary.get("offloading"):
        texts.append(_on_host(offloading))
    if (speculation := result.summary.get("speculation")) and speculation["num_drafts"]:
        texts.append(
            f"{speculation['acceptance_rate']:.0%} of {counted(speculation['num_draft_tokens'], 'draft')} "
            "were right. They pay most where few requests run at once; with many, verifying them takes "
            "compute that others need."
        )
    return texts


def _on_host(offloading: dict[str, float]) -> str:
    busy = f"the link was busy for {offloading['load_busy']:.1%} of the time with loads"
    if offloading["requests_with_host_hit"]:
        return f"{counted(int(offloading['requests_with_host_hit']), 'request')} loaded something; {busy}."
    if offloading["evicted_host_blocks"]:
        return (
            "No request found in host memory what the GPU had lost: blocks were evicted there too before "
            "anybody asked again."
        )
    return (
        "No request found in host memory what the GPU had lost: it lost nothing that anybody asked for again."
    )
