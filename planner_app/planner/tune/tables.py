"""A tuning as rows of text, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from pagecast.planner_app.planner.sweep.space import shown
from pagecast.planner_app.planner.tune.knobs import TuneResult
from pagecast.planner_app.planner.tune.setting import WAITING
from pagecast.planner_app.wording.quantities import seconds

_TIMES = (
    "unserved",
    "ttft_mean_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "e2e_mean_s",
    "admissible_concurrency",
    "static_concurrency",
    "static_limit",
)
_BLOCKS = (
    "reused_prefix_tokens",
    "tail_waste_tokens",
    "tail_waste_share",
    "table_entries",
    "table_bytes",
    "lookup_blocks",
    "lookup_s",
)
_HBM = ("kv_gib", "reused_prefix_tokens", "token_hit_rate", "evicted_blocks", "preemptions", "rejected")
_DECIDES = ("admissible_concurrency", "static_concurrency", "token_hit_rate", "ttft_mean_s", "e2e_mean_s")
_NOW = " now"  # the value in force
_WHERE_SOME = ("unserved",)  # columns that are left out where all values are 0
_TABLES = ("tail_waste_share", "table_entries", "lookup_blocks", "lookup_s")
TITLES = {
    "reused_prefix_tokens": "hit tokens",
    "token_hit_rate": "hit rate",
    "tail_waste_tokens": "tail waste, tokens",
    "tail_waste_share": "tail waste",
    "table_entries": "table entries",
    "table_bytes": "table bytes",
    "lookup_blocks": "blocks looked up",
    "lookup_s": "lookup",
    "ttft_mean_s": "TTFT mean",
    "ttft_p99_s": "TTFT p99",
    "tpot_mean_s": "TPOT mean",
    "e2e_mean_s": "E2E mean",
    "kv_gib": "KV GiB",
    "evicted_blocks": "evicted",
    "preemptions": "preempted",
    "rejected": "rejected",
    "unserved": "unserved",
    "admissible_concurrency": "users admitted",
    "static_concurrency": "room by arithmetic",
    "static_limit": "which binds",
}


def tables(tuned: TuneResult) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of tables: reuse, blocks, then times and room. The recommended row is starred, and the
    one of the value in force marked.

    Settings that can't run are left out.
    """
    groups = (_BLOCKS, _TIMES) if tuned.knob == "block_size" else (_HBM, _TABLES, _TIMES)
    return [_table(tuned, names) for names in groups]


def shortest(tuned: TuneResult, most: int) -> tuple[list[str], list[list[str]]]:
    """Header and at most so many rows of the table that decides: those around the recommended value, and the
    one in force."""
    header, rows = _table(tuned, (*_WHERE_SOME, *_DECIDES))
    chosen = next((at for at, row in enumerate(rows) if row[0].startswith("*")), 0)
    by_interest = sorted(
        range(len(rows)), key=lambda at: (at != chosen, not rows[at][0].endswith(_NOW), abs(at - chosen))
    )
    told = by_interest[:most]
    return header, [row for at, row in enumerate(rows) if at in told]


def _table(tuned: TuneResult, columns: tuple[str, ...]) -> tuple[list[str], list[list[str]]]:
    table = tuned.table.assign(_chosen=tuned.is_chosen)
    ran = table[table["reason"] == ""]
    names = [name for name in columns if name in ran and (name not in _WHERE_SOME or ran[name].any())]
    rows = []
    for row in ran.to_dict("records"):
        star = "*" if row["_chosen"] else ""
        now = _NOW if row[tuned.knob] == getattr(tuned.scenario, tuned.knob) else ""
        rows.append([f"{star}{shown(row[tuned.knob])}{now}", *(cell(name, row) for name in names)])
    return [tuned.knob.replace("_", " "), *(TITLES[name] for name in names)], rows


def cell(name: str, row: Mapping[Hashable, Any]) -> str:
    """A figure of a row: of users, more may be admitted than were tried."""
    at_limit = name == "admissible_concurrency" and row.get("admissible_at_limit") is True
    return f">= {text(name, row[name])}" if at_limit else text(name, row[name])


def admits(tuned: TuneResult) -> str:
    """One line on settings that admit all the users that were tried; empty where none does."""
    if "admissible_at_limit" not in tuned.table or not tuned.table["admissible_at_limit"].eq(True).any():
        return ""
    seqs = f"max_num_seqs ({tuned.scenario.max_num_seqs:,})"
    if tuned.slo:
        return f'">=" marks settings that keep the SLO with all the users tried, {WAITING} times {seqs}'
    return f'">=" marks settings that admit {seqs} users: more would only wait, which --slo can bound'


def cannot_run(tuned: TuneResult) -> str:
    """One line on the settings that can't run; empty if all can.

    Of neighbours it says why the last of them can't: values may be too small, or too large.
    """
    groups: list[tuple[list[str], str]] = []
    before = ""
    for value, reason in zip(tuned.table[tuned.knob], tuned.table["reason"], strict=True):
        if reason:
            values = groups.pop()[0] if before else []
            groups.append(([*values, shown(value)], reason))
        before = reason
    if not groups:
        return ""
    return f"can't run: {tuned.knob} " + "; ".join(f"{', '.join(values)}: {why}" for values, why in groups)


def text(name: str, value: Any) -> str:
    """A figure as people read it."""
    if value is None or value != value:
        return "-"
    if isinstance(value, str):
        return value
    if name.endswith("_s"):
        return seconds(value)
    if name in ("token_hit_rate", "tail_waste_share"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.1f}"
