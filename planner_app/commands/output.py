"""The options of what a command prints and writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pagecast.planner_app.options import Flag, Options
from pydantic import Field


class Output(Options):
    """How a command prints its answer."""

    json_only: Annotated[bool, Flag(("--json",))] = Field(
        default=False, description="print one JSON object and nothing else"
    )


class Explained(Output):
    """The same of an answer whose evidence is printed only where it is asked for."""

    explain: bool = Field(default=False, description="print all figures, reasons and notes")


class Report(Options):
    """Where an answer is drawn."""

    report: Path | None = Field(default=None, description="HTML file with charts to write")


class Reported(Explained, Report):
    """How a command prints an answer that may be drawn as well."""
