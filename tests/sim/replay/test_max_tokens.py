"""`max_tokens` apart from the output's length: engines that reserve for it serve fewer at a time."""

from typing import Any

import pandas as pd
import pytest
from pagecast.sim.replay import Result, replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.load import Load

BLOCKS, PROMPT, OUTPUT = 960, 512, 128  # of 16 tokens: 24 requests of 640 tokens


def served(max_tokens: str | None, **fields: Any) -> Result:
    load = Load(input_len=str(PROMPT), output_len=str(OUTPUT), num_prompts=60, max_tokens=max_tokens)
    return replay(load.trace(), Scenario(gpu="H100", num_gpu_blocks=BLOCKS, block_size=16, **fields))


def at_once(requests: pd.DataFrame) -> int:
    """The requests that were admitted long before the first had ended."""
    return int((requests["admitted_s"] < requests["finished_s"].min() / 2).sum())


def test_tensorrt_llm_reserves_blocks_for_max_tokens():
    exact, longer = (served(most, engine="trtllm", max_num_seqs=64).requests for most in (None, "4x"))
    assert at_once(exact) == BLOCKS // ((PROMPT + OUTPUT) // 16) == 24
    assert at_once(longer) == BLOCKS // ((PROMPT + 4 * OUTPUT) // 16) == 15
    assert longer["finished_s"].max() > 1.2 * exact["finished_s"].max()


def test_sglang_reserves_a_part_of_max_tokens():
    exact, longer = (
        served(most, engine="sglang", schedule_conservativeness=1.0, max_num_seqs=64).requests
        for most in (None, "4x")
    )
    assert at_once(longer) < 0.8 * at_once(exact)


@pytest.mark.parametrize("engine", ["vllm", "trtllm-max-utilization"])
def test_others_do_not_reserve(engine):
    exact, longer = (served(most, engine=engine, max_num_seqs=64).requests for most in (None, "4x"))
    pd.testing.assert_frame_equal(exact, longer)


@pytest.mark.parametrize(
    ("engine", "rejected"),
    [
        ("vllm@0.24", 60),
        ("vllm@0.31", 60),
        ("vllm@0.33", 0),
        ("sglang", 60),
        ("trtllm-guaranteed-no-evict", 0),
    ],
)
def test_max_tokens_beyond_the_models_length_are_refused_or_lowered(engine, rejected):
    summary = served("1000", engine=engine, max_model_len=1400, max_num_seqs=64).summary
    assert summary["rejected"] == rejected
    reasons = {"prompt + max_tokens exceed max_model_len 1400": rejected} if rejected else {}
    assert summary["rejected_reasons"] == reasons


@pytest.mark.parametrize("engine", ["sglang", "trtllm-guaranteed-no-evict"])
def test_max_tokens_beyond_the_memory_are_lowered_and_requests_go_one_by_one(engine):
    requests = served("20000", engine=engine, max_num_seqs=64).requests
    assert (requests["state"] == "completed").all()
    assert engine == "sglang" or at_once(requests) == 1
