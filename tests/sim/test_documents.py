"""Documents that were made to hurt end in one line, soon, whatever they hold."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pagecast.sim import documents
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.file import Calibration, shipped
from pagecast.sim.machine.models import model
from pagecast.sim.scenario import Scenario
from pagecast.sim.yaml_documents import parse_yaml, yaml_text

DEEP = "[" * 100_000
DIGITS = "9" * 5000
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
)

YAML = {
    f"kv_tokens: {DEEP}": "line 1: nested too deeply",
    "gpu: " + "{a: " * 5000: "line 1: nested too deeply",
    "- " * 5000 + "x": "line 1: nested too deeply",
    f"kv_tokens: {DIGITS}": "line 1: a number of 5,000 characters",
    "gpu: L4\nkv_tokens: 99999999999999999999": "line 2: 99999999999999999999 is beyond 64 bits",
    BOMB: "values, aliases expanded",
    MERGES: "values, aliases expanded",
    "gpu: &a [*a]": "line 1: an alias of what it stands in",
    "gpu: 2020-99-99": "line 1: '2020-99-99' can't be read",
    "? [a, b]\n: c": "line 1: a field's name must be a text",
    "gpu: " + "x" * (2 << 20): "larger than 1 MiB",
    "gpu: \0": "write `field: value` lines",
}


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(BadInput) as caught:
        read()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", YAML, ids=range(len(YAML)))
def test_a_hostile_scenario_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    assert YAML[text] in refused(lambda: Scenario.load(path))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["1e5", "-1.5E+3", ".5e-1", "2e", "e9", "1e5x", "0x1e5", "1_000e3"])
def test_a_text_stays_a_text_when_it_is_written_and_read(text: str) -> None:
    assert parse_yaml(yaml_text({"name": text})) == {"name": text}


def test_an_endless_device_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "larger than 1 MiB" in refused(lambda: Scenario.load("/dev/zero"))
    assert "Is a directory" in refused(lambda: Scenario.load(tmp_path))
    assert "no such file" in refused(lambda: Scenario.load(tmp_path / "none.yaml"))


@pytest.mark.timeout(20)
def test_a_pipe_is_read_and_a_silent_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_SILENCE_S", 0.2)
    os.mkfifo(tmp_path / "silent")
    assert "nothing has been written" in refused(lambda: Scenario.load(tmp_path / "silent"))
    reader, writer = os.pipe()
    os.write(writer, b"gpu: L4\n")
    os.close(writer)
    assert Scenario.load(f"/dev/fd/{reader}").gpu == "L4"
    os.close(reader)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", [DEEP, '{"a":' * 900 + "1" + "}" * 900, f'{{"a": {DIGITS}}}', "{"])
def test_hostile_json_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refused(lambda: Calibration.load(tmp_path / "config.json"))
    refused(lambda: model(str(tmp_path)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"terms_ns": {"kv_token": 1e300}, "replicates": [], "hosts": []}, "term kv_token is 1e"),
        ({"knots": [10**30]}, "knot 0 is 1e"),
        ({"noise": {"decode_sd": 1e300}}, "field missing"),
        ({"host": {"step_ns": 1e300}}, "field missing"),
        ({"regions": [{"region": "all", "steps": [], "error_percent": 1, "p50_percent": 1}]}, "steps is []"),
    ],
)
def test_numbers_of_a_calibration_are_checked_as_it_is_read(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    body = json.loads(next(iter(shipped().values())).read_text())
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**body, **change}))
    assert words in refused(lambda: Calibration.load(path))


@pytest.mark.parametrize(
    ("section", "name"),
    [("noise", "run_sd"), ("noise", "correlation"), ("host", "busy"), ("fitted", "tokens")],
)
def test_no_part_of_a_calibration_may_be_huge(tmp_path: Path, section: str, name: str) -> None:
    body = json.loads(next(iter(shipped().values())).read_text())
    body[section][name] = 10**30
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(body))
    assert section in refused(lambda: Calibration.load(path))
