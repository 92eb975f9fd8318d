"""View of the sandbox: its buttons, its pool, and the state of every request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
import streamlit as st
import xxhash
from pagecast.planner_app.dashboard.blocks import facts_view
from pagecast.planner_app.dashboard.blocks.detail import facts
from pagecast.planner_app.dashboard.blocks.frames import Frames, frames
from pagecast.planner_app.dashboard.blocks.pool_view import payload, show_pool
from pagecast.planner_app.dashboard.blocks.sandbox import (
    MOST_ACTIONS,
    MOST_BLOCKS,
    MOST_TOKENS,
    TEXTS,
    Action,
    Sandbox,
    SandboxServer,
    name_of,
    parse,
    text_of,
)
from pagecast.planner_app.dashboard.shell.elements import plain
from pagecast.planner_app.dashboard.shell.problems import fragment
from pagecast.sim.core.engines.registry import PROFILES
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.request import State

_GRID, _DONE, _URL, _SHOWN = "sandbox_grid", "_sandbox_done", "sandbox", "_sandbox_shown"
_SPEED = 10
_OWN = "its own"
_NUMBERED = [name for name, profile in PROFILES.items() if profile.numbered]  # those with a map of blocks
EXAMPLES = {
    "Shared prefix: B and C find what A computed": (
        "add-96-64-1-64-0_step-1_add-96-64-1-64-0_add-80-64-1-64-0_step-1_step-20"
    ),
    "Fork: three answers to one prompt": "add-88-0-0-96-0_step-2_fork-0-96_fork-0-96_step-1_step-24",
    "Eviction: a cached prompt makes room, its tail first": (
        "add-400-0-0-16-0_step-20_add-300-0-0-16-0_step-20_add-240-0-0-16-0_step-4"
    ),
    "Preemption: the newest gives way, and computes again": (
        "add-220-0-0-200-0_add-220-0-0-200-0_add-220-0-0-200-0_step-60_step-60"
    ),
    "Tenants: the same text, but another scope finds nothing": (
        "add-96-96-1-32-1_step-4_add-96-96-1-32-2_step-4_add-96-96-1-32-1_step-4"
    ),
}


def render() -> None:
    """Draws it, as a part of the page that is drawn anew without the rest."""
    st.caption("The scheduler and cache of every replay, driven by hand: the real ones, no model of them.")
    fragment(_draw)()


def _draw() -> None:
    setting = _setting()
    actions = _actions()
    sandbox = _sandbox(setting, actions)
    if sandbox is None:
        return
    st.query_params[_URL] = text_of(actions)
    _buttons(sandbox)
    if sandbox.message:
        st.info(plain(sandbox.message))
    movie = frames(sandbox.log())
    _pool(movie, sandbox, actions)
    _requests(sandbox)
    _chosen(movie, sandbox)


def _sandbox(setting: SandboxServer, actions: tuple[Action, ...]) -> Sandbox | None:
    try:
        return Sandbox.of(setting, actions)
    except BadInput as error:
        st.error(plain(error), icon=":material/error:")
        st.button("Start anew", on_click=_set, args=((),), key="sb_anew_error")
        return None


# ---- what was done


def _actions() -> tuple[Action, ...]:
    if _DONE not in st.session_state:
        try:
            st.session_state[_DONE] = parse(st.query_params.get(_URL, ""))
        except BadInput as error:
            st.warning(plain(error))
            st.session_state[_DONE] = ()
    done: tuple[Action, ...] = st.session_state[_DONE]
    return done


def _set(actions: tuple[Action, ...]) -> None:
    st.session_state[_DONE] = actions


def _do(name: str, *words: int) -> None:
    done = _actions()
    if len(done) < MOST_ACTIONS:
        _set((*done, Action(name, tuple(words))))


def _example() -> None:
    example = st.session_state.get("sb_example")
    if example:
        _set(parse(EXAMPLES[example]))
        st.session_state["sb_example"] = None
        _shown().count = 0


def _setting() -> SandboxServer:
    base = SandboxServer()
    with st.expander("Server"):
        columns = st.columns(5, vertical_alignment="bottom")
        persistence: dict[str, Any] = {"persist_state": "session", "bind": "query-params"}
        return SandboxServer(
            columns[0].number_input("Blocks", 1, MOST_BLOCKS, base.blocks, key="sb_blocks", **persistence),
            columns[1].selectbox("Tokens a block", (1, 4, 8, 16, 32, 64), 3, key="sb_size", **persistence),
            columns[2].selectbox("Rules of", _NUMBERED, key="sb_profile", **persistence),
            columns[3].toggle("Prefix caching", base.caching, key="sb_caching", **persistence),
            columns[4].number_input(
                "Tokens per step, at most", 32, 8192, base.batched_tokens, key="sb_tokens", **persistence
            ),
        )


# ---- the buttons


def _buttons(sandbox: Sandbox) -> None:
    left, middle, right = st.columns([5, 4, 3])
    with left.container(border=True, height="stretch"):
        _add()
    with middle.container(border=True, height="stretch"):
        _one_request(sandbox)
    with right.container(border=True, height="stretch"):
        _time()


def _add() -> None:
    first, second, third = st.columns(3)
    prompt = first.number_input("Prompt", 1, MOST_TOKENS, 96, key="sb_prompt", help="tokens")
    output = second.number_input(
        "Output",
        1,
        MOST_TOKENS,
        64,
        key="sb_output",
        help="tokens that it generates unless finished or cancelled",
    )
    tenant = third.number_input(
        "Tenant", 0, 9, 0, key="sb_tenant", help="its cache salt, a part of the scope; 0: none"
    )
    first, second, third = st.columns(3, vertical_alignment="bottom")
    text = first.selectbox(
        "Begins with",
        range(len(TEXTS)),
        key="sb_text",
        format_func=lambda number: f"text {TEXTS[number]}" if number else _OWN,
        help="prompts that begin with the same text share its full blocks",
    )
    shared = second.number_input(
        "Of that text",
        0,
        MOST_TOKENS,
        64,
        key="sb_shared",
        disabled=not text,
        help="tokens; the rest of the prompt is its own",
    )
    third.button(
        "Add",
        key="sb_add",
        on_click=_do,
        width="stretch",
        type="primary",
        args=("add", prompt, shared if text else 0, text, output, tenant),
    )


def _one_request(sandbox: Sandbox) -> None:
    live = [request.index for request in sandbox.requests if request.alive]
    if live and st.session_state.get("sb_request") not in live:
        st.session_state["sb_request"] = live[-1]
    first, second = st.columns([3, 2])
    name = first.selectbox(
        "Request",
        live,
        key="sb_request",
        placeholder="none is live",
        format_func=lambda index: _standing(sandbox, index),
    )
    tokens = second.number_input(
        "Grow by", 1, 512, 16, key="sb_grow_tokens", help="tokens; a step serves all, so others grow as well"
    )
    request = sandbox.requests[name] if name is not None else None
    number = name if name is not None else 0
    output = request.output_tokens if request is not None else 1
    generates = request is not None and request.state in (State.DECODE, State.DRAINING)
    buttons = (
        ("Grow", ("grow", number, tokens), request is not None, "steps until it has these tokens more"),
        ("Fork", ("fork", number, output), request is not None, "one more answer to the same prompt"),
        ("Finish", ("finish", number), generates, "ends with the next step, as after its last token"),
        ("Cancel", ("cancel", number), request is not None, "ends now, and gives its blocks back"),
    )
    columns = st.columns(2)
    for index, (label, action, can, help) in enumerate(buttons):
        columns[index % 2].button(
            label,
            key=f"sb_{action[0]}",
            on_click=_do,
            args=action,
            disabled=not can,
            width="stretch",
            help=help,
        )


def _standing(sandbox: Sandbox, index: int) -> str:
    request = sandbox.requests[index]
    return f"{request.id}, {request.state.value}"


def _time() -> None:
    first, second = st.columns(2)
    first.button("1 step", key="sb_step", on_click=_do, args=("step", 1), width="stretch")
    second.button("16 steps", key="sb_steps", on_click=_do, args=("step", 16), width="stretch")
    done = _actions()
    first.button("Undo", key="sb_undo", on_click=_set, args=(done[:-1],), disabled=not done, width="stretch")
    second.button("Clear", key="sb_anew", on_click=_set, args=((),), disabled=not done, width="stretch")
    st.selectbox(
        "Show me",
        list(EXAMPLES),
        index=None,
        key="sb_example",
        on_change=_example,
        placeholder="an example …",
    )
    if len(done) >= MOST_ACTIONS:
        st.caption(f"{MOST_ACTIONS} actions are as many as a sandbox takes: undo some, or clear it.")


# ---- what came of it


@dataclass
class _BrowserState:
    """State of the browser: whose frames it has, how many, where play began and where it stopped."""

    key: str = ""
    count: int = 0
    token: int = 0
    start: int = 0
    frame: int = 0


def _shown() -> _BrowserState:
    state: _BrowserState = st.session_state.setdefault(_SHOWN, _BrowserState())
    return state


def _pool(movie: Frames, sandbox: Sandbox, actions: tuple[Action, ...]) -> None:
    """The grid, which plays what the last action did."""
    key = xxhash.xxh3_64_hexdigest(f"{sandbox.setting} {text_of(actions)}".encode())
    frame_count = _shown()
    if frame_count.key != key:
        frame_count.key, frame_count.token, frame_count.frame = key, frame_count.token + 1, len(movie) - 1
        frame_count.start, frame_count.count = max(min(frame_count.count, len(movie)) - 1, 0), len(movie)
    data = {
        **payload(movie, 0, name_of, key=key),
        "grows": "sandbox",
        "speed": _SPEED,
        "names": [name_of(number) for number in range(len(sandbox.requests))],
    }
    show_pool(
        data,
        _GRID,
        at=frame_count.start,
        token=frame_count.token,
        selection=st.session_state.get("sb_block"),
        on_frame=_take_frame,
        on_block=_take_block,
        autoplay=frame_count.start < len(movie) - 1,
    )


def _take_frame() -> None:
    value = st.session_state[_GRID].get("frame")
    if isinstance(value, int):
        _shown().frame = value


def _take_block() -> None:
    value = st.session_state[_GRID].get("block")
    if isinstance(value, int):
        st.session_state["sb_block"] = value


def _requests(sandbox: Sandbox) -> None:
    if not sandbox.requests:
        st.caption("The pool is empty. Add a request and make a step, or choose an example.")
        return
    memory = sandbox.scheduler.memory
    st.caption(
        f"Step {sandbox.scheduler.log.step}: {memory.used_blocks} of {memory.num_blocks} blocks "
        f"held, {memory.evicted_blocks} evicted so far, {sandbox.scheduler.preemptions} preemptions."
    )
    rows = [_row(sandbox, number) for number in range(len(sandbox.requests))]
    st.dataframe(pd.DataFrame(rows), hide_index=True, height=min(38 + 35 * len(rows), 300))


def _row(sandbox: Sandbox, number: int) -> dict[str, Any]:
    request = sandbox.requests[number]
    memory = sandbox.scheduler.memory
    live = memory.holds(request)
    tokens = sandbox.tokens_of(request) if live else 0
    blocks = memory.blocks(request)
    return {
        "request": request.id,
        "state": request.state.value,
        "prompt tokens": request.prompt_tokens,
        "found in the cache": max(request.cached_tokens, 0),
        "tokens held": tokens,
        "blocks": len(blocks),
        "tail waste, tokens": len(blocks) * sandbox.setting.block_size - tokens,
        "preempted": request.preemptions,
        "scope": sandbox.scopes[number].salt or "default",
    }


def _chosen(movie: Frames, sandbox: Sandbox) -> None:
    most = movie.log.num_blocks - 1
    if (st.session_state.get("sb_block") or 0) > most:
        st.session_state["sb_block"] = most
    left, _ = st.columns([1, 4])
    block = left.number_input("Block", 0, most, value=None, key="sb_block", placeholder="none")
    if block is None or not len(movie):
        return
    frame = min(max(_shown().frame, 0), len(movie) - 1)
    block_facts = facts(movie, frame, block, lambda n: sandbox.requests[n].keys, sandbox.scopes.__getitem__)
    facts_view.show(movie, block_facts, name_of)
