"""SGLang's own scheduler as the golden answer: random scenarios, every turn the same.

Batches in their order, admissions with their prefix hits, retractions, the queue's order, free and evictable
pages, evicted tokens and the new-token ratio are compared, turn by turn, and each request's times.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serve_sglang import Server, first_difference
from sglang_decisions import Decisions, from_line, read, to_line
from sglang_specifications import OVERLAP, checksum, specification

HERE = Path(__file__).parent
FEW = range(40)
MANY = range(40, 300)
FRESH = range(300, 340)
BOTH_WAYS = range(5080, 5100)
PRESSURE = range(20)
STOPPING = range(6)
# Seeds of `make test` and further ones: under pressure, and received once in some turns.
FEATURES = {
    "pressure": (PRESSURE, range(20, 100)),
    "recv-interval": (range(12), range(12, 200)),
}
INTERPRETER = "PAGECAST_SGLANG_PYTHON"


@cache
def recorded(seeds: range, feature: str = "") -> dict[int, Decisions]:
    """The committed decisions of these seeds, without or with a feature."""
    name = f"sglang-{feature}{'-' if feature else ''}{seeds.start}-{seeds.stop - 1}.jsonl.xz"
    return {run.seed: run for run in read(HERE / "recorded" / name)}


def check(run: Decisions, *features: str, every: int = 0) -> None:
    """Fails with the first difference between a run's decisions and the core's."""
    spec = specification(run.seed, *features)
    assert checksum(spec) == run.checksum, "the specifications have changed: record the decisions again"
    difference = first_difference(Server(run.seed, spec, every=every).run(), run)
    assert not difference, f"seed {run.seed}: {difference}"


def seed_name(seed: int) -> str:
    return f"seed-{seed}"


@pytest.mark.parametrize("seed", FEW, ids=seed_name)
def test_every_turn_of_a_random_scenario_is_sglangs(seed):
    check(recorded(FEW)[seed], every=50)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY, ids=seed_name)
def test_every_turn_of_many_random_scenarios_is_sglangs(seed):
    check(recorded(MANY)[seed], every=50)


@pytest.mark.parametrize(
    ("feature", "seed"), [(name, seed) for name in FEATURES for seed in FEATURES[name][0]]
)
def test_every_turn_with_a_feature_is_sglangs(feature, seed):
    check(recorded(FEATURES[feature][0], feature)[seed], feature, every=50)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "seed"), [(name, seed) for name in FEATURES for seed in FEATURES[name][1]]
)
def test_every_turn_of_many_scenarios_with_a_feature_is_sglangs(feature, seed):
    check(recorded(FEATURES[feature][1], feature)[seed], feature, every=50)


def running(run: Decisions) -> float:
    """The mean number of requests that generate, until the last has ended."""
    generating_us = sum(story.finish_us - story.first_token_us for story in run.served)
    return generating_us / max(story.finish_us for story in run.served)


@pytest.mark.parametrize("seed", STOPPING, ids=seed_name)
def test_a_replay_with_max_tokens_loses_the_concurrency_that_sglang_loses(seed):
    exact, longer = (recorded(STOPPING, feature)[seed] for feature in ("exact-tokens", "max-tokens"))
    check(exact, "exact-tokens")
    check(longer, "max-tokens")
    spec = specification(seed, "max-tokens")
    replayed = Server(seed, spec, told=True).run()
    assert running(longer) < 0.85 * running(exact)
    if spec["config"]["overlap"]:  # SGLang computes one token more before it knows of an end
        assert running(replayed) == pytest.approx(running(longer), rel=2e-3)
    else:
        assert not first_difference(replayed, longer)


def test_the_recorded_scenarios_ask_for_what_is_compared():
    runs = recorded(FEW).values()
    configs = [specification(run.seed)["config"] for run in runs]
    for name in ("overlap", "enable_mixed_chunk", "enable_prefix_caching", "ignore_eos"):
        assert {config[name] for config in configs} == {True, False}, name
    assert {config["schedule_policy"] for config in configs} == {"fcfs", "lpm"}
    assert any(config["chunked_prefill_size"] is None for config in configs)
    pressed = recorded(PRESSURE, "pressure").values()
    assert sum(story.retractions for run in pressed for story in run.served) >= 20
    assert sum(run.turns[-1].evicted_tokens > 0 for run in runs) > 20
    assert sum(story.cached_tokens > 0 for run in runs for story in run.served) > 200


def test_a_difference_is_named():
    run = recorded(FEW)[0]
    turn = run.turns[1]
    other = run._replace(turns=[run.turns[0], turn._replace(ratio=2.0), *run.turns[2:]])
    assert first_difference(run, other) == f"turn 1 at {turn.start_us} us: ratio {turn.ratio}, SGLang 2.0"


def test_decisions_are_kept_without_loss():
    run = recorded(FEW)[0]
    assert from_line(to_line(run)) == run


@pytest.fixture(scope="module")
def sglang_python() -> str:
    """The interpreter that has SGLang; skips where none is named."""
    interpreter = os.environ.get(INTERPRETER)
    if not interpreter:
        pytest.skip(f"{INTERPRETER} names no interpreter with SGLang (see tests/differential/README.md)")
    return interpreter


def drive(interpreter: str, seeds: range, *features: str) -> list[Decisions]:
    """What SGLang's scheduler decides now."""
    command = [interpreter, "drive_sglang.py", str(seeds.start), str(seeds.stop - 1), *features]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(seeds), done.stderr[-2000:]
    return [from_line(line) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sglang_decides_today_what_was_recorded(sglang_python):
    for run in drive(sglang_python, range(10)):
        assert run == recorded(FEW)[run.seed]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_scenarios_never_recorded_are_sglangs_as_well(sglang_python):
    for run in drive(sglang_python, FRESH):
        check(run)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pressure", [(), ("pressure",)], ids=["plain", "pressure"])
@pytest.mark.parametrize("overlap", OVERLAP)
def test_scenarios_are_sglangs_with_overlap_and_without(sglang_python, overlap, pressure):
    for run in drive(sglang_python, BOTH_WAYS, *pressure, overlap):
        check(run, *pressure, overlap)
