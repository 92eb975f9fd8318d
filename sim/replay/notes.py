"""What a reader of a replay's figures should know before believing them."""

from __future__ import annotations

import pandas as pd
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.machine.memory import hbm_budget
from pagecast.sim.machine.models import model as find_model
from pagecast.sim.replay.recorder import Recorder
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace


def notes(
    trace: Trace,
    scenario: Scenario,
    costs: StepCosts,
    table: pd.DataFrame,
    recorder: Recorder,
    blocks_per_block: float,
) -> tuple[str, ...]:
    """Sentences about the trace, the costs, and where the scenario leaves what is known."""
    said = [*trace.notes, costs.expected_error()]
    longest = int((table["input_tokens"] + table["output_tokens"]).max())
    outside = getattr(costs, "outside", None)
    if outside is not None:
        served = table[table["state"] != "rejected"]
        context = int((served["input_tokens"] + served["output_tokens"]).max()) if len(served) else 0
        said.append(outside(context, recorder.most_tokens, recorder.most_requests, scenario.block_size))
    said += [_too_long(scenario, longest), _windows(scenario, blocks_per_block), _override(scenario)]
    return tuple(sentence for sentence in said if sentence)


def _too_long(scenario: Scenario, longest: int) -> str:
    most = find_model(scenario.model).max_position
    if scenario.max_model_len is not None or not most or longest <= most:
        return ""
    return (
        f"The longest request has {longest:,} tokens; {scenario.model} was made for {most:,}, and an engine "
        f"refuses more unless told otherwise: --max-model-len {most} rejects such requests."
    )


def _windows(scenario: Scenario, blocks_per_block: float) -> str:
    if blocks_per_block == 1.0:
        return ""
    return (
        f"{scenario.model} has layers with sliding windows: each block of a sequence is charged "
        f"{blocks_per_block:.2f} of the engine's blocks, the mean over this trace's lengths."
    )


def _override(scenario: Scenario) -> str:
    """What `num_gpu_blocks` takes the place of, and whether the GPU could hold it."""
    blocks = scenario.num_gpu_blocks
    if blocks is None:
        return ""
    unused = [
        name
        for name in ("gpu_memory_utilization", "free_gpu_memory_fraction", "kv_tokens")
        if getattr(scenario, name) is not None
    ]
    said = f"num_gpu_blocks {blocks:,} was taken as given; {', '.join(unused)} not used. " if unused else ""
    most = most_blocks(scenario)
    if blocks > most:
        said += (
            f"{scenario.tensor_parallel_size} x {scenario.gpu} has room for about {most:,} blocks beside "
            f"{scenario.model}'s weights, fewer than the {blocks:,} given."
        )
    return said.strip()


def most_blocks(scenario: Scenario) -> int:
    """The blocks that fit where the engine takes the whole GPU; 0 where not even the weights do."""
    try:
        budget = hbm_budget(
            find_model(scenario.model),
            find_gpu(scenario.gpu),
            tensor_parallel_size=scenario.tensor_parallel_size,
            gpu_memory_utilization=1.0,
            block_size=scenario.block_size,
            max_num_seqs=scenario.max_num_seqs,
            max_num_batched_tokens=scenario.max_num_batched_tokens,
            kv_cache_dtype=scenario.kv_cache_dtype,
        )
    except BadInput:
        return 0
    return budget.num_gpu_blocks
