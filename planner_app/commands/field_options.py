"""Options of commands made of the fields of `Scenario`: type, default and description are the field's.

    @gathering("budget", budget_options(), make_budget)
    def memory_command(budget: Budget, json: ... = False) -> None: ...

The decorator puts the options in the place of one parameter, which receives what is made of their values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Annotated, Any

import typer
from pagecast.sim.core.engines.registry import PROFILES
from pagecast.sim.scenario import Scenario, value_type
from pydantic.fields import FieldInfo

Command = Callable[..., None]
_MORE: dict[str, str] = {  # what a user of the command line needs to know beyond the field's description
    "profile": f": {', '.join(PROFILES)}",
    "gpu_memory_utilization": "; newer vLLM: 0.92",
    "kv_tokens": "; of the three limits the lesser wins",
    "num_gpu_blocks": "; vLLM's own number counts its null block too: give one less",
    "scheduling_policy": ": fcfs or priority; sglang: fcfs or lpm, longest cached prefix first",
}
_NAMES: dict[str, tuple[str, ...]] = {"num_gpu_blocks": ("--num-gpu-blocks", "--num-gpu-blocks-override")}


def field_option(name: str, info: FieldInfo | None = None, *, required: bool = False) -> inspect.Parameter:
    """The option of a field, None where it is not given; its help ends with the field's default."""
    info = Scenario.flat_fields()[name] if info is None else info
    about = f"{info.description}{_MORE.get(name, '')}"
    if not required and info.default is not None:
        about += f" [{_word(info.default)}]"
    option = typer.Option(*_NAMES.get(name, ()), help=about)
    kind = value_type(info)
    if required:
        return parameter(name, kind, option, inspect.Parameter.empty)
    return parameter(name, kind | None, option, None)


def parameter(name: str, annotation: Any, option: Any, default: Any) -> inspect.Parameter:
    """An option as a keyword of a command."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[annotation, option])


def gathering(
    into: str, options: Iterable[inspect.Parameter], make: Callable[[dict[str, Any]], Any]
) -> Callable[[Command], Command]:
    """Puts `options` in the place of a command's parameter `into`, which gets what `make` makes of them."""
    shared = list(options)

    def decorator(command: Command) -> Command:
        own = list(inspect.signature(command, eval_str=True).parameters.values())
        at = next(index for index, one in enumerate(own) if one.name == into)
        parameters = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own[:at], *shared, *own[at + 1 :])
        ]

        @wraps(command)
        def wrapper(**arguments: Any) -> None:
            values = {one.name: arguments.pop(one.name) for one in shared}
            command(**{into: make(values)}, **arguments)

        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
        return wrapper

    return decorator


def _word(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)
