"""The options that commands of the real engine share: fields of a scenario, and those that only it has.

@with_options
def bench_command(
    model: ModelName, engine: Annotated[EngineOptions, engine_gather(defaults={"max_model_len": 4096})]
) -> None:
    with open_engine(model, engine) as running: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer
from pagecast.engine.options import Options
from pagecast.planner_app.commands.field_options import Gather, parameter, scenario_fields
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import value_type

EngineOptions = dict[str, Any]
_ON_OFF = "--{0}/--no-{0}"
_POLICIES = ("fcfs", "priority")
_NAMED_APART = {"num_gpu_blocks": "num_blocks", "async_scheduling": "pipeline_depth"}
_ALONE: dict[str, Any] = {  # in the order of `--help`, before the scenario's
    "random_weights": typer.Option("--random-weights", help="random weights, for timing without a download"),
    "device": typer.Option(help="auto (a CUDA GPU), cuda or cpu"),
    "dtype": typer.Option(help="auto (the checkpoint's; float32 on the CPU), bfloat16, float16, float32"),
    "attention": typer.Option(help="auto (triton on a GPU, torch elsewhere), triton, flash-attn, torch"),
    "enforce_eager": typer.Option("--enforce-eager", help="no CUDA graphs"),
}
_ABOUT = {  # where the engine's answer to an option that is not given is another than a scenario's
    "num_gpu_blocks": "usable KV blocks [what fits; 1024 on the CPU]",
    "max_model_len": "longest prompt + output [the model's]",
    "scheduling_policy": f"queue order: {' or '.join(_POLICIES)}",
    "async_scheduling": "plan a step while the last one runs [on; off with speculation]",
    "speculative_config": "speculation by n-grams, as ngram:3 or vLLM's JSON [none]",
}
_DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(Options)}


def engine_fields() -> list[str]:
    """The scenario's fields that the engine is started with too; the seed is a command's own."""
    names = [name for name in scenario_fields() if _NAMED_APART.get(name, name) in _DEFAULTS]
    return [name for name in names if name != "seed"]


def _engine_only_options() -> list[inspect.Parameter]:
    names = [name for name in _ALONE if name not in engine_fields()]
    return [parameter(name, type(_DEFAULTS[name]) | None, _ALONE[name], None) for name in names]


EngineOnly = Annotated[EngineOptions, Gather(_engine_only_options(), dict)]
"""The options that only the engine has, for a command that has those of a scenario too: those given."""


def engine_options(given: Mapping[str, Any]) -> EngineOptions:
    """The engine's arguments among options that were given; the others are left to the engine."""
    names = [*_ALONE, *engine_fields()]
    return _named({name: given[name] for name in names if name in given})


def changed_options(options: EngineOptions) -> dict[str, Any]:
    """The values that are not the engine's defaults, by their options' names without dashes."""
    on_command_line = {theirs: name for name, theirs in _NAMED_APART.items()}
    return {
        on_command_line.get(name, name).replace("_", "-"): value
        for name, value in options.items()
        if value != _DEFAULTS[name]
    }


def engine_gather(*, without: Sequence[str] = (), defaults: Mapping[str, Any] | None = None) -> Gather:
    """All options of the engine, in the place of a parameter, which gets their values.

    `without`: fields that the command does not take; `defaults` replace the engine's own.
    """
    usual = {**_DEFAULTS, "num_gpu_blocks": None, "async_scheduling": None, **(defaults or {})}
    alone = [name for name in _ALONE if name not in (*engine_fields(), *without)]
    shared = [name for name in engine_fields() if name not in without]
    values = {name: usual[name] for name in (*alone, *shared)}
    options = [_alone(name, values[name]) for name in alone]
    options += [_shared(name, values[name]) for name in shared]
    return Gather(options, lambda given: _named({**values, **given}))


def _alone(name: str, default: Any) -> inspect.Parameter:
    option = _ALONE[name]
    if default is True:
        option = typer.Option(_ON_OFF.format(name.replace("_", "-")), help=option.help)
    return parameter(name, type(default), option, default)


def _shared(name: str, default: Any) -> inspect.Parameter:
    info = scenario_fields()[name]
    kind = value_type(info)
    names = (_ON_OFF.format(name.replace("_", "-")),) if kind is bool else ()
    option = typer.Option(*names, help=_ABOUT.get(name, info.description))
    return parameter(name, kind | None if default is None else kind, option, default)


def _named(values: dict[str, Any]) -> EngineOptions:
    """As `Options` names them. Errors: BadInput under an option's own name."""
    _check_least(values)
    policy = values.get("scheduling_policy")
    if policy not in (None, *_POLICIES):
        raise BadInput(f"--scheduling-policy {policy!r} is not the engine's; choose {' or '.join(_POLICIES)}")
    options = {_NAMED_APART.get(name, name): value for name, value in values.items()}
    if options.get("pipeline_depth") is not None:
        options["pipeline_depth"] = int(options["pipeline_depth"])
    return options


def _check_least(values: dict[str, Any]) -> None:
    """Of numbers that the engine has other names for. Errors: BadInput below what a scenario takes."""
    for name in _NAMED_APART:
        value = values.get(name)
        for bound in scenario_fields()[name].metadata:
            if value is not None and value < getattr(bound, "ge", value):
                option = name.replace("_", "-")
                raise BadInput(f"--{option} is {value}; it must be at least {bound.ge}")
