"""What vLLM's own load tool makes of options and a seed: kept in `recorded/`.

    PYTHONPATH=FOLDER python drive_vllm_bench.py recorded/vllm_bench.json

runs with an interpreter that imports vLLM (tests/differential/README.md); FOLDER has a version of it. Data
sets and arrival times are vLLM's; a tokenizer stands in whose tokens are words, so that lengths stay what was
drawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.benchmarks import serve
from vllm.benchmarks.datasets import PrefixRepetitionRandomDataset, RandomDataset

CASES: list[dict[str, Any]] = [
    {"seed": 0, "num_prompts": 12, "input_len": 1024, "output_len": 128},
    {"seed": 7, "num_prompts": 12, "input_len": 1000, "output_len": 200, "range_ratio": 0.3},
    {
        "seed": 3,
        "num_prompts": 10,
        "input_len": 777,
        "output_len": 33,
        "range_ratio": {"input": 0.0, "output": 0.8},
    },
    {"seed": 1, "num_prompts": 8, "input_len": 300, "output_len": 50, "range_ratio": 0.5, "prefix_len": 64},
    {"seed": 0, "num_prompts": 12, "input_len": 64, "output_len": 8, "request_rate": 4.0},
    {
        "seed": 5,
        "num_prompts": 12,
        "input_len": 64,
        "output_len": 8,
        "range_ratio": 0.2,
        "request_rate": 2.5,
        "burstiness": 0.4,
    },
    {"seed": 6, "num_prompts": 9, "input_len": 64, "output_len": 8, "request_rate": 3.0, "burstiness": 5.0},
    {
        "seed": 2,
        "num_prompts": 6,
        "input_len": 64,
        "output_len": 8,
        "request_rate": 2.0,
        "burstiness": "inf",
    },
    {
        "seed": 4,
        "num_prompts": 10,
        "input_len": 64,
        "output_len": 8,
        "ramp_up_strategy": "linear",
        "ramp_up_start_rps": 1.0,
        "ramp_up_end_rps": 9.0,
    },
    {
        "seed": 4,
        "num_prompts": 10,
        "input_len": 64,
        "output_len": 8,
        "burstiness": 2.0,
        "ramp_up_strategy": "exponential",
        "ramp_up_start_rps": 1.0,
        "ramp_up_end_rps": 9.0,
    },
    {"seed": 0, "num_prompts": 14, "input_len": 20, "output_len": 5, "prefix_len": 40, "num_prefixes": 4},
    {"seed": 9, "num_prompts": 10, "input_len": 20, "output_len": 5, "prefix_len": 40, "num_prefixes": 3},
    {"seed": 1, "num_prompts": 16, "input_len": 90, "output_len": 30, "range_ratio": 0.5, "concurrency": 4},
    {
        "seed": 8,
        "num_prompts": 20,
        "input_len": 90,
        "output_len": 30,
        "range_ratio": 0.5,
        "concurrency": 3,
        "request_rate": 12.0,
        "burstiness": 0.5,
    },
    {
        "seed": 3,
        "num_prompts": 14,
        "input_len": 90,
        "output_len": 30,
        "range_ratio": 0.5,
        "concurrency": 2,
        "warmup": 5,
    },
    {
        "seed": 5,
        "num_prompts": 14,
        "input_len": 90,
        "output_len": 30,
        "range_ratio": 0.5,
        "warmup": 3,
        "concurrency": 4,
        "ramp_up_strategy": "linear",
        "ramp_up_start_rps": 2,
        "ramp_up_end_rps": 30,
    },
]


class Words:
    """A tokenizer whose tokens are words: text and tokens give each other back."""

    vocab_size = 32_000
    all_special_ids: tuple[int, ...] = ()

    def num_special_tokens_to_add(self) -> int:
        return 0

    def decode(self, tokens: list[int], **more: Any) -> str:
        return " ".join(str(token) for token in tokens)

    def encode(self, text: str, **more: Any) -> list[int]:
        return [int(word) for word in text.split()]


class Finished(Exception):
    """All requests have been sent and answered."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while everybody sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        selector = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def passing(timeout: float | None = None) -> Any:
            self.now += timeout or 0.0
            return select(0)

        selector.select = passing

    def time(self) -> float:
        return self.now


def took_s(prompt_len: int, output_len: int) -> float:
    """How long a request takes: no two of a case as long."""
    return prompt_len * 1.009e-3 + output_len * 3.017e-3


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def requests(case: dict[str, Any]) -> list[Any]:
    """The requests of a case, in the order of the data set."""
    lengths = {"output_len": case["output_len"], "prefix_len": case.get("prefix_len", 0)}
    if "num_prefixes" in case:
        lengths |= {"suffix_len": case["input_len"], "num_prefixes": case["num_prefixes"]}
        data: Any = PrefixRepetitionRandomDataset(random_seed=case["seed"])
    else:
        lengths |= {"input_len": case["input_len"], "range_ratio": case.get("range_ratio", 0.0)}
        data = RandomDataset(random_seed=case["seed"])
    made: list[Any] = data.sample(tokenizer=Words(), num_requests=case["num_prompts"], **lengths)
    return made


async def times(case: dict[str, Any], made: list[Any]) -> list[float]:
    """When each request is sent, in seconds."""
    clock = Clock()
    serve.time = SimpleNamespace(time=clock.time)
    serve.asyncio = SimpleNamespace(sleep=clock.sleep)
    options = {name: case.get(name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    rate, burstiness = float(case.get("request_rate", "inf")), float(case.get("burstiness", 1.0))
    sent = []
    async for _ in serve.get_request(made, rate, burstiness, **options):
        sent.append(round(clock.now, 9))
    return sent


def sent(case: dict[str, Any], made: list[Any]) -> list[float]:
    """When the benchmark itself sends each request, warm-up first, where a request takes `took_s`."""
    loop = VirtualLoop()
    times: list[float] = []

    async def served(request_func_input: Any, **more: Any) -> Any:
        times.append(round(loop.time(), 9))
        output = serve.RequestFuncOutput(success=True, start_time=loop.time())
        await asyncio.sleep(took_s(request_func_input.prompt_len, request_func_input.output_len))
        return output

    async def nothing(*_: Any) -> None:
        return None

    def finished(*_: Any, **more: Any) -> None:
        raise Finished

    serve.asyncio = asyncio
    serve.time = SimpleNamespace(time=loop.time, perf_counter=loop.time)
    serve.ASYNC_REQUEST_FUNCS["here"] = served
    serve.fetch_spec_decode_metrics = serve.fetch_diffusion_metrics = nothing
    serve.calculate_metrics = finished
    options = {name: case.get(name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    run = serve.benchmark(
        task_type=serve.TaskType.GENERATION,
        endpoint_type="here",
        api_url="http://localhost",
        base_url="http://localhost",
        model_id="m",
        model_name="m",
        tokenizer=None,
        input_requests=made,
        logprobs=None,
        request_rate=float(case.get("request_rate", "inf")),
        burstiness=float(case.get("burstiness", 1.0)),
        disable_tqdm=True,
        num_warmups=case.get("warmup", 0),
        profile=False,
        selected_percentile_metrics=[],
        selected_percentiles=[],
        ignore_eos=False,
        goodput_config_dict={},
        max_concurrency=case.get("concurrency"),
        lora_modules=None,
        extra_headers=None,
        extra_body=None,
        ready_check_timeout_sec=0,
        **options,
    )
    asyncio.set_event_loop(loop)
    with contextlib.suppress(Finished):
        loop.run_until_complete(run)
    return times


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    """Lengths, times and shared prefixes, as `vllm bench serve` makes them with the case's seed."""
    random.seed(case["seed"])
    np.random.seed(case["seed"])
    made = requests(case)
    prefixes = [" ".join(one.prompt.split()[: case.get("prefix_len", 0)]) for one in made]
    held = {"sent": sent(case, made)} if "concurrency" in case else {"times": asyncio.run(times(case, made))}
    return {
        "inputs": [one.prompt_len for one in made],
        "outputs": [one.expected_output_len for one in made],
        "first_of_prefix": [prefixes.index(prefix) for prefix in prefixes],
        **held,
    }


if __name__ == "__main__":
    lines = [json.dumps({"case": case, **outcome(case)}) for case in CASES]
    text = f'{{"vllm": "{version("vllm")}", "cases": [\n' + ",\n".join(lines) + "\n]}\n"
    Path(sys.argv[1]).write_text(text, encoding="utf-8")
