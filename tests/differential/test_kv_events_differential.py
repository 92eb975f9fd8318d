"""KV events: those of vLLM's own block pool, and the core's stream, event by event and field by field."""

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import hybrid_specifications
import specifications
from decisions import Decisions, read
from recordings import compare_events

HERE = Path(__file__).parent
SEEDS = range(30)
FAMILIES = {
    "events": (specifications, ()),
    "hybrid-events": (hybrid_specifications, ()),
    "offloading-events": (specifications, ("offloading",)),
    "hybrid-offloading-events": (hybrid_specifications, ("offloading",)),
    "disk-events": (specifications, ("disk",)),
}
DEADLOCKS = {("disk-events", 24)}


@cache
def recorded(family: str) -> dict[int, Decisions]:
    """Runs whose `contents` are digests of the KV events of each step."""
    return {run.seed: run for run in read(HERE / "recorded" / f"{family}-0-29.jsonl.xz")}


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        pytest.param(family, seed, marks=pytest.mark.slow if seed > (3 if features else 9) else ())
        for family, (_, features) in FAMILIES.items()
        for seed in SEEDS
    ],
)
def test_every_kv_event_is_vllms(family, seed, tmp_path):
    if (family, seed) in DEADLOCKS:
        pytest.skip("vLLM does not get on (see README.md)")
    module, features = FAMILIES[family]
    spec = module.specification(seed, *features)
    run = recorded(family)[seed]
    assert specifications.checksum(spec) == run.checksum, "the specifications have changed: record again"
    assert compare_events(spec, run, tmp_path) is None


def test_the_recorded_runs_have_events():
    for family in FAMILIES:
        assert sum(any(run.contents) for run in recorded(family).values()) >= 15


def test_an_event_that_differs_is_named(tmp_path):
    run = next(run for run in recorded("hybrid-events").values() if any(run.contents))
    number = next(i for i, digest in enumerate(run.contents) if digest)
    other = (*run.contents[:number], 256, *run.contents[number + 1 :])
    spec = hybrid_specifications.specification(run.seed)
    difference = compare_events(spec, run._replace(contents=other), tmp_path)
    assert difference == f"step {number}: other KV events since the step before"
