"""The live server decides and times what a replay of the recorded arrivals decides and times."""

import asyncio
import time
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pagecast.planner_app.server.generation import Bell, Generation, Sampling
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

from .conftest import make_replica


async def play(backend: Any, seed: int, count: int, horizon_s: float) -> list[Generation]:
    """Submits requests over `horizon_s`, some of which share prefixes and some of which are given up."""
    rng = np.random.default_rng(seed)
    await backend.start()
    generations = []
    for number in range(count):
        shared = [1000 * int(rng.integers(3)) + i for i in range(int(rng.integers(0, 200)))]
        prompt = [*shared, *rng.integers(10_000, 1 << 30, int(rng.integers(1, 400))).tolist()]
        sampling = Sampling(max_tokens=int(rng.integers(1, 80)))
        adapter = ("", "a", "b")[number % 3]
        generation = Generation(
            number, prompt, sampling, Bell(), priority=int(rng.integers(3)), adapter=adapter
        )
        generations.append(generation)
        backend.submit(generation)
        if number % 20 == 7:
            backend.cancel(generation)
        elif rng.random() < 0.2:
            asyncio.get_running_loop().call_later(rng.random() * 0.02, backend.cancel, generation)
        if rng.random() < 0.7:
            await asyncio.sleep(rng.random() * 2 * horizon_s / count)
    while not all(generation.done for generation in generations):
        await asyncio.sleep(0.005)
    await backend.stop()
    return generations


@pytest.mark.parametrize(
    ("seed", "fields"),
    [
        (0, {}),
        (1, {"max_num_seqs": 4, "max_num_batched_tokens": 128}),
        (2, {"num_gpu_blocks": 60, "max_num_batched_tokens": 256}),
        (3, {"num_gpu_blocks": 60, "scheduling_policy": "priority", "async_scheduling": False}),
        (4, {"engine": "nano-vllm", "costs": "roofline"}),
        (2, {"num_gpu_blocks": 60, "preemption": "swap", "swap_gb_per_s": 1.0}),
        (5, {"max_loras": 1}),
    ],
)
def test_a_replay_of_the_arrivals_has_the_same_times(seed: int, fields: dict[str, Any]) -> None:
    scenario = {"num_gpu_blocks": 2000, **fields}
    replica = make_replica(scenario, {"time_scale": 20.0})
    generations = asyncio.run(play(replica.backend, seed, 80, 0.2))
    cancelled = [g.finish_reason == "abort" for g in generations]
    gone = [
        (g.finished_ns - g.arrival_ns) / 1e9 if left else np.nan
        for g, left in zip(generations, cancelled, strict=True)
    ]
    table = pd.DataFrame(
        {
            "arrival_s": [g.arrival_ns / 1e9 for g in generations],
            "input_tokens": [len(g.prompt) for g in generations],
            "output_tokens": [len(g.tokens) for g in generations],
            "priority": [g.priority for g in generations],
            "adapter": [g.adapter for g in generations],
            "cancel_after_s": gone,
        }
    )
    trace = Trace("live", table, token_ids=[np.array(g.prompt, np.int64) for g in generations])
    again = replay(trace, Scenario(**scenario)).requests
    assert any(cancelled)
    for row, generation in enumerate(generations):
        if cancelled[row]:
            continue
        first_ns, end_ns = (round(again[name][row] * 1e9) for name in ("first_token_s", "finished_s"))
        assert (first_ns, end_ns) == (generation.first_ns, generation.finished_ns), row
        assert again["cached_tokens"][row] == generation.cached_tokens


@pytest.mark.parametrize(("retention", "cached"), [(None, 0), ("0-400:90 decode:10", 144)])
def test_prompts_are_kept_as_the_retention_says(retention: str | None, cached: int) -> None:
    fields = {"num_gpu_blocks": 40, "eviction": "priority", "retention": retention}
    backend = make_replica(fields, {"time_scale": 100.0}).backend

    async def one_after_another() -> list[Generation]:
        await backend.start()
        generations = []
        for number, (first, length, output) in enumerate(
            [(0, 160, 1), (1000, 16, 320), (2000, 16, 320), (0, 160, 1)]
        ):
            prompt = list(range(first, first + length))
            generation = Generation(number, prompt, Sampling(max_tokens=output), Bell())
            backend.submit(generation)
            generations.append(generation)
            while not generation.done:
                await asyncio.sleep(0.001)
        await backend.stop()
        return generations

    assert [one.cached_tokens for one in asyncio.run(one_after_another())] == [0, 0, 0, cached]


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout_at_s": 5.0},
        {"isolation_price": True},
        {"isolation": "tenant"},
        {"scrub_private_blocks": True},
        {"public_namespaces": "docs"},
    ],
)
def test_fields_that_only_replays_follow_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=f"{next(iter(fields))} .*leave it out"):
        make_replica(fields)


def test_late_steps_are_made_up() -> None:
    """A server that stood still goes on at its own times, and is no longer late at the end."""
    replica = make_replica({"num_gpu_blocks": 2000}, {"time_scale": 4.0})
    backend = replica.backend

    async def stopped(seconds: float) -> tuple[Generation, float]:
        await backend.start()
        generation = Generation(0, list(range(50)), Sampling(max_tokens=500), Bell())
        backend.submit(generation)
        await asyncio.sleep(0.05)
        time.sleep(seconds)  # nobody else has a turn
        while not generation.done:
            await asyncio.sleep(0.001)
        late_s = (backend.clock.now() - generation.finished_ns) / backend.clock.scale / 1e9
        await backend.stop()
        return generation, late_s

    generation, late_s = asyncio.run(stopped(0.5))
    assert generation.finished_ns > 4 * 0.55 * 1e9
    assert late_s < 0.25
    trace = Trace("one", pd.DataFrame({"arrival_s": [0.0], "input_tokens": [50], "output_tokens": [500]}))
    scenario = Scenario(model="Qwen/Qwen3-8B", gpu="H200", num_gpu_blocks=2000)
    alone = replay(trace, scenario).requests["e2e_s"].iloc[0]
    assert (generation.finished_ns - generation.arrival_ns) / 1e9 == pytest.approx(alone, rel=1e-6)
