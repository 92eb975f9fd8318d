"""Errors that are told beside a forecast are those of judging runs like it."""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.costs.measured.known_errors import FEWEST, KNOWN, Known, Like
from pagecast.sim.scenario import Scenario

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import public_truth  # noqa: E402


def test_only_the_half_that_a_rule_sets_aside_judges():
    results = public_truth.runs()
    judges = public_truth.judging(results)
    kinds = defaultdict(list)
    for run in results:
        kinds[run.kind].append(run.id in judges)
    assert all(sum(half) == -(-len(half) // 2) for half in kinds.values())
    with (BENCHMARKS / "public_truth_errors.csv").open() as file:
        ids = [row["id"] for row in csv.DictReader(file)]
    assert len(ids) == len(set(ids)) >= 100
    assert set(ids) <= judges


def test_what_is_told_is_what_nine_in_ten_judging_runs_stayed_within():
    errors = defaultdict(list)
    for name in ("public_truth_errors.csv", "public_runs_errors.csv"):
        with (BENCHMARKS / name).open() as file:
            for row in csv.DictReader(file):
                like = Like(row["engine"], row["kind"], row["family"], row["spread"])
                errors[like].append((abs(float(row["tpot"])), abs(float(row["ttft"]))))
    known = {
        like: Known(len(rows), *(_percent(column) for column in zip(*rows, strict=True)))
        for like, rows in errors.items()
        if len(rows) >= FEWEST
    }
    assert known == KNOWN


def _percent(errors):
    """The least whole percent that nine in ten are within."""
    return -int(-100 * sorted(errors)[-(-9 * len(errors) // 10) - 1] // 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "public runs like it (vLLM, dense, Hopper, one GPU) that fitted nothing, nine in ten were"),
        ({"gpu": "A100 80GB"}, "Too few public runs are like it (vLLM, dense, A100 80GB, one GPU)"),
    ],
)
def test_the_error_is_that_of_like_runs_or_not_known(fields, words):
    costs = Scenario(model="Qwen/Qwen3-14B", costs="measured", **fields).step_costs()
    assert words in sentence(costs.expected_error())
