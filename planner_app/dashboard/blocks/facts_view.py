"""Facts of one block under the grid: holders, age, scope, its chain to the root, and its history."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import streamlit as st
from pagecast.planner_app.dashboard.blocks.detail import BlockFacts
from pagecast.planner_app.dashboard.blocks.frames import Frames, Look
from pagecast.planner_app.dashboard.shell.elements import plain
from pagecast.planner_app.wording.quantities import seconds

_WORDS = {
    Look.FREE: "free",
    Look.CACHED: "cached",
    Look.REQUEST: "one request's",
    Look.TAIL: "a tail, partly full",
    Look.SHARED: "shared",
    Look.LOADING: "being loaded from host memory",
}
_MOST_LINES = 200
_MOST_NAMES = 8


def show(frames: Frames, facts: BlockFacts, name: Callable[[int], str]) -> None:
    """Draws it. `name` gives request numbers their names."""
    with st.container(border=True):
        st.markdown(f"**Block {facts.block:,}** is {_WORDS[facts.look]}. {plain(_holders(facts, name))}")
        if facts.writer < 0:
            return
        st.markdown(plain(_content(frames, facts, name)))
        left, right = st.columns([3, 2])
        with left:
            _chain(facts)
        with right:
            _life(frames, facts, name)


def _holders(facts: BlockFacts, name: Callable[[int], str]) -> str:
    if facts.writer < 0:
        return "No request has used it yet."
    if not facts.owners:
        return "Nobody holds it."
    names = [name(owner) for owner in facts.owners]
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return f"Held by {', '.join(names[:_MOST_NAMES])}{more}."


def _content(frames: Frames, facts: BlockFacts, name: Callable[[int], str]) -> str:
    verb = "Its content is gone; it was" if facts.look is Look.FREE else "It is"
    age = f" ({seconds(facts.age_s)})" if facts.age_s is not None else ""
    place = f"written by request {name(facts.writer)} in {facts.group}"
    if not facts.group:
        size = frames.log.block_size
        first = facts.position * size
        place = (
            f"block {facts.position:,} of request {name(facts.writer)}'s sequence, tokens {first:,} to "
            f"{first + size - 1:,}"
        )
    return (
        f"{verb} {place}. Given out {facts.age_steps:,} steps ago{age}; last touched "
        f"{facts.idle_steps:,} steps ago. Scope: {facts.scope} (digest {facts.scope_digest[:8]}); no request "
        "of another scope can find it."
    )


def _chain(facts: BlockFacts) -> None:
    if facts.group:
        st.caption("With several KV groups no chain of keys is drawn.")
        return
    if not facts.chain:
        st.caption("A free block has no key: nothing leads to it.")
        return
    there = sum(link.there for link in facts.chain)
    st.caption(
        f"Chain of keys, from this block back to the root: each key extends the one below it. {there:,} of "
        f"{len(facts.chain):,} blocks still have this content."
    )
    rows = [
        (
            str(link.position),
            link.key[:16] if link.key else "not full yet",
            str(link.block),
            "yes" if link.there else "no, taken since",
        )
        for link in reversed(facts.chain)
    ]
    rows.append(("root", facts.scope_digest[:16], "", "the scope: where every chain begins"))
    table = pd.DataFrame(rows, columns=["in the sequence", "key", "block", "content still there"])
    st.dataframe(table, hide_index=True, height=min(38 + 35 * len(table), 320))


def _life(frames: Frames, facts: BlockFacts, name: Callable[[int], str]) -> None:
    st.caption("Its life, latest first: step, event, request.")
    latest = facts.events[: -_MOST_LINES - 1 : -1]
    lines = [frames.log.line(index, name, with_blocks=False) for index in latest]
    st.code("\n".join(lines), language=None, height=280, wrap_lines=True)
