"""Fields that are given and change nothing are told of once, by every command that replays."""

import json

import pytest
import yaml
from pagecast.planner_app.cli import run

IDLE = "max_output_tokens has no effect without admission maximum"
OPTIONS = ["--costs", "roofline", "--num-gpu-blocks", "3000"]
SPARE = ["--max-output-tokens", "500"]


def answered(capsys, *arguments):
    """The notes of a command's JSON on fields without effect."""
    assert run([*arguments, "--json"]) == 0
    return [note for note in json.loads(capsys.readouterr().out)["notes"] if "no effect" in note]


def printed(capsys, *arguments):
    assert run(list(arguments)) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "command",
    [
        ["sweep", "chat", "--set", "max_num_seqs=64,128"],
        ["sweep", "chat", "--set", "max_num_seqs=64,128", "--replicas", "2"],
        ["tune", "block-size", "chat", "--values", "16,32", "--static"],
    ],
    ids=["sweep", "fleets", "tune"],
)
def test_sweep_and_tune_note_a_field_without_effect_once(command, capsys):
    command = [*command, "--limit", "20", "--workers", "1", *OPTIONS]
    assert answered(capsys, *command) == []
    assert answered(capsys, *command, *SPARE) == [f"{IDLE}."]
    assert printed(capsys, *command, *SPARE).count(IDLE) == 1


def test_a_sweep_notes_only_fields_without_effect_in_any_trial(capsys):
    command = ["sweep", "chat", "--limit", "20", "--workers", "1", *OPTIONS, *SPARE]
    assert answered(capsys, *command, "--set", "admission=prompt,maximum") == []
    assert answered(capsys, *command, "--set", "admission=prompt,completion") == [f"{IDLE}."]
    varied = ["--set", "swap_gb_per_s=10,30", "--set", "admission=maximum"]
    (note,) = answered(capsys, *command, *varied)
    assert note == "swap_gb_per_s has no effect without preemption swap."


def test_a_check_notes_a_field_without_effect_once(tmp_path, capsys):
    fields = {"costs": "roofline", "num_gpu_blocks": 3000, "max_output_tokens": 500}
    fields["check"] = {"trace": "chat", "limit": 20, "limits": {"rejected": {"max": 0}}}
    file = tmp_path / "check.yaml"
    file.write_text(yaml.safe_dump(fields))
    assert answered(capsys, "check", "--scenario", str(file)) == [f"{IDLE}."]
    assert printed(capsys, "check", "--scenario", str(file)).count(IDLE) == 1
