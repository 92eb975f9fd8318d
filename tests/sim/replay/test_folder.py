"""The folder of a replay: one run's files, whatever was there before."""

import errno
import json
import os
from pathlib import Path

import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.replay import Kept, replay
from pagecast.sim.replay import folder as folders
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

PLAIN = {
    "events.parquet",
    "requests.parquet",
    "scenario.yaml",
    "steps.parquet",
    "summary.json",
    "trace.parquet",
}
FLEET = (PLAIN - {"events.parquet"}) | {"fleet.yaml", "replicas.parquet", "timeline.parquet"}
OPTIONS = {"num_gpu_blocks": 900, "costs": "roofline"}


def run(kind: str, out: Path, limit: int = 20) -> None:
    trace = read("chat", limit=limit)
    if kind == "fleet":
        replay_fleet(trace, Scenario(**OPTIONS), FleetSettings.make({}), kept=Kept(folder=out))
    else:
        replay(trace, Scenario(**OPTIONS), kept=Kept(folder=out, kv_events=kind == "kv events"))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("first", "second", "files"),
    [
        ("kv events", "plain", PLAIN),
        ("fleet", "plain", PLAIN),
        ("kv events", "fleet", FLEET),
        ("plain", "kv events", PLAIN | {"kv_events.jsonl"}),
    ],
)
def test_a_run_leaves_nothing_of_an_earlier_one(
    first: str, second: str, files: set[str], tmp_path: Path
) -> None:
    run(first, tmp_path / "run")
    run(second, tmp_path / "run", limit=10)
    assert set(os.listdir(tmp_path / "run")) == files
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["requests"] == 10
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("summary", [None, "no JSON", "[]", '{"fleet": 1}', "plain"])
def test_files_that_no_replay_left_stay(summary: str | None, tmp_path: Path) -> None:
    if summary == "plain":
        run("plain", tmp_path)
    elif summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    mine = {"fleet.yaml": b"mine", "notes.txt": b"mine", "replicas.parquet": b"mine"}
    for name, text in mine.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "kv_events.jsonl").mkdir()
    run("plain", tmp_path)
    (tmp_path / "kv_events.jsonl").rmdir()
    assert set(os.listdir(tmp_path)) == PLAIN | set(mine)
    assert {name: (tmp_path / name).read_bytes() for name in mine} == mine


@pytest.mark.parametrize("fails_at", range(1, 16, 2))
def test_a_run_that_cannot_move_in_leaves_the_earlier_one(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("kv events", tmp_path / "run")
    before = contents(tmp_path / "run")
    replace = os.replace
    calls = 0

    def failing(source: Path, target: Path) -> None:
        nonlocal calls
        calls += tmp_path / "run" in (source.parent, target.parent)
        if calls == fails_at:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(folders.os, "replace", failing)
    with pytest.raises(BadInput, match=r"can't be written \(No space left"):
        run("fleet", tmp_path / "run", limit=10)
    assert contents(tmp_path / "run") == before
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("kind", ["plain", "fleet"])
def test_a_folder_may_be_a_mount_of_its_own(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = tmp_path / "run"
    mount.mkdir()
    replace = os.replace

    def within_a_disk(source: Path, target: Path) -> None:
        if (mount in Path(source).parents) != (mount in Path(target).parents):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(source, target)

    monkeypatch.setattr(folders.os, "replace", within_a_disk)
    identity = mount.stat().st_ino
    run(kind, mount)
    run(kind, mount, limit=10)
    assert mount.stat().st_ino == identity
    assert set(os.listdir(mount)) == (FLEET if kind == "fleet" else PLAIN)
    assert os.listdir(tmp_path) == ["run"]


def test_a_folder_in_a_files_place_is_refused_and_kept(tmp_path: Path) -> None:
    run("plain", tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "summary.json").mkdir()
    events = (tmp_path / "run" / "events.parquet").read_bytes()
    with pytest.raises(BadInput, match="can't be written"):
        run("plain", tmp_path / "run", limit=10)
    assert (tmp_path / "run" / "summary.json").is_dir()
    assert (tmp_path / "run" / "events.parquet").read_bytes() == events
