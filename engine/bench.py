"""The 256-request benchmark: random prompts and outputs of 100 to 1024 tokens, all at once, and its floor.

The floor is arithmetic: each step reads the weights and the KV of its decoding requests once at the memory's
practical rate, and prompts are computed at the practical rate of large matrix products. What a run takes
beyond that is the engine's. Of a mixture's experts, a step reads those that its decoding requests go to.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from pagecast.engine.engine import Completion, Engine
from pagecast.engine.observed import observed
from pagecast.engine.params import SamplingParams
from pagecast.engine.recording import Recording
from pagecast.engine.sequence import Sequence
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import Gpu, gpu
from pagecast.sim.machine.model_facts import ModelFacts
from pagecast.sim.runs.recorded import Steps

# Shares of the datasheet's rates that a device copy and an 8192^3 bf16 product reach on an H200: 4.3 TB/s,
# 700 TFLOP/s.
_BANDWIDTH_SHARE = 0.896
_MATMUL_SHARE = 0.7075
_TOKENS = 10_000  # prompts are made of this many different tokens


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One run. `floor_s` is None on a GPU without known rates; `waited_s` the host's time spent waiting.

    Where requests speculate, `accepted_tokens` of the `draft_tokens` were accepted. Steps that verify draft
    tokens are not in `decode_steps`; the floor counts their rows as prompt tokens.
    """

    requests: int
    input_tokens: int
    output_tokens: int
    seconds: float
    steps: int
    decode_steps: int
    decode_s: float
    waited_s: float
    planning_s: float
    floor_s: float | None
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, prefill included."""
        return self.output_tokens / self.seconds

    @property
    def share_of_floor(self) -> float | None:
        """How much of the run's time the floor is."""
        return None if self.floor_s is None else self.floor_s / self.seconds


def bench(
    engine: Engine,
    *,
    requests: int = 256,
    shortest: int = 100,
    longest: int = 1024,
    seed: int = 0,
    temperature: float = 0.6,
) -> BenchResult:
    """Serves the requests once, after a short warm-up. Lengths are uniform, ends of text ignored.

    Errors: BadInput where the model is too short for the longest request, and where one of them is not served
    to its end.
    """
    if engine.loaded.max_model_len < 2 * longest:
        raise BadInput(f"max_model_len is {engine.loaded.max_model_len}; the benchmark needs {2 * longest}")
    prompts, outputs = workload(requests, shortest, longest, seed, engine.loaded.spec.facts.vocab)
    params = [SamplingParams(n, temperature, seed=seed, ignore_eos=True) for n in outputs]
    engine.warm_up()
    engine.settle()
    loop = engine.loop
    recording = Recording(engine.limits.num_blocks)
    waited = loop.waited_ns
    ended: list[Sequence] = []
    with observed(engine, recording, ended.append):
        start = time.perf_counter()
        completions = engine.generate(prompts, params)
        seconds = time.perf_counter() - start
    output_tokens = _output_tokens(completions)
    steps = recording.steps()
    decode_only = steps.prefill_start[1:] == steps.prefill_start[:-1]
    took = (steps.end_ns[1:] - steps.end_ns[:-1])[decode_only[1:]]
    return BenchResult(
        requests=requests,
        input_tokens=sum(map(len, prompts)),
        output_tokens=output_tokens,
        seconds=seconds,
        steps=len(steps),
        decode_steps=int(decode_only.sum()),
        decode_s=float(took.sum()) / 1e9,
        waited_s=(loop.waited_ns - waited) / 1e9,
        planning_s=float(steps.sched_ns.sum()) / 1e9,
        floor_s=floor_s(engine, steps),
        draft_tokens=sum(sum(sequence.drafts) for sequence in ended),
        accepted_tokens=sum(sum(sequence.accepted) for sequence in ended),
    )


def _output_tokens(completions: list[Completion]) -> int:
    """Tokens that the requests were answered with. Errors: BadInput where one has fewer than it asked for."""
    outputs = [output for completion in completions for output in completion.outputs]
    for number, output in enumerate(outputs):
        if output.finish_reason != "length":
            raise BadInput(
                f"request {number} of {len(outputs)} was not served to its end: {output.finish_reason} after "
                f"{len(output.token_ids)} tokens ({output.reason}); give the engine more room, or the "
                "benchmark shorter requests"
            )
    return sum(len(output.token_ids) for output in outputs)


def workload(
    requests: int, shortest: int, longest: int, seed: int, vocab: int = _TOKENS
) -> tuple[list[list[int]], list[int]]:
    """The prompts, as token ids, and how many tokens each is to be answered with."""
    rng, ids = random.Random(seed), min(_TOKENS, vocab)
    prompts = [[rng.randrange(ids) for _ in range(rng.randint(shortest, longest))] for _ in range(requests)]
    return prompts, [rng.randint(shortest, longest) for _ in range(requests)]


def floor_s(engine: Engine, steps: Steps) -> float | None:
    """The least time that these steps can take on these GPUs; None where their rates are not known.

    Several GPUs share the work evenly and speak to each other in no time. KV heads that are on more than one
    are read there too.
    """
    device = engine.loaded.device
    if device.type != "cuda":
        return None
    try:
        rates: Gpu = gpu(torch.cuda.get_device_name(device))
    except BadInput:
        return None
    facts = engine.loaded.spec.facts
    element = engine.loaded.model.dtype.itemsize
    gpus = engine.options.tensor_parallel_size
    stored = facts.kv_bytes_per_token(tensor_parallel_size=gpus) // facts.dtype_bytes
    kv_bytes = stored * gpus * engine.loaded.kv.element_size()
    decoding = steps.decode_n > 0
    byte_count = int(bytes_read(facts, steps.decode_n[decoding], element).sum())
    byte_count += int((steps.decode_ctx + steps.decode_n).sum()) * kv_bytes
    flops = int(steps.prefill_tokens.sum()) * prompt_flops_per_token(facts)
    chunks = zip(steps.prefill_tokens.tolist(), steps.prefill_ctx.tolist(), strict=True)
    flops += sum(facts.attention_flops(tokens, context) for tokens, context in chunks)
    seconds = byte_count / (rates.hbm_bytes_per_s * _BANDWIDTH_SHARE)
    return (seconds + flops / (rates.flops["bf16"] * _MATMUL_SHARE)) / gpus


def prompt_flops_per_token(facts: ModelFacts) -> int:
    """FLOPs of the layers' products for a prompt token that is not sampled from: its last layer stops after
    attention."""
    after = {"o", "router", "expert_up", "expert_down"} if facts.moe else {"o", "up", "down"}
    last = sum(2 * one.inputs * one.outputs * one.active for one in facts.linears() if one.name in after)
    return facts.matmul_flops_per_token() - last


def bytes_read(facts: ModelFacts, tokens: NDArray[np.int64], element: int) -> NDArray[np.float64]:
    """Bytes of weights that a step of so many tokens reads, elementwise, where numbers that are not quantised
    take `element` bytes; embeddings are looked up, not read.

    Of a mixture's experts, those that tokens routed evenly and independently are expected to touch.
    """
    linears = facts.linears()
    unread = 0 if facts.tied else facts.embedding_params
    rest = facts.params - unread - sum(linear.params for linear in linears)
    read = np.full(tokens.shape, float(rest * element))
    for linear in linears:
        share = 1 - (1 - linear.active / linear.experts) ** tokens
        bits = facts.linear_bits(linear) if facts.weight_dtype == "fp8" else 8 * element
        read += linear.params * bits / 8 * share
    return read
