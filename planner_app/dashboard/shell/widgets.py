"""The widget of each field of a scenario: what only the dashboard knows of it.

A field without an entry gets a widget by its type, with its description and bounds, under "More".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

import streamlit as st
from pagecast.planner_app.dashboard.shell.view import NO_SPECULATION
from pagecast.sim.core.engines.registry import engine_texts
from pagecast.sim.costs.calibration.file import own_names, shipped
from pagecast.sim.machine.gpus import GPUS
from pagecast.sim.machine.models import known_models
from pagecast.sim.machine.secondary_tiers import FILE_SYSTEM
from pagecast.sim.scenario import Scenario, value_type
from pagecast.sim.speculation.config import Method
from pydantic.fields import FieldInfo

_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_BATCHED = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_KV_DTYPES = ("auto", "bf16", "fp16", "fp8")
_GPUS_EACH = (1, 2, 4, 8, 16)
_HOST_GIB = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)
_STEP = 0.01  # of fractions
_THREE = {None: "default", True: "true", False: "false"}  # as links have them
_OF_ENGINE = "the engine's"


@dataclass(frozen=True, slots=True)
class WidgetLook:
    """How a parameter is asked for: a function of streamlit, its label and its other arguments."""

    widget: str
    label: str
    options: dict[str, Any] = field(default_factory=dict)


def server_looks() -> dict[str, WidgetLook]:
    """Of the fields that are always in sight, in their order."""
    return {
        "model": WidgetLook(
            "selectbox",
            "Model",
            {
                "options": _typed_too(known_models(), "model"),
                "accept_new_options": True,
                "help": "a known model, or type the path of a folder with its config.json",
            },
        ),
        "gpu": WidgetLook("selectbox", "GPU", {"options": [gpu.name for gpu in GPUS]}),
        "block_size": _open_look("Block size, tokens", _BLOCK_SIZES),
        "gpu_memory_utilization": WidgetLook(
            "number_input",
            "HBM budget, fraction of the GPU",
            {
                "min_value": 0.05,
                "max_value": 1.0,
                "step": _STEP,
                "placeholder": _OF_ENGINE,
                "help": "vLLM's --gpu-memory-utilization: weights, workspace and KV cache together",
            },
        ),
        "max_num_batched_tokens": _open_look("Batched tokens, most in a step", _BATCHED),
        "max_num_seqs": _open_look("Sequences, most at once", _SEQUENCES),
        "kv_cache_dtype": WidgetLook("selectbox", "KV dtype", {"options": _KV_DTYPES}),
        "engine": WidgetLook(
            "selectbox",
            "Engine",
            {
                "options": engine_texts(),
                "help": "the engine and version whose rules and defaults are followed",
            },
        ),
        "enable_prefix_caching": WidgetLook(
            "selectbox", "Prefix caching", {"options": list(_THREE), "format_func": _THREE.__getitem__}
        ),
    }


def _open_look(label: str, values: tuple[int, ...]) -> WidgetLook:
    """Of a number that the engine decides where none is chosen."""
    return WidgetLook(
        "selectbox",
        label,
        {
            "options": [None, *values],
            "format_func": lambda value: _OF_ENGINE if value is None else str(value),
        },
    )


def host_look() -> dict[str, WidgetLook]:
    """Of the size of the host tier."""
    return {
        "kv_offloading_size": WidgetLook(
            "select_slider",
            "Host memory for KV, GiB",
            {
                "options": _number_too(_HOST_GIB, "kv_offloading_size"),
                "format_func": "{:g}".format,
                "help": "vLLM's --kv-offloading-size: blocks are kept there too, and loaded when the GPU has "
                "lost them; 0: no host tier. Links and block sizes are under More",
            },
        )
    }


def tier_looks() -> dict[str, WidgetLook]:
    """Of what a host tier has besides its size."""
    return {
        "kv_offloading_eviction_policy": WidgetLook(
            "selectbox",
            "Eviction from host memory",
            {"options": ["lru", "arc"], "help": "least recently used, or adaptive replacement"},
        ),
        "secondary_tiers": WidgetLook(
            "selectbox",
            "Disk behind host memory",
            {
                "options": _typed_too((None, FILE_SYSTEM), "secondary_tiers"),
                "format_func": _name_or_none,
                "help": "vLLM's --secondary-tiers: fs keeps a file per block, and has room for all of them",
            },
        ),
    }


def window_look() -> dict[str, WidgetLook]:
    """Of the fields that matter where the layers of a model keep different tokens."""
    return {
        "disable_hybrid_kv_cache_manager": WidgetLook(
            "toggle",
            "Keep every token in every layer",
            {"help": "vLLM's --disable-hybrid-kv-cache-manager: no block is freed as it leaves a window"},
        )
    }


def speculation_looks() -> dict[str, WidgetLook]:
    """Of the parameters that make a `speculative_config`, the method first."""
    return {
        "spec_method": WidgetLook(
            "selectbox",
            "Drafts by",
            {
                "options": [NO_SPECULATION, *get_args(Method)],
                "help": "who drafts tokens; tables of acceptance, draft models and vLLM's JSON: speculative "
                "config, under More",
            },
        ),
        "spec_drafts": WidgetLook(
            "slider",
            "Drafts per request and step",
            {"min_value": 1, "max_value": 16},
        ),
        "spec_acceptance": WidgetLook(
            "slider",
            "Acceptance",
            {
                "min_value": 0.0,
                "max_value": 1.0,
                "step": 0.05,
                "help": "chance that a draft is right if those before it are",
            },
        ),
    }


def _costs() -> list[str]:
    return ["auto", "roofline", *sorted(shipped()), *own_names()]


def more_looks(kind: type[Scenario] = Scenario) -> dict[str, WidgetLook]:
    """Of all other fields of a scenario: those with an entry here first."""
    first = {
        "tensor_parallel_size": WidgetLook("selectbox", "GPUs per replica", {"options": _GPUS_EACH}),
        "costs": WidgetLook("selectbox", "Step costs", {"options": _costs()}),
        "scheduling_policy": WidgetLook("selectbox", "Queue order", {"options": ["fcfs", "priority"]}),
        "seed": WidgetLook("number_input", "Seed", {"min_value": 0, "max_value": 2**31 - 1}),
    }
    elsewhere = {*first, *server_looks(), *host_look(), *tier_looks(), *window_look()}
    fields = kind.flat_fields().items()
    rest = {name: plain_look(name, info) for name, info in fields if name not in elsewhere}
    return {**first, **rest}


def plain_look(name: str, info: FieldInfo) -> WidgetLook:
    """A widget by a field's type; an optional field's begins empty."""
    label, optional = name.replace("_", " ").capitalize(), info.default is None
    about: dict[str, Any] = {"help": info.description}
    values = value_type(info)
    if get_origin(info.annotation) is Literal:
        return WidgetLook("selectbox", label, {"options": list(get_args(info.annotation)), **about})
    if values is bool and optional:
        return WidgetLook(
            "selectbox", label, {"options": list(_THREE), "format_func": _THREE.__getitem__, **about}
        )
    if values is bool:
        return WidgetLook("toggle", label, about)
    if values is str:
        return WidgetLook("text_input", label, {"max_chars": 200, **about})
    return WidgetLook("number_input", label, {**_bounds(info, values), **about})


def _bounds(info: FieldInfo, values: type) -> dict[str, Any]:
    step = _STEP if values is float else 1
    bounds: dict[str, Any] = {"step": step}
    for bound in info.metadata:
        if (least := getattr(bound, "ge", None)) is not None:
            bounds["min_value"] = values(least)
        if (above := getattr(bound, "gt", None)) is not None:
            bounds["min_value"] = values(above) + step
        if (most := getattr(bound, "le", None)) is not None:
            bounds["max_value"] = values(most)
    return bounds


def _typed_too(options: tuple[str | None, ...], name: str) -> list[str | None]:
    """The known ones, and the one that was typed or came with the URL."""
    typed = st.session_state.get(name)
    return [*options, *([typed] if typed and typed not in options else [])]


def _number_too(options: tuple[float, ...], name: str) -> list[float]:
    """The known numbers, and the one that came with the URL, in order."""
    try:
        given = float(st.session_state.get(name) or st.query_params.get(name) or 0)
    except (TypeError, ValueError):
        given = 0.0
    return sorted({*options, *([given] if 0 < given < float("inf") else [])})


def _name_or_none(name: str | None) -> str:
    return name or "none"
