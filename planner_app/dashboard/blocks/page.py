"""Blocks: the pool as a grid, through a replay of the side bar's scenario or by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import streamlit as st
from pagecast.planner_app.dashboard.blocks import facts_view, sandbox_view
from pagecast.planner_app.dashboard.blocks.detail import facts
from pagecast.planner_app.dashboard.blocks.frames import Frames, frames
from pagecast.planner_app.dashboard.blocks.log import record
from pagecast.planner_app.dashboard.blocks.pool_view import payload, request_name, show_pool
from pagecast.planner_app.dashboard.shell.elements import show_progress
from pagecast.planner_app.dashboard.shell.jobs import Results
from pagecast.planner_app.dashboard.shell.problems import fragment
from pagecast.planner_app.dashboard.shell.replays import trace_for
from pagecast.planner_app.dashboard.shell.state import session
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.scope import Scope
from pagecast.sim.replay.feed import Feed
from pagecast.sim.scenario import Scenario
from pagecast.traces.operations import select
from pagecast.traces.schema import Trace

MOST_REQUESTS = 5000  # that are played: 100 MB of events at worst
_PLAY, _HAND = "A replay", "By hand"
_BLOCK, _GRID, _PLACE = "block", "pool_grid", "_pool_place"
_payloads = Results(most=6)


def render() -> None:
    """Draws the page: by hand at first, or the replay where the link names a place in it."""
    of_replay = {"frame", _BLOCK} & {*st.query_params} and "sandbox" not in st.query_params
    mode = st.segmented_control(
        "What to watch",
        [_HAND, _PLAY],
        default=_PLAY if of_replay else _HAND,
        key="watch",
        required=True,
        bind="query-params",
        label_visibility="collapsed",
    )
    if mode == _HAND:
        sandbox_view.render()
    else:
        _replay()


def _replay() -> None:
    own, view = session(), session().view
    trace = trace_for(own, view)
    if trace is None:
        show_progress("read", "reading the upload")
        return
    if len(trace) > MOST_REQUESTS:
        st.caption(f"Played are the first {MOST_REQUESTS:,} of {len(trace):,} requests.")
        trace = select(trace, np.arange(MOST_REQUESTS))
    key = ("blocks", len(trace), *view.key())
    movie = own.ask("blocks", key, frames_job, trace, view.scenario())
    if movie is None:
        job = own.jobs["blocks"]
        if job.error and not job.running:
            raise BadInput(job.error)
        show_progress("blocks", "replaying, block by block")
        return
    if len(movie):
        fragment(_player)(movie, str(key), trace)
    else:
        st.info("Nothing happened to any block: every request was rejected.")


def frames_job(trace: Trace, scenario: Scenario, *, progress: Any) -> Frames:
    """The frames of a replay; `progress` is called as it advances."""
    return frames(record(trace, scenario, progress), progress)


def _player(movie: Frames, key: str, trace: Trace) -> None:
    at, block = _at(movie, key), _block(movie)
    data = _payload(movie, key, at.part)
    st.query_params["frame"] = str(at.frame)
    show_pool(
        data, _GRID, at=at.frame, token=at.token, selection=block, on_frame=_take_frame, on_block=_take_block
    )
    left, right, _ = st.columns([1, 2, 2], vertical_alignment="bottom")
    left.number_input(
        "Block",
        0,
        movie.log.num_blocks - 1,
        value=None,
        key=_BLOCK,
        bind="query-params",
        placeholder="none",
        help="or click it",
    )
    if len(movie.parts) > 1:
        _choose_part(right, movie, at)
    if block is None:
        st.caption("Click a block, or give its number, to see who holds it, its chain of keys and its life.")
        return
    feed = Feed(trace, movie.log.block_size)
    block_facts = facts(
        movie, at.frame, block, lambda row: feed.request(row, 0).keys, lambda row: scope_of(trace, row)
    )
    facts_view.show(movie, block_facts, request_name)


@dataclass
class _At:
    """Where the play stands. The browser goes to `frame` whenever `token` changes."""

    key: str = ""
    frame: int = 0
    part: int = 0
    token: int = 0


def _at(movie: Frames, key: str) -> _At:
    at: _At | None = st.session_state.get(_PLACE)
    if at is None:
        text = st.query_params.get("frame", "")
        frame = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
        at = st.session_state[_PLACE] = _At(key, frame)
    at.frame = min(at.frame, len(movie) - 1)
    part = movie.part_of(at.frame)
    if (at.key, at.part) != (key, part) or not at.token:
        at.key, at.part, at.token = key, part, at.token + 1
    return at


def _block(movie: Frames) -> int | None:
    """The block asked for, where the pool has it."""
    value: int | None = st.session_state.get(_BLOCK)
    if isinstance(value, int) and value >= movie.log.num_blocks:
        value = st.session_state[_BLOCK] = None
    if value is None and _BLOCK not in st.session_state:
        text = st.query_params.get(_BLOCK, "")
        if text.isascii() and text.isdigit() and len(text) < 10 and int(text) < movie.log.num_blocks:
            return int(text)
    return value


def _payload(movie: Frames, key: str, part: int) -> dict[str, Any]:
    data: dict[str, Any] | None = _payloads.get((key, part))
    if data is None:
        data = payload(movie, part, request_name, key=key)
        _payloads.put((key, part), data)
    return data


def _choose_part(place: Any, movie: Frames, at: _At) -> None:
    names = {number: _part_name(movie, number) for number in range(len(movie.parts))}
    place.selectbox(
        "Part of the replay",
        list(names),
        index=at.part,
        key=f"part-{at.token}",
        format_func=names.__getitem__,
        on_change=_go_to_part,
        args=(movie, at.token),
        help="a long replay goes to the browser a part at a time",
    )


def _part_name(movie: Frames, part: int) -> str:
    a, b = movie.span(part)
    times = movie.time_s
    when = "" if times is None else f", {times[a]:.1f} to {times[b - 1]:.1f} s"
    return f"{part + 1}: steps {movie.step[a]:,} to {movie.step[b - 1]:,}{when}"


def _go_to_part(movie: Frames, token: int) -> None:
    st.session_state[_PLACE].frame = movie.parts[st.session_state[f"part-{token}"]]


def _take_frame() -> None:
    frame = st.session_state[_GRID].get("frame")
    if isinstance(frame, int) and frame >= 0:
        st.session_state[_PLACE].frame = frame


def _take_block() -> None:
    block = st.session_state[_GRID].get("block")
    if isinstance(block, int) and block >= 0:
        st.session_state[_BLOCK] = block


def scope_of(trace: Trace, row: int) -> Scope:
    """The scope of a trace's request."""
    parts = {
        name: str(trace.requests[name].iloc[row])
        for name in ("model", "adapter", "salt")
        if name in trace.requests and trace.requests[name].notna().iloc[row]
    }
    return Scope(**parts)
