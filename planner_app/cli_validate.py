"""`pagecast validate`: replay a recorded run and compare it with what really happened."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pagecast.planner_app import console
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.profile import profile as find_profile
from pagecast.sim.recorded import RecordedRun
from pagecast.sim.validate import compare_decisions


def validate_command(
    run: Annotated[Path, typer.Argument(help="folder of a recorded run")],
    costs: Annotated[str, typer.Option(help="recorded: the run's own step times")] = "recorded",
    profile: Annotated[str, typer.Option(help="engine whose rules are followed")] = "vllm",
    json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Replays RUN with its measured step times and compares every step and every prefix hit.

    Exit code 1 where a decision differs; the first difference is explained.
    """
    if costs != "recorded":
        raise BadInput(f"--costs {costs}: this command knows 'recorded'")
    report = compare_decisions(RecordedRun.load(run), find_profile(profile))
    if json:
        fields = asdict(report)
        del fields["run"]
        console.print_json(fields)
    else:
        console.out.print(
            f"{report.run}: {report.steps_matched:,} of {report.steps_recorded:,} steps and "
            f"{report.cached_tokens_matched:,} of {report.requests:,} prefix hits are the engine's"
        )
        if report.first_mismatch:
            console.out.print(f"first difference: {report.first_mismatch}", soft_wrap=True, markup=False)
    if not report.ok:
        raise typer.Exit(1)
