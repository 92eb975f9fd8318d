"""Output of all commands: messages, errors, tables and JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagecast.planner_app.stderr import drop_stdout
from pagecast.planner_app.wording.quantities import counted as counted
from pagecast.planner_app.wording.quantities import seconds as seconds
from pagecast.planner_app.wording.quantities import share as share
from pagecast.planner_app.wording.quantities import size as size
from pagecast.sim.core.errors import BadInput
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table


class _TrimmedTable:
    """A table without the blanks that fill its lines."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self.table, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                line[-1] = line[-1]._replace(text=line[-1].text.rstrip())
            yield from (*line, Segment.line())


class _TrimTables(RenderHook):
    """Text that is copied, kept or compared should not end in blanks."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """As rich calls it with what is to be printed."""
        return [_TrimmedTable(part) if isinstance(part, Table) else part for part in renderables]


class _Plain(Console):
    """A console that prints what it is given: a file may be called `a[bold]b.csv`."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)
        self.reader_gone = False
        self.push_render_hook(_TrimTables())

    def on_broken_pipe(self) -> None:
        """Goes on without a reader that has gone (`| head`): the command still tells its exit code."""
        self.reader_gone = True
        drop_stdout()


_PATIENCE_S = 1.0  # before progress is shown
_WIDE = 400  # columns, more than a table has
out = _Plain()
err = _Plain(stderr=True)


def table_lines(table: Table, width: int = _WIDE) -> list[str]:
    """The lines of a table without a border, as they are printed, however narrow the terminal is."""
    lines = out.render_lines(table, out.options.update_width(width), pad=False)
    return ["".join(part.text for part in line).rstrip() for line in lines]


def print_json(value: Any) -> None:
    """Prints one JSON object on stdout and nothing else; what is no number becomes null."""
    try:
        sys.stdout.write(json.dumps(_plain(value), allow_nan=False) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        out.on_broken_pipe()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def progress(title: str, total: int) -> Iterator[Any]:
    """A progress bar on stderr, shown on a terminal, after a second. Yields `update(done)`."""
    bar = Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
    )
    if not err.is_terminal:
        yield lambda done: None
        return
    import threading

    task = bar.add_task(title, total=total)
    timer = threading.Timer(_PATIENCE_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done: bar.update(task, completed=done)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


def check_place(option: str, path: Path, *endings: str) -> None:
    """Before any work. Errors: BadInput where the file `path` can't be written, or has none of the `endings`.

    Endings keep a slip from overwriting another file, as the trace that is replayed. Any will do where none
    are given, and for what is no regular file.
    """
    if not path.parent.is_dir():
        raise BadInput(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise BadInput(f"{option} {path}: is a folder; name a file")
    if endings and not path.name.endswith(endings) and (path.is_file() or not path.exists()):
        raise BadInput(f"{option} {path}: the ending is not known; name a file {' or '.join(endings)}")


def check_folder(option: str, path: Path) -> None:
    """Errors: BadInput where the folder `path` can't be made or written into: before any work."""
    if path.exists() and not path.is_dir():
        raise BadInput(f"{option} {path}: is a file; name a folder")
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise BadInput(f"{option} {path}: can't be written into {nearest}; name another folder")
