"""The side bar: every parameter of a view as a widget, each bound to the URL by its name."""

from __future__ import annotations

from typing import Any

import streamlit as st
from pagecast.planner_app.dashboard.shell.elements import plain
from pagecast.planner_app.dashboard.shell.state import Session, session
from pagecast.planner_app.dashboard.shell.view import DEFAULTS, GENERATED, MOST_REQUESTS, UPLOAD, View
from pagecast.sim.core.rules.profiles import PROFILES
from pagecast.sim.costs.calibration.file import shipped
from pagecast.sim.machine.gpus import GPUS
from pagecast.sim.machine.models import known_models
from pagecast.traces.bundled import sample_names

_TRACES = (
    "chat: two minutes of conversations; code: coding agents; rag: questions over documents; "
    "generated: by sliders; upload: a file of your own"
)
_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_BATCHED = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_KV_DTYPES = ("auto", "bf16", "fp16", "fp8")
_GPUS_EACH = (1, 2, 4, 8, 16)


def ask() -> View:
    """Draws the side bar and gives the view it shows. Errors: BadInput for parameters that make none."""
    own = session()
    given: dict[str, Any] = {}
    with st.sidebar:
        given |= _trace(own)
        given |= _server()
        given |= _more()
    own.view = View.of(given)
    return own.view


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
    given = _bound(st.selectbox, "trace", "Trace", options=[*sample_names(), GENERATED, UPLOAD],
                   help=_TRACES)  # fmt: skip
    if given["trace"] == UPLOAD:
        given |= _upload(own)
    elif given["trace"] == GENERATED:
        given |= _generator()
    given |= _bound(
        st.slider, "rate", "Rate", 0.1, 8.0, step=0.1, format="%.1f ×",
        help="times as many arrivals a second as in the trace; think times stay",
    )  # fmt: skip
    return given | _bound(
        st.number_input, "requests", "Requests", 1, MOST_REQUESTS, step=500,
        help="the first so many of the trace; up to 2,000 are replayed at once, more beside the page",
    )  # fmt: skip


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
    given = _bound(st.slider, "g_rate", "Arrivals a second", 0.1, 50.0, step=0.1,
                   help="of requests; of sessions where they have several turns")  # fmt: skip
    given |= _bound(st.slider, "g_cv", "Burstiness", 0.2, 5.0, step=0.1,
                    help="coefficient of variation of the times between arrivals; 1: Poisson")  # fmt: skip
    given |= _bound(st.slider, "g_input", "Prompt tokens, median", 16, 16_000, step=16)
    given |= _bound(st.slider, "g_output", "Output tokens, median", 1, 2000)
    given |= _bound(st.slider, "g_turns", "Turns of a session, median", 1, 10,
                    help="1: single requests; more: conversations, whose prompts grow")  # fmt: skip
    if given["g_turns"] > 1:
        given |= _bound(st.slider, "g_system", "Shared system prompt, tokens", 0, 8000, step=50)
    return given


def _server() -> dict[str, Any]:
    st.subheader("Server", anchor=False)
    given = _bound(st.selectbox, "model", "Model", options=_options(known_models(), "model"),
                   accept_new_options=True,
                   help="a known model, or type the path of a folder with its config.json")  # fmt: skip
    given |= _bound(st.selectbox, "gpu", "GPU", options=[gpu.name for gpu in GPUS])
    given |= _bound(st.select_slider, "block_size", "Block size, tokens", options=_BLOCK_SIZES)
    given |= _bound(
        st.slider, "gpu_memory_utilization", "HBM budget, fraction of the GPU", 0.30, 1.0, step=0.01,
        help="vLLM's --gpu-memory-utilization: weights, workspace and KV cache together",
    )  # fmt: skip
    given |= _bound(st.select_slider, "max_num_batched_tokens", "Batched tokens, most in a step",
                    options=_BATCHED)  # fmt: skip
    given |= _bound(st.select_slider, "max_num_seqs", "Sequences, most at once", options=_SEQUENCES)
    given |= _bound(st.selectbox, "kv_cache_dtype", "KV dtype", options=_KV_DTYPES)
    given |= _bound(st.selectbox, "profile", "Profile", options=list(PROFILES),
                    help="the engine whose scheduling rules are followed")  # fmt: skip
    return given | _bound(st.toggle, "enable_prefix_caching", "Prefix caching")


def _more() -> dict[str, Any]:
    given = _bound(
        st.text_input, "slo", "SLO", max_chars=200,
        help="as for `pagecast plan --slo`: ttft_p99<2s,tpot_p95<50ms,goodput(ttft<2s,tpot<50ms)>0.99",
    )  # fmt: skip
    with st.expander("More"):
        given |= _bound(st.selectbox, "tensor_parallel_size", "GPUs per replica", options=_GPUS_EACH)
        given |= _bound(st.selectbox, "costs", "Step costs", options=["auto", "roofline", *sorted(shipped())])
        given |= _bound(st.toggle, "transfer_costs", "Carry a calibration over to other models and GPUs")
        given |= _bound(st.selectbox, "scheduling_policy", "Queue order", options=["fcfs", "priority"])
        given |= _bound(st.number_input, "seed", "Seed", 0, 2**31 - 1)
    return given


def _options(known: tuple[str, ...], name: str) -> list[str]:
    """The known ones, and the one that was typed or came with the URL."""
    typed = st.session_state.get(name)
    return [*known, *([typed] if typed and typed not in known else [])]
