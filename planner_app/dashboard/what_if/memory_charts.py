"""Charts of the HBM budget: the waterfall from the GPU's memory to the KV cache, and bytes per token."""

from __future__ import annotations

import plotly.graph_objects as go
from pagecast.planner_app.reports.style import BLUE, GREEN, GREY, ORANGE, VERMILLION, chart
from pagecast.sim.machine.gpus import GIB
from pagecast.sim.machine.memory import HbmBudget

_KV = "KV cache"


def hbm_waterfall(budget: HbmBudget) -> go.Figure:
    """One GPU's memory, item by item, down to what is left unused."""
    kv = budget.kv_bytes / budget.total_bytes
    caption = (
        f"{budget.num_gpu_blocks:,} blocks of {budget.layout.block_size} tokens get {kv:.0%} of the GPU; "
        f"{budget.limit} sets that. {_unsure(budget)}"
    )
    figure = chart("Where the HBM goes", caption, "", f"GiB of {budget.gpu}'s memory")
    rest = [item for item in budget.items if item.name != _KV]
    ordered = [
        *(item for item in rest if item.name != "margin"),
        *(item for item in budget.items if item.name == _KV),
        *(item for item in rest if item.name == "margin"),
    ]
    sizes = [item.bytes / GIB for item in ordered]
    figure.add_waterfall(
        x=["total", *(item.name for item in ordered)],
        y=[budget.total_bytes / GIB, *(-size for size in sizes)],
        measure=["absolute", *("relative" for _ in sizes)],
        text=[f"{budget.total_bytes / GIB:.1f}", *(f"{size:.1f}" for size in sizes)],
        customdata=["usable memory of the GPU", *(item.detail for item in ordered)],
        hovertemplate="%{x}: %{text} GiB, %{customdata}<extra></extra>",
        textposition="outside",
        connector={"line": {"color": GREY, "width": 1}},
        decreasing={"marker": {"color": BLUE}},
        increasing={"marker": {"color": VERMILLION}},
        totals={"marker": {"color": GREY}},
        cliponaxis=False,
    )
    figure.update_layout(margin={"t": 12})
    figure.update_xaxes(tickangle=-35)
    total = budget.total_bytes / GIB  # room below for the last bars' figures
    figure.update_yaxes(range=[-0.12 * total, 1.12 * total], zeroline=True)
    return figure


def _unsure(budget: HbmBudget) -> str:
    if not budget.uncertain_blocks:
        return ""
    return f"A real start may differ by {budget.uncertain_blocks:,} blocks."


def bytes_per_token(budget: HbmBudget) -> go.Figure:
    """The three figures kept apart: theoretical, allocated, admissible."""
    each = budget.bytes_per_token
    values = {"theoretical": each.theoretical, "allocated": each.allocated, "admissible": each.admissible}
    over = each.admissible / each.theoretical - 1 if each.theoretical else 0.0
    caption = (
        f"Plan with the admissible figure: {each.admissible / 1024:,.1f} KiB per token, {over:+.1%} over the "
        f"bare tensors. It counts whole blocks and block tables, for sequences of {each.sequence_tokens:,} "
        "tokens."
    )
    figure = chart("Bytes per token of KV", caption, "KiB per token, on each GPU", "")
    figure.add_bar(
        x=[value / 1024 for value in values.values()],
        y=list(values),
        orientation="h",
        marker_color=[GREY, ORANGE, GREEN],
        text=[f"{value / 1024:,.1f}" for value in values.values()],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:,.2f} KiB<extra></extra>",
    )
    figure.update_layout(height=260, margin={"t": 12})
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(range=[0, 1.18 * max(values.values()) / 1024])
    return figure
