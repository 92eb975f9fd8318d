"""The options of a load: one per field of `Load`, under the names that load tools give them."""

from __future__ import annotations

import inspect

import typer
from pagecast.planner_app.commands.field_options import parameter
from pagecast.planner_app.planner.load_fields import load_fields
from pagecast.sim.scenario import value_type

# Of vllm bench serve and AIPerf, beside the field's own.
_OTHER_NAMES = {
    "num_prompts": ("--request-count",),
    "input_len": ("--random-input-len", "--isl"),
    "output_len": ("--random-output-len", "--osl"),
    "range_ratio": ("--random-range-ratio",),
    "prefix_len": ("--random-prefix-len",),
    "num_prefixes": ("--num-prefix-prompts",),
    "distinct_prompts": ("--num-dataset-entries",),
    "concurrency": ("--max-concurrency",),
    "warmup": ("--num-warmups", "--warmup-request-count"),
}


def load_options() -> list[inspect.Parameter]:
    """An option per field of a load, None where one is not given."""
    parameters = []
    for name, info in load_fields().items():
        names = (f"--{name.replace('_', '-')}", *_OTHER_NAMES.get(name, ()))
        parameters.append(
            parameter(name, value_type(info) | None, typer.Option(*names, help=info.description), None)
        )
    return parameters
