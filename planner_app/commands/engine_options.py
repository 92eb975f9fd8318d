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
from dataclasses import Field, fields
from typing import Annotated, Any

import typer
from pagecast.engine.options import POLICIES, Options
from pagecast.planner_app.commands.field_options import Gather, parameter, scenario_fields
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.option import Option
from pagecast.sim.scenario import Scenario, value_type

EngineOptions = dict[str, Any]
_ON_OFF = "--{0}/--no-{0}"


def _declared(one: Field[Any]) -> Option:
    """What the engine says of a field; nothing for those that are described as a scenario's."""
    declared: Option = one.metadata.get("declared", Option(""))
    return declared


_FIELDS = {_declared(one).flat or one.name: one for one in fields(Options)}
"""The engine's fields by their names on the command line."""


def engine_fields(kind: type[Scenario] = Scenario) -> list[str]:
    """The scenario's fields that the engine is started with too; the seed is a command's own."""
    return [name for name in kind.flat_fields() if name in _FIELDS and name != "seed"]


def _alone_names() -> list[str]:
    """The options that only the engine has."""
    return [name for name in _FIELDS if name not in scenario_fields()]


def engine_options(given: Mapping[str, Any]) -> EngineOptions:
    """The engine's arguments among options that were given; the others are left to the engine."""
    names = [*_alone_names(), *engine_fields()]
    return _named({name: given[name] for name in names if name in given})


def changed_options(options: EngineOptions) -> dict[str, Any]:
    """The values that are not the engine's defaults, by their options' names without dashes."""
    return {
        name.replace("_", "-"): options[one.name]
        for name, one in _FIELDS.items()
        if one.name in options and options[one.name] != one.default
    }


def engine_gather(*, without: Sequence[str] = (), defaults: Mapping[str, Any] | None = None) -> Gather:
    """All options of the engine, in the place of a parameter, which gets their values.

    `without`: fields that the command does not take; `defaults` replace the engine's own.
    """
    usual: dict[str, Any] = {name: one.default for name, one in _FIELDS.items()}
    usual.update(defaults or {})
    alone = [name for name in _alone_names() if name not in without]
    shared = [name for name in engine_fields() if name not in without]
    values = {name: usual[name] for name in (*alone, *shared)}
    options = [_alone(name, values[name]) for name in alone]
    options += [_shared(name, values[name]) for name in shared]
    return Gather(options, lambda given: _named({**values, **given}))


def _alone(name: str, default: Any) -> inspect.Parameter:
    return parameter(name, type(default), _alone_option(name, on_off=default is True), default)


def _alone_option(name: str, *, on_off: bool = False) -> Any:
    written = name.replace("_", "-")
    names = _ON_OFF.format(written) if on_off else f"--{written}"
    return typer.Option(names, help=_declared(_FIELDS[name]).about)


def _engine_only_options() -> list[inspect.Parameter]:
    return [
        parameter(name, type(_FIELDS[name].default) | None, _alone_option(name), None)
        for name in _alone_names()
    ]


EngineOnly = Annotated[EngineOptions, Gather(_engine_only_options(), dict)]
"""The options that only the engine has, for a command that has those of a scenario too: those given."""


def _shared(name: str, default: Any) -> inspect.Parameter:
    info = scenario_fields()[name]
    kind = value_type(info)
    names = (_ON_OFF.format(name.replace("_", "-")),) if kind is bool else ()
    option = typer.Option(*names, help=_declared(_FIELDS[name]).about or info.description)
    return parameter(name, kind | None if default is None else kind, option, default)


def _named(values: dict[str, Any]) -> EngineOptions:
    """As `Options` names them. Errors: BadInput under an option's own name."""
    _check_least(values)
    policy = values.get("scheduling_policy")
    if policy not in (None, *POLICIES):
        raise BadInput(f"--scheduling-policy {policy!r} is not the engine's; choose {' or '.join(POLICIES)}")
    options = {_FIELDS[name].name: value for name, value in values.items()}
    if options.get("pipeline_depth") is not None:
        options["pipeline_depth"] = int(options["pipeline_depth"])
    return options


def _check_least(values: dict[str, Any]) -> None:
    """Of numbers that the engine has other names for. Errors: BadInput below what a scenario takes."""
    for name, one in _FIELDS.items():
        value = None if name == one.name else values.get(name)
        if value is None:
            continue
        for bound in scenario_fields()[name].metadata:
            if value < getattr(bound, "ge", value):
                option = name.replace("_", "-")
                raise BadInput(f"--{option} is {value}; it must be at least {bound.ge}")
