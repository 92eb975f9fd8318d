"""Errors that are told beside a forecast are those of judging runs like it."""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.costs.measured.known_errors import KNOWN
from pagecast.sim.scenario import Scenario

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import public_truth  # noqa: E402


def kept(name):
    with (BENCHMARKS / name).open() as file:
        return list(csv.DictReader(file))


def test_every_other_run_of_a_kind_judges_and_both_halves_are_kept():
    results = public_truth.runs()
    judges = public_truth.judging(results)
    kinds = defaultdict(list)
    for run in results:
        kinds[run.kind].append(run.id in judges)
    assert all(sum(half) == -(-len(half) // 2) for half in kinds.values())
    ids = defaultdict(set)
    for row in kept("public_truth_errors.csv"):
        ids[row["half"]].add(row["id"])
    assert ids["judging"] <= judges and len(ids["judging"]) >= 100
    assert not ids["teaching"] & judges


def test_what_is_told_is_of_teaching_runs_and_judging_runs_stay_within():
    rows = kept("public_truth_errors.csv")
    teaching = [row for row in rows if row["half"] == "teaching"]
    assert public_truth.known_errors([*kept("public_runs_errors.csv"), *teaching]) == KNOWN
    shares = public_truth.within([row for row in rows if row["half"] == "judging"], KNOWN)
    assert all(0.8 <= inside / runs <= 0.98 for inside, runs in shares.values())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "public runs like it (vLLM, dense, Hopper, one GPU) nine in ten were within"),
        ({"gpu": "A100 80GB"}, "Too few public runs are like it (vLLM, dense, A100 80GB, one GPU)"),
    ],
)
def test_the_error_is_that_of_like_runs_or_not_known(fields, words):
    costs = Scenario(model="Qwen/Qwen3-14B", costs="measured", **fields).step_costs()
    assert words in sentence(costs.expected_error())
