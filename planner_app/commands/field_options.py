"""Options of commands, made of the fields of models: type, default, bounds and description are the field's.

    @with_options
    def plan_command(arguments: WorkArguments, ask: PlanOptions) -> None: ...

A parameter whose type is an `Options` gives its place to one option per field, and receives the model that
is made of those that were given. `Annotated[..., Gather(...)]` does the same with any other options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_origin

import typer
from annotated_types import Ge, Le
from pagecast.planner_app.options import Options, flag_of
from pagecast.sim.core.engines.registry import ENGINES
from pagecast.sim.scenario import Scenario, value_type
from pydantic.fields import FieldInfo

Command = Callable[..., None]
_REQUIRED = inspect.Parameter.empty
_MORE: dict[str, str] = {  # what a user of the command line needs to know beyond the field's description
    "engine": f": {', '.join(ENGINES)}",
    "kv_tokens": "; of the three limits the lesser wins",
    "num_gpu_blocks": "; vLLM's own number counts its null block too: give one less",
    "scheduling_policy": ": fcfs or priority; sglang: fcfs or lpm, longest cached prefix first",
}
_NAMES: dict[str, tuple[str, ...]] = {
    "num_gpu_blocks": ("--num-gpu-blocks", "--num-gpu-blocks-override"),
    "engine": ("--engine", "--profile"),
}


def scenario_fields(kind: type[Scenario] = Scenario) -> Mapping[str, FieldInfo]:
    """The fields of a scenario by their names on the command line."""
    return kind.flat_fields()


@dataclass(frozen=True, slots=True)
class Gather:
    """Options in the place of a parameter: `make` makes its value of those that were given, by name."""

    options: list[inspect.Parameter]
    make: Callable[[dict[str, Any]], Any]


def field_option(name: str, info: FieldInfo | None = None, *, required: bool = False) -> inspect.Parameter:
    """The option of a scenario's field, None where it is not given; the help ends with the default."""
    info = scenario_fields()[name] if info is None else info
    about = f"{info.description}{_MORE.get(name, '')}"
    if not required and info.default is not None:
        about += f" [{_word(info.default)}]"
    option = typer.Option(*_NAMES.get(name, ()), help=about)
    kind = value_type(info)
    if required:
        return parameter(name, kind, option, _REQUIRED)
    return parameter(name, kind | None, option, None)


def model_options(kind: type[Options]) -> list[inspect.Parameter]:
    """An option per field of a model, None where one is not given. The help ends with the default."""
    return [_model_option(name, info, kind.option(name)) for name, info in kind.flat_fields().items()]


def _model_option(name: str, info: FieldInfo, written: str) -> inspect.Parameter:
    flag, about = flag_of(info), info.description
    required = info.is_required()
    if not (required or info.default is None or info.default is False or info.default in _EMPTY):
        about = f"{about} [{_word(info.default)}]"
    bounds = {
        key: getattr(one, field)
        for one in info.metadata
        for key, type_, field in _BOUNDS
        if isinstance(one, type_)
    }
    option = typer.Option(
        *(flag.names or (f"{written}/--no-{written[2:]}" if info.default is True else written,)),
        help=about,
        hidden=flag.hidden,
        envvar=list(flag.variables) or None,
        **bounds,
    )
    annotation = flag.kind or _written_type(info)
    return parameter(
        name, annotation if required else annotation | None, option, _REQUIRED if required else None
    )


_EMPTY: tuple[object, ...] = ("", (), {})
_BOUNDS: tuple[tuple[str, type, str], ...] = (("min", Ge, "ge"), ("max", Le, "le"))


def _written_type(info: FieldInfo) -> Any:
    if get_origin(info.annotation) is tuple:
        return list[get_args(info.annotation)[0]]  # type: ignore[misc]
    return value_type(info)


def parameter(name: str, annotation: Any, option: Any, default: Any) -> inspect.Parameter:
    """An option as a keyword of a command."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[annotation, option])


def with_options(command: Command) -> Command:
    """Puts options in the place of the parameters of a command that are made of them; required ones first."""
    gathers: dict[str, Gather] = {}
    parameters: list[inspect.Parameter] = []
    for one in inspect.signature(command, eval_str=True).parameters.values():
        gather = _gather(one.annotation)
        if gather is not None:
            gathers[one.name] = gather
        own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        parameters += own if gather is None else gather.options
    parameters.sort(key=lambda each: each.default is not _REQUIRED)

    @wraps(command)
    def wrapper(**options: Any) -> None:
        arguments: dict[str, Any] = {}
        for into, gather in gathers.items():
            values = {one.name: options.pop(one.name) for one in gather.options}
            arguments[into] = gather.make({name: value for name, value in values.items() if _is_given(value)})
        command(**options, **arguments)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
    return wrapper


def _gather(annotation: Any) -> Gather | None:
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return Gather(model_options(annotation), annotation.model_validate)
    return next((one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, Gather)), None)


def _is_given(value: Any) -> bool:
    return value is not None and value != [] and value != ()


def _word(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)
