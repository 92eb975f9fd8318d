"""Options of planned fleets: routers to compare, where to give up, and the form that one is written in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pagecast.planner_app.options import Flag, Options
from pagecast.sim.core.errors import BadInput
from pagecast.traces.write import replacing
from pydantic import Field


class Emitted(Options):
    """The form that a fleet is written in, for others to start it, and where."""

    emit: str | None = Field(
        default=None, description="write the fewest replicas as vllm, k8s, llm-d or dynamo would start them"
    )
    emit_to: Path | None = Field(default=None, description="file for --emit [printed]")

    def check(self) -> None:
        """Errors: BadInput for a file of what is not written."""
        if self.emit_to is not None and self.emit is None:
            raise BadInput(f"{self.option('emit_to')} is the file for --emit: give --emit FORM as well")

    def write(self, text: str) -> None:
        """Writes the text to the file, where one was given."""
        if self.emit_to is not None:
            with replacing(self.emit_to) as place:
                place.write_text(text, encoding="utf-8")


class EmittedTrial(Emitted):
    """The same of a sweep's cheapest."""

    emit: str | None = Field(
        default=None, description="write the cheapest as vllm, k8s, llm-d or dynamo would start it"
    )


class SizeOptions(Emitted):
    """How the fewest replicas are looked for, and written."""

    emit_to: Annotated[Path | None, Flag(("--out",))] = Field(
        default=None, description="file for --emit [printed]"
    )
    against: tuple[str, ...] = Field(
        default=(), description="another router to compare with, with a fleet's options"
    )
    most_replicas: int = Field(
        default=64, ge=1, le=4096, description="with a fleet, replicas at which it is given up"
    )
