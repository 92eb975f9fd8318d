"""A generated trace's file says how it was made, so that other seeds of its generator can be played."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pagecast.planner_app.cli import run
from pagecast.sim.replay.resample import GENERATOR, redrawn, resample
from pagecast.traces.operations import scale, slice
from pagecast.traces.read import read
from pagecast.traces.recipe import another, play
from pagecast.traces.write import write

CHAT = ("--turns", "uniform:1-4", "--system-prompt", "300", "--system-prompt", "90", "--arrivals", "gamma")


def generated(path: Path, *options: str) -> Path:
    assert run(["trace", "generate", str(path), "--requests", "80", "--json", *options]) == 0
    return path


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".jsonl.zst"])
@pytest.mark.parametrize(
    "options", [(), CHAT, ("--like", "chat"), ("--duration", "9", "--arrivals", "gamma", "--cv", "2")]
)
def test_a_file_holds_its_recipe_and_the_recipe_makes_the_file(tmp_path, capsys, ending, options):
    trace = read(generated(tmp_path / f"t{ending}", "--seed", "7", *options))
    assert not trace.notes
    pd.testing.assert_frame_equal(play(trace.recipe, 7).requests, trace.requests)
    write(trace, tmp_path / "copy.parquet")
    assert read(tmp_path / "copy.parquet").recipe == trace.recipe


def test_other_seeds_are_the_generators_and_each_is_another(tmp_path, capsys):
    trace = read(generated(tmp_path / "t.parquet", *CHAT, "--seed", "7"))
    direct = read(generated(tmp_path / "u.parquet", *CHAT, "--seed", "9"))
    pd.testing.assert_frame_equal(resample(trace, 1).requests, direct.requests)
    assert not resample(trace, 0).requests.equals(resample(trace, 1).requests)
    assert resample(trace, 0).name == trace.name
    assert redrawn(trace, 0).figures["source"] == GENERATOR


def test_a_limit_and_a_load_are_those_of_the_other_seeds_too(tmp_path, capsys):
    path = generated(tmp_path / "t.jsonl", "--rate", "4")
    whole, part = another(read(path), 0), another(scale(read(path, limit=30), 2.0), 0)
    assert len(part) == 30
    np.testing.assert_allclose(part.requests["arrival_s"], whole.requests["arrival_s"][:30] / 2)


def test_a_trace_that_was_cut_is_resampled_not_generated(tmp_path, capsys):
    path = generated(tmp_path / "t.jsonl", "--rate", "4")
    trace = read(path)
    assert slice(trace, rows=(10, 40)).recipe is None
    assert scale(trace, 2.0, think_times=True).recipe is None
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:40]))
    cut = read(path)
    assert cut.recipe is not None
    assert another(cut, 0) is None
    assert redrawn(cut, 0).figures["source"] != GENERATOR


@pytest.mark.parametrize("recipe", ["{}", '{"make": "spell", "seed": 0}', '{"make": "requests"}', "3", "[]"])
def test_a_recipe_that_makes_nothing_does_no_harm(tmp_path, recipe):
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"arrival_s": 0, "input_tokens": 5, "output_tokens": 2, "generated": {recipe}}}\n')
    trace = read(path)
    assert len(trace) == 1
    assert another(trace, 0) is None
