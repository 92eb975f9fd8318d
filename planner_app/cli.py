"""The command line: `pagecast replay | validate | hits | memory | trace | calibrate`.

Exit codes: 0 good, 1 a check failed, 2 bad input, 3 this machine cannot.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from pagecast.planner_app import cli_calibrate, cli_hits, cli_memory, cli_replay, cli_trace, cli_validate
from pagecast.planner_app.console import err
from pagecast.sim.core.errors import PagecastError

app = typer.Typer(
    name="pagecast",
    help="Forecasts how a paged KV cache will serve real LLM traffic, and checks the forecast.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("replay")(cli_replay.replay_command)
app.command("validate")(cli_validate.validate_command)
app.command("hits")(cli_hits.hits_command)
app.command("memory")(cli_memory.memory_command)
app.command("calibrate")(cli_calibrate.calibrate_command)
app.add_typer(cli_trace.app, name="trace")


# Typer carries its own copy of click from 0.2x on: whichever it uses, its errors share this class.
_UsageError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; an error a user can mend is one line on stderr."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """The same, returning the exit code."""
    try:
        code: Any = app(args=arguments, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except PagecastError as error:
        err.print(f"pagecast: {error}", soft_wrap=True, markup=False)
        return error.exit_code
    except typer.Exit as error:
        return error.exit_code
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            err.print(error.format_message(), markup=False)
            return 2
        err.print(f"pagecast: {error.format_message()}", soft_wrap=True, markup=False)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        err.print("pagecast: interrupted", soft_wrap=True)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing left to say, and no complaint at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
