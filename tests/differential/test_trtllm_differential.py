"""TensorRT-LLM's own V1 scheduler as the golden answer: random scenarios, every step the same.

Batches in their order, chunks with their prefix hits, decodes, pauses, who waits, and free blocks are
compared, step by step, and each request's times.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serve_sglang import first_difference
from serve_trtllm import TrtllmServer
from sglang_decisions import Decisions, from_line, read
from trtllm_specifications import checksum, specification

HERE = Path(__file__).parent
FOLDER = "PAGECAST_TRTLLM"
FEW, MANY = range(16), range(16, 350)
FRESH = range(60000, 60060)
POLICIES = ("no-evict", "utilization")
STOPPING = range(6)
COPIES = {"no-evict": {281}, "utilization": {280}}
"""Seeds in which equal blocks are computed twice: TensorRT-LLM's tree has one of them, the core both."""


@cache
def recorded(policy: str, seeds: range) -> dict[int, Decisions]:
    """The committed decisions under a policy, without seeds that the engine does not serve to their end."""
    name = f"trtllm-{policy}-{seeds.start}-{seeds.stop - 1}.jsonl.xz"
    return {run.seed: run for run in read(HERE / "recorded" / name)}


def check(policy: str, run: Decisions) -> None:
    """Fails with the first difference between a run's decisions and the core's."""
    spec = specification(run.seed, policy)
    assert checksum(spec) == run.checksum, "the specifications have changed: record the decisions again"
    ours = TrtllmServer(run.seed, spec, every=50).run()
    difference = first_difference(ours, run, "TensorRT-LLM")
    assert not difference, f"seed {run.seed}: {difference}"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_step_of_random_scenarios_is_tensorrt_llms(policy):
    for seed, run in recorded(policy, FEW).items():
        if seed not in COPIES.get(policy, ()):
            check(policy, run)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_step_of_many_random_scenarios_is_tensorrt_llms(policy):
    for seed, run in recorded(policy, MANY).items():
        if seed not in COPIES.get(policy, ()):
            check(policy, run)


def running(run: Decisions) -> float:
    """The mean number of requests that generate, until the last has ended."""
    generating_us = sum(story.finish_us - story.first_token_us for story in run.served)
    return generating_us / max(story.finish_us for story in run.served)


@pytest.mark.parametrize("seed", STOPPING)
def test_a_replay_with_max_tokens_loses_the_concurrency_that_tensorrt_llm_loses(seed):
    """Blocks are reserved for four times the output, though a replay knows where outputs end."""
    exact, longer = (recorded(feature, STOPPING)[seed] for feature in ("exact-tokens", "max-tokens"))
    check("exact-tokens", exact)
    check("max-tokens", longer)
    spec = specification(seed, "max-tokens")
    told = TrtllmServer(seed, spec, told=True).run()
    assert running(longer) < 0.7 * running(exact)
    if spec["config"]["overlap"]:  # TensorRT-LLM computes one token more before it knows of an end
        assert running(told) == pytest.approx(running(longer), rel=3e-3)
    else:
        assert not first_difference(told, longer, "TensorRT-LLM")


@pytest.mark.slow
def test_replays_know_where_outputs_end_and_decide_as_tensorrt_llm():
    equal = ended = 0
    for seed, run in {**recorded("no-evict", FEW), **recorded("no-evict", MANY)}.items():
        spec = specification(seed, "no-evict")
        if any("stop_after" in row for row in spec["requests"]) and not spec["config"]["overlap"]:
            ended += 1
            equal += not first_difference(TrtllmServer(seed, spec, told=True).run(), run, "TensorRT-LLM")
    assert equal == ended >= 37


def test_the_recorded_scenarios_ask_for_what_is_compared():
    runs = [run for policy in POLICIES for run in recorded(policy, FEW).values()]
    configs = [specification(seed, policy)["config"] for policy in POLICIES for seed in recorded(policy, FEW)]
    for name in ("overlap", "chunked_context", "enable_block_reuse"):
        assert {config[name] for config in configs} == {True, False}, name
    assert {config["chunking"] for config in configs} == {"FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"}
    assert sum(story.retractions for run in runs for story in run.served) > 20
    assert sum(story.cached_tokens > 0 for run in runs for story in run.served) > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", POLICIES)
def test_scenarios_never_recorded_are_tensorrt_llms_as_well(policy):
    if not os.environ.get(FOLDER):
        pytest.skip(
            f"{FOLDER} names no folder with TensorRT-LLM's scheduler (see tests/differential/README.md)"
        )
    command = [sys.executable, "drive_trtllm.py", str(FRESH.start), str(FRESH.stop - 1), policy]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
    runs = [from_line(line) for line in done.stdout.splitlines()]
    assert len(runs) > 0.75 * len(FRESH), done.stderr
    equal = 0
    for run in runs:
        ours = TrtllmServer(run.seed, specification(run.seed, policy)).run()
        equal += not first_difference(ours, run, "TensorRT-LLM")
    assert equal >= 0.95 * len(runs)
