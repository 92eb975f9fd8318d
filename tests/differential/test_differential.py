"""vLLM's own scheduler as the golden answer: random scenarios, every decision the same.

A seed that fails is repeated by its test's name: `pytest "tests/differential/test_differential.py::NAME"`.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import hybrid_specifications
import specifications
from decisions import Decisions, Step, from_line, read, to_line, write
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import DecisionReplay
from recordings import by_text, compare, lay
from specifications import Spec, checksum, specification

HERE = Path(__file__).parent
FEW = range(60)
MANY = range(60, 500)
FRESH = range(500, 560)
CHOSEN = (595, 819, 1119)  # the first in which blocks were found, or given back, in another order once
FEATURES = {  # what is added to scenarios, by the name of the recorded files; how many seeds: few, and all
    "speculation": (("speculation",), 24, 300),
    "keys": (("keys",), 24, 550),
    "offloading": (("offloading",), 24, 301),
    "hybrid-offloading": (("hybrid", "offloading"), 16, 200),
    "mixed-offloading": (("hybrid", "speculation", "keys", "offloading"), 16, 200),
    "disk": (("disk",), 16, 220),
    "mixed-stops": (("hybrid", "speculation", "keys", "offloading", "stops"), 8, 100),
    "failing": (("failing",), 12, 120),
    "unreadable": (("unreadable",), 12, 120),
    "hybrid-disk": (("hybrid", "disk"), 8, 80),
    "mixed-disk": (("hybrid", "speculation", "keys", "disk"), 8, 60),
    "mixed": (("hybrid", "speculation", "keys"), 16, 200),
}
DEADLOCKS = {("offloading", 123), ("hybrid-offloading", 40)}  # vLLM does not get on either: see README.md
DEADLOCKS |= {("disk", seed) for seed in (24, 31, 44, 54, 75, 95, 98, 100, 123, 170, 208)}
DEADLOCKS |= {("failing", seed) for seed in (2, 16, 20, 31, 38, 57, 66, 70, 74, 86, 96, 100, 118)}
DEADLOCKS |= {("unreadable", seed) for seed in (13, 24, 31, 50, 54, 60, 66, 72, 87, 98, 100, 111)}
DEADLOCKS |= {("hybrid-disk", seed) for seed in (44, 49, 71)} | {("mixed-disk", 49), ("mixed-stops", 27)}
FEW_EACH = [(name, seed) for name, (_, few, _) in FEATURES.items() for seed in range(few)]
MANY_EACH = [(name, seed) for name, (_, few, most) in FEATURES.items() for seed in range(few, most)]
FEW_EACH = [case for case in FEW_EACH if case not in DEADLOCKS]
MANY_EACH = [case for case in MANY_EACH if case not in DEADLOCKS]
# Differed once: a window of one token takes its block of a load last; a store that had been refused fits as
# soon as enough of its blocks have left their window; a store touches blocks of its request's output too; a
# hit that fills no window is cut to aligned pieces before its last block is left out.
CHOSEN_MIXED = (
    ("hybrid-offloading", 91016),
    ("hybrid-offloading", 814044),
    ("hybrid-disk", 94050),
    ("mixed", 96141),
)
INTERPRETER = "PAGECAST_VLLM_PYTHON"


@cache
def recorded(seeds: range | tuple[int, ...]) -> dict[int, Decisions]:
    """The committed decisions of these seeds."""
    name = f"{seeds.start}-{seeds.stop - 1}" if isinstance(seeds, range) else "chosen"
    return {run.seed: run for run in read(HERE / "recorded" / f"seeds-{name}.jsonl.xz")}


@cache
def recorded_few(name: str) -> dict[int, Decisions]:
    """The committed decisions of the first scenarios with features."""
    return {run.seed: run for run in read(HERE / "recorded" / f"{name}-0-{FEATURES[name][1] - 1}.jsonl.xz")}


@cache
def recorded_many(name: str) -> dict[int, Decisions]:
    """Those of all others."""
    _, few, most = FEATURES[name]
    return {run.seed: run for run in read(HERE / "recorded" / f"{name}-{few}-{most - 1}.jsonl.xz")}


def featured(name: str, seed: int) -> Spec:
    """A scenario with features."""
    features = [feature for feature in FEATURES[name][0] if feature != "hybrid"]
    family = hybrid_specifications if "hybrid" in FEATURES[name][0] else specifications
    return family.specification(seed, *features)


def seed_name(seed: int) -> str:
    return f"seed-{seed}"


def check(run: Decisions, folder: Path, name: str = "") -> None:
    """Fails with the first difference between a run's decisions and the core's. `name`: of `FEATURES`."""
    spec = featured(name, run.seed) if name else specification(run.seed)
    assert checksum(spec) == run.checksum, "the specifications have changed: record the decisions again"
    difference = compare(spec, run, folder / "run")
    assert not difference, f"seed {run.seed}: {difference}"


@pytest.mark.parametrize("seed", FEW, ids=seed_name)
def test_every_decision_of_a_random_scenario_is_vllms(seed, tmp_path):
    check(recorded(FEW)[seed], tmp_path)


@pytest.mark.parametrize("seed", CHOSEN, ids=seed_name)
def test_every_decision_of_a_scenario_that_once_differed_is_vllms(seed, tmp_path):
    check(recorded(CHOSEN)[seed], tmp_path)


@pytest.mark.parametrize(("name", "seed"), CHOSEN_MIXED)
def test_every_decision_of_a_mixed_scenario_that_once_differed_is_vllms(name, seed, tmp_path):
    runs = {run.seed: run for run in read(HERE / "recorded" / f"{name}-chosen.jsonl.xz")}
    check(runs[seed], tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY, ids=seed_name)
def test_every_decision_of_many_random_scenarios_is_vllms(seed, tmp_path):
    check(recorded(MANY)[seed], tmp_path)


@pytest.mark.parametrize(("name", "seed"), FEW_EACH)
def test_every_decision_with_a_feature_is_vllms(name, seed, tmp_path):
    check(recorded_few(name)[seed], tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), MANY_EACH)
def test_every_decision_of_many_scenarios_with_a_feature_is_vllms(name, seed, tmp_path):
    check(recorded_many(name)[seed], tmp_path, name)


@pytest.fixture(scope="module")
def vllm_python() -> str:
    """The interpreter that has vLLM; skips where none is named."""
    interpreter = os.environ.get(INTERPRETER)
    if not interpreter:
        pytest.skip(f"{INTERPRETER} names no interpreter with vLLM (see tests/differential/README.md)")
    return interpreter


def drive(interpreter: str, seeds: range, *features: str) -> list[Decisions]:
    """What vLLM's scheduler decides now."""
    command = [interpreter, str(HERE / "drive_vllm.py"), str(seeds.start), str(seeds.stop - 1), *features]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [from_line(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [FEW, MANY], ids=["few", "many"])
def test_vllm_decides_now_what_was_recorded(vllm_python, seeds):
    for run in drive(vllm_python, seeds):
        assert run == recorded(seeds)[run.seed], f"seed {run.seed}"


@pytest.mark.slow
def test_decisions_vllm_takes_now_are_the_same(vllm_python, tmp_path):
    for run in drive(vllm_python, FRESH):
        check(run, tmp_path / str(run.seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_decisions_with_a_feature_are_the_same_now(vllm_python, name, tmp_path):
    features, _, most = FEATURES[name]
    known = {**recorded_few(name), **recorded_many(name)}
    for run in drive(vllm_python, range(most), *features):
        assert run == known[run.seed], f"seed {run.seed}"
    for run in drive(vllm_python, range(most, most + 30), *features):
        check(run, tmp_path / str(run.seed), name)


def test_equal_seeds_give_equal_specifications_and_others_others():
    sums = {checksum(specification(seed)) for seed in range(200)}
    assert len(sums) == 200
    assert sums == {checksum(specification(seed)) for seed in range(200)}


def test_the_scenarios_are_rough():
    """Whatever has been told apart by a scenario once must go on being asked."""
    counts = Counter()
    for seed, run in recorded(FEW).items():
        spec = specification(seed)
        config, requests = spec["config"], spec["requests"]
        counts["asynchronous"] += config["async_scheduling"]
        counts["synchronous"] += not config["async_scheduling"]
        counts["by priority"] += config["scheduling_policy"] == "priority"
        counts["without caching"] += not config["enable_prefix_caching"]
        counts["one at a time"] += config["max_num_seqs"] == 1
        counts["tiny budget"] += config["max_num_batched_tokens"] < 40
        counts["salts"] += any("salt" in request for request in requests)
        counts["early stops"] += any("stop_after" in request for request in requests)
        counts["prompts of one token"] += any(request["input_tokens"] == 1 for request in requests)
        counts["outputs of one token"] += any(request["output_tokens"] == 1 for request in requests)
        counts["ties"] += len({request["arrival_us"] for request in requests}) < len(requests) // 2
        counts["prefix hits"] += any(served.cached_tokens for served in run.served)
        counts["preemptions"] += any(served.preemptions for served in run.served)
        counts["preempted and computed nothing"] += any(is_idle(step) for step in run.steps)
    assert min(counts.values()) >= 2, counts


def test_scenarios_with_speculation_are_rough():
    """Each of these once could have been decided otherwise unnoticed."""
    counts = Counter()
    for seed, run in recorded_few("speculation").items():
        spec = specification(seed, "speculation")
        config, requests = spec["config"], spec["requests"]
        speculative = config["speculative_config"]
        counts["asynchronous" if config["async_scheduling"] else "synchronous"] += 1
        counts[speculative["method"]] += 1
        counts["draft tokens by batch size"] += "num_speculative_tokens_per_batch_size" in speculative
        counts["no draft tokens at times"] += any(0 in request["drafts"] for request in requests)
        counts["all wrong at times"] += any(0 in request["accepted_drafts"] for request in requests)
        counts["early stops"] += any("stop_after" in request for request in requests)
        counts["near the longest sequence"] += any(
            request["input_tokens"] + request["output_tokens"] + 2 >= config["max_model_len"]
            for request in requests
        )
        counts["prefix hits"] += any(served.cached_tokens for served in run.served)
        counts["preemptions"] += any(served.preemptions for served in run.served)
        counts["removed blocks"] += len(set(run.contents)) > 1
    assert min(counts.values()) >= 2, counts


def test_scenarios_with_a_disk_are_rough(tmp_path):
    """What a disk is for must happen in the scenarios that every test run compares."""
    counts = Counter()
    for seed, run in recorded_few("disk").items():
        spec = featured("disk", seed)
        replay = DecisionReplay(RecordedRun.load(lay(spec, run, tmp_path / str(seed))), by_text(VLLM))
        for number in range(len(replay.run.steps)):
            replay.step(number)
        host = replay.scheduler.offloading.host
        counts["asynchronous" if spec["config"]["async_scheduling"] else "synchronous"] += 1
        counts[spec["config"]["kv_offloading"]["eviction_policy"]] += 1
        counts["cascades"] += host.disk.cascaded_blocks > 0
        counts["promotions"] += host.disk.promoted_blocks > 0
        counts["promotions without room"] += host.refused_promotions > 0
        counts["lost stores"] += host.disk.lost_stores > 0
        counts["hits"] += any(request.disk_tokens for request in replay.requests)
    assert min(counts.values()) >= 2, counts


def test_scenarios_with_a_disk_that_cannot_be_read_are_rough():
    """Reads must fail, requests must ask again, and some must be given up."""
    counts = Counter()
    for run in recorded_few("unreadable").values():
        counts["given up"] += any(served.cancelled_us >= 0 for served in run.served)
        counts["failed reads"] += any(job < 0 for job in run.lost)
        counts["hits"] += any(served.external_tokens for served in run.served)
    assert min(counts.values()) >= 2, counts


def test_scenarios_with_extra_keys_are_rough():
    """Whatever tells equal tokens apart must be asked."""
    counts = Counter()
    for seed, run in recorded_few("keys").items():
        spec = specification(seed, "keys")
        config, requests = spec["config"], spec["requests"]
        adapters = {request.get("adapter") for request in requests}
        counts["more adapters than a step may have"] += len(adapters - {None}) > config["max_loras"]
        counts["images"] += any("items" in request for request in requests)
        counts["salts"] += any("salt" in request for request in requests)
        counts["prefix hits"] += any(served.cached_tokens for served in run.served)
        counts["preemptions"] += any(served.preemptions for served in run.served)
        counts["removed blocks"] += len(set(run.contents)) > 1
    assert min(counts.values()) >= 2, counts


def is_idle(step: Step) -> bool:
    return not step.decode_n and not step.prefill


def test_decisions_survive_packing(tmp_path):
    runs = [recorded(FEW)[seed] for seed in (3, 9)]
    write(tmp_path / "packed", runs)
    assert list(read(tmp_path / "packed")) == runs
    assert from_line(to_line(runs[0])) == runs[0]
    assert json.loads(to_line(runs[0]))["seed"] == 3


@pytest.mark.parametrize("field", ["decode_n", "decode_ctx", "decode_max", "running", "waiting"])
def test_a_decision_that_differs_is_named(field, tmp_path):
    run = recorded(FEW)[3]
    number = next(i for i, step in enumerate(run.steps) if step.decode_n and i > 20)
    ours = getattr(run.steps[number], field)
    steps = list(run.steps)
    steps[number] = steps[number]._replace(**{field: ours + 1})
    difference = compare(specification(3), run._replace(steps=steps), tmp_path)
    assert difference.steps.startswith(f"step {number} ")
    assert f"{field} is {ours}, the engine's {ours + 1}" in difference.steps


def test_a_hit_and_a_preemption_that_differ_are_named(tmp_path):
    run = recorded(FEW)[3]
    served = [one._replace(cached_tokens=one.cached_tokens + 1, preemptions=9) for one in run.served]
    difference = compare(specification(3), run._replace(served=served), tmp_path)
    assert difference.steps.startswith("request 0: cached_tokens is ")
    run = run._replace(served=[one._replace(preemptions=9) for one in run.served])
    difference = compare(specification(3), run, tmp_path)
    assert difference.preemptions.startswith("request 0: preempted ")


def test_blocks_stored_otherwise_are_named(tmp_path):
    run = recorded_few("speculation")[1]
    number = next(number for number, digest in enumerate(run.contents) if digest > 1)
    contents = list(run.contents)
    contents[number] -= 1
    difference = compare(specification(1, "speculation"), run._replace(contents=tuple(contents)), tmp_path)
    assert str(difference) == f"step {number}: other blocks were stored or removed since the step before"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_what_a_plan_that_computed_nothing_leaves_is_compared(asynchronous, tmp_path):
    for seed, run in recorded(FEW).items():
        spec = specification(seed)
        numbers = [number for number, step in enumerate(run.steps) if is_idle(step)]
        if numbers and spec["config"]["async_scheduling"] == asynchronous:
            break
    steps = list(run.steps)
    idle = steps[numbers[0]]
    steps[numbers[0]] = idle._replace(waiting=idle.waiting + 1)
    difference = compare(spec, run._replace(steps=steps), tmp_path / "otherwise")
    assert difference.steps.startswith(f"plan at start_s {idle.start_us / 1e6:.6f}, which computed nothing: ")
    assert f"waiting is {idle.waiting}, the engine's {idle.waiting + 1}" in difference.steps
