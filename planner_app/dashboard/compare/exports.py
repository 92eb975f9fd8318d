"""Files that a view can be taken away as: its scenario, its report, its tables."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from pagecast.sim.replay import Result
from pagecast.sim.replay.replicates import Spread
from pagecast.sim.yaml_documents import yaml_text
from pagecast.traces.schema import Trace
from pagecast.traces.write import write_parquet

SCENARIO_FILE = "scenario.yaml"


def scenario_yaml(result: Result) -> bytes:
    """The scenario with every field, the step costs by the name that `auto` stood for."""
    scenario = result.scenario
    if scenario.costs == "auto":
        scenario = scenario.changed(costs=result.summary["costs"])
    return yaml_text(scenario.flat()).encode()


def report_html(result: Result, spread: Spread | None) -> bytes:
    """The page that `pagecast replay --report` writes."""
    from pagecast.planner_app.reports.replay_report import replay_report

    return replay_report(result, spread).encode()


def requests_parquet(result: Result) -> bytes:
    """A row per request, latencies in seconds."""
    out = io.BytesIO()
    result.requests.to_parquet(out, index=False)
    return out.getvalue()


def trace_parquet(trace: Trace) -> bytes:
    """The trace as it was replayed, rate and number of requests included; `pagecast replay` reads it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.parquet"
        write_parquet(trace, path)
        return path.read_bytes()
