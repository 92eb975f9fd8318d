"""The commands by name. A command's module is imported when the command runs, for imports take longest."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from pagecast import __version__
from pagecast.planner_app.stderr import complain
from pagecast.sim.core.errors import PagecastError
from typer.core import TyperGroup
from typer.main import get_command


class _Command(NamedTuple):
    """Where a command lives: a module of this package, the function or Typer in it, and its help in short."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "replay": _Command("replay", "replay_command", "Serves a trace on a simulated replica, and times it"),
    "plan": _Command("plan", "plan_command", "Finds how much load keeps an SLO, and what binds"),
    "check": _Command("check", "check_command", "Fails a build where a scenario misses its bounds"),
    "sweep": _Command("sweep", "sweep_command", "Finds the cheapest replica in a space of scenarios"),
    "tune": _Command("tune", "app", "Chooses a block size or an HBM budget for a trace"),
    "validate": _Command("validate", "validate_command", "Compares a recorded run with its replay"),
    "match": _Command("match", "match_command", "Explains how a measurement differs from its forecast"),
    "watch": _Command("watch", "watch_command", "Shows a running server beside its forecast"),
    "hits": _Command("hits", "hits_command", "Counts the prefix hits of caches of several sizes"),
    "memory": _Command("memory", "memory_command", "Itemises a GPU's memory: KV blocks and what fits"),
    "calibrate": _Command("calibrate", "calibrate_command", "Learns what steps cost from recorded runs"),
    "support": _Command("support", "support_command", "Lists which step costs a model and GPU get"),
    "serve": _Command("serve", "serve_command", "Serves a simulated replica, or the engine, over HTTP"),
    "trace": _Command("trace", "app", "Describes, converts, cuts and generates traces"),
    "generate": _Command("engine", "generate_command", "Goes on with texts, on a GPU or the CPU"),
    "record": _Command("engine", "record_command", "Serves a trace in wall time and records the run"),
    "bench": _Command("engine", "bench_command", "Measures the engine: output tokens per second"),
    "dashboard": _Command("dashboard", "dashboard_command", "Opens the what-if in a browser"),
}


class _Lazy(TyperGroup):
    """Lists commands by their short help, and imports the one that runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in COMMANDS else command, rest


@cache
def load(name: str) -> Any:
    """The click command called `name`."""
    from pagecast.planner_app.commands.bounds import bound_numbers
    from pagecast.planner_app.commands.given_twice import refuse_twice

    place = COMMANDS[name]
    target = getattr(import_module(f"pagecast.planner_app.commands.{place.module}"), place.attribute)
    if not isinstance(target, typer.Typer):
        alone = _typer()
        alone.command(name)(target)
        target = alone
    return refuse_twice(bound_numbers(get_command(target)))


def _typer(**options: Any) -> typer.Typer:
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, **options)


app = _typer(
    name="pagecast",
    help="Forecasts how a paged KV cache will serve real LLM traffic, and checks the forecast.",
    no_args_is_help=True,
    cls=_Lazy,
)


def _print_version(show: bool) -> None:
    if show:
        print(f"pagecast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """The group itself does nothing."""


for _name, _place in COMMANDS.items():
    app.command(_name, help=_place.help)(lambda: None)


# Typer carries its own copy of click from 0.2x on: whichever it uses, its errors share this class.
_ClickError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def execute(arguments: list[str]) -> int:
    """Runs a command and returns the exit code; a mistake a user can mend is one line on stderr.

    Interrupts and broken pipes come through, as click's own `main` would not let them.
    """
    try:
        with get_command(app).make_context("pagecast", list(arguments)) as context:
            context.command.invoke(context)
        return 0
    except PagecastError as error:
        complain(str(error))
        return error.exit_code
    except typer.Exit as error:
        return error.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _ClickError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return 2
        from pagecast.planner_app.commands.option_mistakes import mistake

        at = getattr(error, "ctx", None)
        message = mistake(error, arguments) or error.format_message().rstrip(".").replace("Value error, ", "")
        mark = " See" if message.endswith("?") else "; see"
        complain(f"{message}{mark} {at.command_path} --help" if at else message)
        return 2
