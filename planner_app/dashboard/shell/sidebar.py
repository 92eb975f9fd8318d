"""The side bar: every parameter of a view as a widget, each bound to the URL by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import streamlit as st
from pagecast.planner_app.dashboard.shell.elements import plain
from pagecast.planner_app.dashboard.shell.state import Session, session
from pagecast.planner_app.dashboard.shell.view import (
    DEFAULTS,
    GENERATED,
    LOAD_TOOL,
    MADE,
    MOST_REQUESTS,
    NO_SPECULATION,
    UPLOAD,
    PageView,
    same,
    typed_prices,
)
from pagecast.planner_app.dashboard.shell.widgets import (
    WidgetLook,
    host_look,
    more_looks,
    server_looks,
    speculation_looks,
    tier_looks,
    window_look,
)
from pagecast.planner_app.wording.kv_groups import group_words
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario
from pagecast.traces.bundled import sample_names
from pagecast.traces.lengths import HELP

_TRACES = (
    "chat: two minutes of conversations; code: coding agents; rag: questions over documents; "
    "generated: by sliders; load: as load tools make it; upload: a file of your own"
)


def ask() -> PageView:
    """Draws the side bar and gives the view it shows. Errors: BadInput for parameters that make none."""
    own = session()
    values: dict[str, Any] = {}
    with st.sidebar:
        values |= _trace(own)
        values |= _server()
        values |= _tiers(values["model"])
        values |= _speculation()
        values |= _more(values["gpu"])
    own.view = PageView.of(values)
    own.problem = own.problem or refused(own.linked, values)
    own.linked = {}
    return own.view


def refused(linked: Mapping[str, str], shown: Mapping[str, Any]) -> str:
    """Which values of a link are not those that the side bar shows; empty where all are."""
    texts = []
    for name, value in shown.items():
        if name in linked and name != "upload" and not same(name, linked[name], value):
            texts.append(f"{name} is {linked[name][:40]!r}; the page shows {value}")
    return "; ".join(texts)


def _bound(widget: Any, name: str, label: str, *arguments: Any, **options: Any) -> dict[str, Any]:
    """A widget that begins with the parameter's default and writes itself into the URL.

    The default is told in every run: a browser that has not drawn the widget by the second run goes by that.
    """
    if widget is st.selectbox:
        options["index"] = list(options["options"]).index(DEFAULTS[name])
    else:
        options["value"] = DEFAULTS[name]
    return {name: widget(label, *arguments, key=name, bind="query-params", **options)}


def _trace(own: Session) -> dict[str, Any]:
    st.subheader("Traffic", anchor=False)
    values = _bound(
        st.selectbox, "trace", "Trace", options=[*sample_names(), GENERATED, LOAD_TOOL, UPLOAD], help=_TRACES
    )
    if values["trace"] == UPLOAD:
        values |= _upload(own)
    elif values["trace"] == GENERATED:
        values |= _generator()
    elif values["trace"] == LOAD_TOOL:
        values |= _made()
    values |= _bound(
        st.slider,
        "rate",
        "Rate",
        0.1,
        8.0,
        step=0.1,
        format="%.1f ×",
        help="times as many arrivals per second as in the trace; think times stay",
    )
    values |= _bound(
        st.number_input,
        "concurrency",
        "Requests at a time, at most",
        0,
        MOST_REQUESTS,
        help="as load tools send them: the next when one ends, whatever the trace's times; 0: at its times",
    )
    if values["concurrency"]:
        about = "until so many are sent at a time"
        values |= _bound(st.number_input, "concurrency_ramp", "Ramp, seconds", 0.0, 1e6, help=about)
    values |= _bound(
        st.slider,
        "max_tokens",
        "max_tokens, × the output",
        1.0,
        16.0,
        step=0.5,
        help="most tokens that a request may generate: SGLang and TensorRT-LLM reserve memory for it",
    )
    about = "all requests again, when all have ended; the last time is measured"
    values |= _bound(st.number_input, "repeat_prompts", "Times that all are sent", 1, 20, help=about)
    about = "copies of the first request, before measuring"
    values |= _bound(st.number_input, "warmup", "Warm-up requests", 0, MOST_REQUESTS, help=about)
    return values | _bound(
        st.number_input,
        "requests",
        "Requests",
        1,
        MOST_REQUESTS,
        step=500,
        help="the first so many of the trace; up to 2,000 (800 with speculation) are replayed at once, more "
        "beside the page",
    )


def _upload(own: Session) -> dict[str, Any]:
    file = st.file_uploader(
        "Trace file", help="any format that `pagecast replay` reads, `.gz` and `.zst` too, told by content"
    )
    if file is not None:
        if file.file_id not in own.sent:
            own.sent[file.file_id] = own.keep_upload(file.name, file.getvalue())
        digest = own.sent[file.file_id]
    else:
        digest = own.view["upload"] or st.query_params.get("upload", "")
    if digest in own.uploads:
        st.caption(f"Showing {plain(own.uploads[digest].name)}")
    return {"upload": digest, **_bound(st.toggle, "sort", "Put requests in order of arrival")}


def _generator() -> dict[str, Any]:
    values = _bound(
        st.slider,
        "g_rate",
        "Arrivals per second",
        0.1,
        50.0,
        step=0.1,
        help="of requests; of sessions where they have several turns",
    )
    values |= _bound(
        st.slider,
        "g_cv",
        "Burstiness",
        0.2,
        5.0,
        step=0.1,
        help="coefficient of variation of the times between arrivals; 1: Poisson",
    )
    values |= _bound(st.slider, "g_input", "Prompt tokens, median", 16, 16_000, step=16)
    values |= _bound(st.slider, "g_output", "Output tokens, median", 1, 2000)
    values |= _bound(
        st.slider,
        "g_turns",
        "Turns of a session, median",
        1,
        10,
        help="1: single requests; more: conversations, whose prompts grow",
    )
    if values["g_turns"] > 1:
        values |= _bound(st.slider, "g_system", "Shared system prompt, tokens", 0, 8000, step=50)
    return values


def _made() -> dict[str, Any]:
    """The fields of a load that makes requests."""
    length = f"a number, or {HELP}"
    values = _bound(st.text_input, "m_input_len", "Prompt tokens", help=length)
    values |= _bound(st.text_input, "m_output_len", "Output tokens", help=length)
    about = "a length L that is a number becomes uniform from L(1-R) to L(1+R)"
    values |= _bound(st.slider, "m_range_ratio", "Range ratio", 0.0, 0.95, step=0.05, help=about)
    values |= _bound(st.number_input, "m_prefix_len", "Shared prefix, tokens", 0, MOST_REQUESTS)
    if values["m_prefix_len"]:
        values |= _bound(st.number_input, "m_num_prefixes", "Different prefixes", 1, MOST_REQUESTS)
    values |= _bound(st.text_input, "m_turns", "Turns of a conversation", help=length)
    if values["m_turns"] != MADE["m_turns"]:
        values |= _bound(st.text_input, "m_turn_delay", "Seconds between turns", help=length)
    else:
        about = "so many, sent over and over; 0: all are different"
        values |= _bound(
            st.number_input, "m_distinct_prompts", "Different prompts", 0, MOST_REQUESTS, help=about
        )
    about = "0: all at once, or as fast as the requests at a time allow"
    values |= _bound(st.number_input, "m_request_rate", "Requests per second", 0.0, 1e6, help=about)
    if values["m_request_rate"]:
        about = "shape of the gamma law of times between requests: below 1 in bursts, 1 Poisson"
        values |= _bound(st.number_input, "m_burstiness", "Burstiness", 0.01, 1e6, help=about)
        values |= _bound(st.number_input, "m_burst_size", "Requests that come at once", 1, MOST_REQUESTS)
        about = "the rate grows to this one, linearly; 0: it stays"
        values |= _bound(
            st.number_input, "m_ramp_up_end_rps", "Requests per second at the end", 0.0, 1e6, help=about
        )
    return values


def _server() -> dict[str, Any]:
    st.subheader("Server", anchor=False)
    return _looking(server_looks())


def _tiers(model: str) -> dict[str, Any]:
    """Host memory and disk, and windows where the model has them."""
    st.subheader("KV tiers and windows", anchor=False)
    values = _looking(host_look())
    if values["kv_offloading_size"]:
        values |= _looking(tier_looks())
    words = _groups_of(model)
    if words:
        values |= _looking(window_look())
        st.caption(plain(f"KV groups: {words}"))
    return values


def _groups_of(model: str) -> str:
    """The KV groups of a model whose layers keep different tokens; empty for others, and for no model."""
    try:
        layout = Scenario.make({"model": model}).layout()
    except BadInput:
        return ""
    if layout.plain:
        return ""
    groups = Counter(group_words(spec) for spec in layout.specs)
    return ", ".join(f"{count} × {words}" if count > 1 else words for words, count in groups.items())


def _speculation() -> dict[str, Any]:
    st.subheader("Speculation", anchor=False)
    method, *others = speculation_looks().items()
    values = _looking(dict([method]))
    return values if values["spec_method"] == NO_SPECULATION else values | _looking(dict(others))


def _more(gpu: str) -> dict[str, Any]:
    st.subheader("SLO and prices", anchor=False)
    values = _bound(
        st.text_input,
        "slo",
        "SLO",
        max_chars=200,
        help="as for `pagecast plan --slo`: ttft_p99<2s,tpot_p95<50ms,goodput(ttft<2s,tpot<50ms)>0.99",
    )
    values |= _bound(
        st.text_input,
        "prices",
        "Prices, $ per GPU-hour",
        max_chars=200,
        help="yours: a number for the GPU above, or several with their names: H200=3.5, L40S=1.2; none is "
        "built in",
    )
    try:
        typed_prices(values["prices"], gpu)
    except BadInput as error:
        st.error(plain(error))
    more = st.expander("More", on_change="rerun", key="more")
    with more:
        values |= _looking_at_given(more_looks(), all_shown=bool(more.open))
    return values


def _looking_at_given(looks: dict[str, WidgetLook], *, all_shown: bool) -> dict[str, Any]:
    """The fields of a part that is closed at first: until it is opened only those that differ from defaults.

    Dozens of widgets that nobody sees keep a browser busy for longer than all others.
    """
    given = {
        name
        for name in looks
        if all_shown
        or name in st.query_params
        or st.session_state.get(name, DEFAULTS[name]) != DEFAULTS[name]
    }
    values = {name: DEFAULTS[name] for name in looks if name not in given}
    return values | _looking({name: look for name, look in looks.items() if name in given})


def _looking(looks: dict[str, WidgetLook]) -> dict[str, Any]:
    """The fields of a scenario, each as it looks."""
    values: dict[str, Any] = {}
    for name, look in looks.items():
        values |= _bound(getattr(st, look.widget), name, look.label, **look.options)
    return values
