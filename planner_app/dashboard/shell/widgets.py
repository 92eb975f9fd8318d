"""The widget of each field of a scenario: what only the dashboard knows of it.

A field without an entry gets a widget by its type, with its description and bounds, under "More".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

import streamlit as st
from pagecast.sim.core.rules.profiles import PROFILES
from pagecast.sim.costs.calibration.file import shipped
from pagecast.sim.machine.gpus import GPUS
from pagecast.sim.machine.models import known_models
from pagecast.sim.scenario import Scenario, value_type
from pydantic.fields import FieldInfo

_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_BATCHED = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_KV_DTYPES = ("auto", "bf16", "fp16", "fp8")
_GPUS_EACH = (1, 2, 4, 8, 16)
_STEP = 0.01  # of fractions
_THREE = {None: "default", True: "on", False: "off"}


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
        "block_size": WidgetLook("select_slider", "Block size, tokens", {"options": _BLOCK_SIZES}),
        "gpu_memory_utilization": WidgetLook(
            "slider",
            "HBM budget, fraction of the GPU",
            {
                "min_value": 0.30,
                "max_value": 1.0,
                "step": _STEP,
                "help": "vLLM's --gpu-memory-utilization: weights, workspace and KV cache together",
            },
        ),
        "max_num_batched_tokens": WidgetLook(
            "select_slider", "Batched tokens, most in a step", {"options": _BATCHED}
        ),
        "max_num_seqs": WidgetLook("select_slider", "Sequences, most at once", {"options": _SEQUENCES}),
        "kv_cache_dtype": WidgetLook("selectbox", "KV dtype", {"options": _KV_DTYPES}),
        "profile": WidgetLook(
            "selectbox",
            "Profile",
            {
                "options": list(PROFILES),
                "help": "the engine whose scheduling rules are followed",
            },
        ),
        "enable_prefix_caching": WidgetLook("toggle", "Prefix caching"),
    }


def more_looks(kind: type[Scenario] = Scenario) -> dict[str, WidgetLook]:
    """Of all other fields of a scenario: those with an entry here first."""
    first = {
        "tensor_parallel_size": WidgetLook("selectbox", "GPUs per replica", {"options": _GPUS_EACH}),
        "costs": WidgetLook("selectbox", "Step costs", {"options": ["auto", "roofline", *sorted(shipped())]}),
        "transfer_costs": WidgetLook("toggle", "Carry a calibration over to other models and GPUs"),
        "scheduling_policy": WidgetLook("selectbox", "Queue order", {"options": ["fcfs", "priority"]}),
        "seed": WidgetLook("number_input", "Seed", {"min_value": 0, "max_value": 2**31 - 1}),
    }
    server = server_looks()
    rest = {
        name: plain_look(name, info)
        for name, info in kind.model_fields.items()
        if name not in first and name not in server
    }
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


def _typed_too(options: tuple[str, ...], name: str) -> list[str]:
    """The known ones, and the one that was typed or came with the URL."""
    typed = st.session_state.get(name)
    return [*options, *([typed] if typed and typed not in options else [])]
