"""What no command foresaw ends in a line with a file for a report."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import pytest
import yaml
from pagecast.planner_app.cli import run
from pagecast.planner_app.commands import registry
from pagecast.planner_app.planner.sweep.store import Store
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read


def test_an_unforeseen_error_is_a_line_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(arguments: list[str]) -> int:
        raise KeyError("frames\nof two lines")

    monkeypatch.setattr(registry, "execute", fails)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run(["serve", "--api-key", "secret-1", "--api-key=secret-2"]) == 4
    message = capsys.readouterr().err
    (report,) = tmp_path.iterdir()
    assert message.count("\n") == 1 and str(report) in message and "Traceback" not in message
    text = report.read_text()
    assert "KeyError" in text and "test_defects.py" in text and "secret" not in text
    assert stat.S_IMODE(report.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "field", ["kv_offloading_size", "host_latency_ms", "rollout_at_s", "shed_ttft_s", "host_time_factor"]
)
@pytest.mark.parametrize("value", [1e308, float("inf")])
def test_a_scenario_s_numbers_have_an_end(field: str, value: float) -> None:
    with pytest.raises(BadInput, match=field):
        Scenario.make({"kv_offloading_size": 8.0, field: value}, "scenario.yaml")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("incidents: [{at_s: .inf, replica: replica-0}]", "incidents.0.at_s"),
        ("groups: [{replicas: 1000000000}]", "groups.0.replicas"),
    ],
)
def test_a_fleet_s_numbers_have_an_end(text: str, place: str) -> None:
    with pytest.raises(BadInput, match=place):
        FleetSettings.make(yaml.safe_load(text))


def test_a_trace_over_centuries_says_where_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "gap.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,100,10\n9e9,100,10\n")
    with pytest.raises(BadInput, match=r"last request arrives after 9e\+09 s"):
        replay(read(path), Scenario(num_gpu_blocks=100))


def altered(folder: Path, statement: str) -> str:
    Store(folder, {"trace": "chat"}).close()
    database = sqlite3.connect(folder / "study.sqlite")
    database.executescript(statement)
    database.close()
    with pytest.raises(BadInput) as error:
        Store(folder, {"trace": "chat"})
    return str(error.value)


def test_a_study_with_a_broken_description_is_refused(tmp_path: Path) -> None:
    text = altered(tmp_path, "UPDATE study SET value = '{';")
    assert "study.sqlite: holds something other than a study" in text


def test_a_study_of_a_later_version_is_refused(tmp_path: Path) -> None:
    assert "has version 99, and this pagecast reads up to 1" in altered(tmp_path, "PRAGMA user_version = 99;")
