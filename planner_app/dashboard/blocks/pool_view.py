"""The pool as a grid that plays: frames go to the browser a part at a time, and clicks come back.

In the browser `pool.js` draws them on a canvas; play and scrub ask no server. It fetches nothing and puts no
text into the page as HTML. It tells of a click (`block`) and of where play stopped (`frame`).
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import streamlit as st
from pagecast.planner_app.dashboard.blocks.frames import WHOSE, Frames, Look
from pagecast.planner_app.dashboard.blocks.log import CODES
from pagecast.sim.core.events import EventKind

# Blues and greens are requests, warm colours what concerns all: apart for colour-blind eyes by lightness.
COLORS: dict[str, Any] = {
    "free": "rgba(128,128,128,0.25)",
    "cached": "#8A8F98",
    "tail": "#F0E442",
    "shared": "#D55E00",
    "loading": "#CC79A7",
    "requests": ["#56B4E9", "#009E73", "#3F7FD0", "#8FD3C1", "#6F9FB8", "#B3D4F5"],
}
LOOKS = (
    (Look.REQUEST, "one request's", "full, and held by one request; a shade per request"),
    (Look.SHARED, "shared", "held by several requests at once"),
    (Look.TAIL, "tail", "a request's last block: what it does not fill is wasted for now"),
    (Look.CACHED, "cached", "held by nobody; its content can still be found, until its space is needed"),
    (Look.FREE, "free", "holds nothing that anybody could find"),
    (Look.LOADING, "loading", "held by one request, and being filled from host memory"),
)
_SPEED = 60


def payload(frames: Frames, part: int, name: Callable[[int], str], *, key: str) -> dict[str, Any]:
    """Data for the browser of one part of a replay; `name` gives request numbers their names in the log."""
    a, b = frames.span(part)
    begin, end = int(frames.first[a]), int(frames.first[b])
    changes = frames.changes[frames.change[a] : frames.change[b]]
    times = frames.time_s
    return {
        "key": f"{key}/{part}",
        "blocks": frames.log.num_blocks,
        "offset": a,
        "total": len(frames),
        "steps": _packed(frames.step[a:b]),
        "times": None if times is None else np.round(times[a:b], 4).tolist(),
        "first": _packed(frames.first[a : b + 1] - begin),
        "before": _packed(frames.before[part]),
        "changes": _packed(changes.reshape(-1)),
        "change": _packed(frames.change[a : b + 1] - frames.change[a]),
        "log": [frames.log.line(index, name) for index in range(begin, end)],
        "names": None,
        "grows": "",
        "speed": _SPEED,
        "colors": COLORS,
        "looks": [
            {"value": int(look) | (2 << WHOSE if look is Look.SHARED else 0), "name": label, "help": why}
            for look, label, why in LOOKS
            if look is not Look.LOADING or np.any(frames.log.kind == CODES[EventKind.LOADING])
        ],
    }


def _packed(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values, "<i4").tobytes()).decode()


def show_pool(
    data: dict[str, Any],
    key: str,
    *,
    at: int,
    token: int,
    selection: int | None,
    on_frame: Callable[[], None],
    on_block: Callable[[], None],
    autoplay: bool = False,
) -> Any:
    """Draws the grid. It goes to frame `at` whenever `token` is another than before.

    The result's `frame` and `block` are where play stopped and what was clicked; None before.
    """
    component_data = {**data, "at": at, "token": token, "chosen": selection, "autoplay": autoplay}
    return _component()(key=key, data=component_data, on_frame_change=on_frame, on_block_change=on_block)


def _component() -> Any:
    # Registered anew with each run: a registry belongs to a server, and registering is cheap.
    parts = {kind: _text(kind) for kind in ("html", "css", "js")}
    return st.components.v2.component("pagecast_pool", **parts)


@cache
def _text(kind: str) -> str:
    return Path(__file__).with_name(f"pool.{kind}").read_text(encoding="utf-8")


@cache
def request_name(number: int) -> str:
    """A request of a trace by its row."""
    return f"r{number}"
