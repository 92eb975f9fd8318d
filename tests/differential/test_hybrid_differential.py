"""Hybrid models: every decision, hit, stored and removed block of vLLM's own scheduler, and the core's."""

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from decisions import Decisions, from_line, read
from hybrid_specifications import specification
from recordings import compare
from specifications import checksum

HERE = Path(__file__).parent
FEW = range(40)
MANY = range(40, 340)
FRESH = range(340, 400)
CHOSEN = (83210,)  # differed once: a request was preempted after its turn had filled a block
FEW_MIXED = range(20)
MANY_MIXED = range(20, 200)
INTERPRETER = "PAGECAST_VLLM_PYTHON"


@cache
def recorded(seeds: range | tuple[int, ...]) -> dict[int, Decisions]:
    """The committed decisions of these seeds."""
    name = f"{seeds.start}-{seeds.stop - 1}" if isinstance(seeds, range) else "chosen"
    path = HERE / "recorded" / f"hybrid-{name}.jsonl.xz"
    return {run.seed: run for run in read(path)}


def check(run: Decisions, folder: Path) -> None:
    """Fails with the first difference between a run's decisions and the core's."""
    spec = specification(run.seed)
    assert checksum(spec) == run.checksum, "the specifications have changed: record the decisions again"
    difference = compare(spec, run, folder / "run")
    assert not difference, f"seed {run.seed}: {difference}"


def seed_name(seed: int) -> str:
    return f"hybrid-{seed}"


@pytest.mark.parametrize("seed", FEW, ids=seed_name)
def test_every_decision_and_block_of_a_hybrid_scenario_is_vllms(seed, tmp_path):
    check(recorded(FEW)[seed], tmp_path)


@pytest.mark.parametrize("seed", CHOSEN, ids=seed_name)
def test_every_decision_and_block_of_a_scenario_that_once_differed_is_vllms(seed, tmp_path):
    check(recorded(CHOSEN)[seed], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY, ids=seed_name)
def test_every_decision_and_block_of_many_hybrid_scenarios_is_vllms(seed, tmp_path):
    check(recorded(MANY)[seed], tmp_path)


@pytest.mark.slow
def test_decisions_vllm_takes_now_are_the_same(tmp_path):
    interpreter = os.environ.get(INTERPRETER)
    if not interpreter:
        pytest.skip(f"{INTERPRETER} names no interpreter with vLLM (see tests/differential/README.md)")
    script = [str(HERE / "drive_vllm.py"), str(FRESH.start), str(FRESH.stop - 1), "hybrid"]
    done = subprocess.run([interpreter, *script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        run = from_line(line)
        check(run, tmp_path / str(run.seed))


@cache
def mixed(seeds: range) -> dict[int, Decisions]:
    """Decisions for hybrid models whose requests speculate."""
    path = HERE / "recorded" / f"hybrid-speculation-{seeds.start}-{seeds.stop - 1}.jsonl.xz"
    return {run.seed: run for run in read(path)}


def check_mixed(run: Decisions, folder: Path) -> None:
    spec = specification(run.seed, "speculation")
    assert checksum(spec) == run.checksum, "the specifications have changed: record the decisions again"
    difference = compare(spec, run, folder / "run")
    assert not difference, f"seed {run.seed}: {difference}"


@pytest.mark.parametrize("seed", FEW_MIXED)
def test_hybrid_models_that_speculate_decide_as_vllm(seed, tmp_path):
    check_mixed(mixed(FEW_MIXED)[seed], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY_MIXED)
def test_many_hybrid_models_that_speculate_decide_as_vllm(seed, tmp_path):
    check_mixed(mixed(MANY_MIXED)[seed], tmp_path)


def test_the_hybrid_scenarios_are_rough():
    """Whatever has been told apart by a scenario once must go on being asked."""
    counts = Counter()
    for seed, run in recorded(FEW).items():
        config = specification(seed)["config"]
        groups = config["kv_groups"]
        counts["asynchronous"] += config["async_scheduling"]
        counts["synchronous"] += not config["async_scheduling"]
        counts["windows"] += any("window" in group for group in groups)
        counts["chunks"] += any("chunk" in group for group in groups)
        counts["latents"] += any("latent" in group for group in groups)
        counts["states"] += any("state" in group for group in groups)
        counts["several block sizes"] += len({group["block_size"] for group in groups}) > 1
        counts["one group"] += len(groups) == 1
        counts["several windows"] += len({group.get("window") for group in groups}) > 2
        counts["prefix hits"] += any(served.cached_tokens for served in run.served)
        counts["preemptions"] += any(served.preemptions for served in run.served)
        counts["blocks stored or removed"] += any(step.trail for step in run.steps)
    assert min(counts.values()) >= 2, counts


def test_a_block_that_differs_is_named(tmp_path):
    run = recorded(FEW)[0]
    steps = list(run.steps)
    number = next(i for i, step in enumerate(steps) if step.trail)
    steps[number] = steps[number]._replace(trail=4096)
    difference = compare(specification(0), run._replace(steps=steps), tmp_path)
    assert difference.steps is None and difference.preemptions is None
    assert difference.blocks == f"step {number}: other blocks were stored or removed since the step before"
