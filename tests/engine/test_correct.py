"""The engine computes what transformers computes, whatever the scheduler does with a request meanwhile."""

import copy
from typing import Any

import pytest
import torch
from pagecast.engine.params import SamplingParams
from pagecast.sim.core.events import EventKind

FAMILIES = ("qwen3", "qwen2", "llama", "mistral", "qwen3_moe", "mixtral")
MIXTURES = ("qwen3_moe", "mixtral")
# Block size: number of blocks (too few for all requests at once), tokens per step, length of shared prefix.
SHAPES = {16: (22, 48, 50), 64: (9, 100, 150), 256: (8, 300, 480)}
# A mixture differs in its MLP, which knows no blocks.
CASES = [
    pytest.param(family, size, marks=pytest.mark.slow if size > 16 and family != "qwen3" else ())
    for family in FAMILIES
    for size in SHAPES
    if size == 16 or family not in MIXTURES
]


def prompts_with_prefixes(shared: int) -> list[list[int]]:
    """Prompts of several lengths; some share `shared` tokens."""
    generator = torch.Generator().manual_seed(shared)

    def some(n: int) -> list[int]:
        return torch.randint(0, 256, (n,), generator=generator).tolist()

    prefix = some(shared)
    half = prefix[: shared // 2]
    return [prefix + some(7), some(1), prefix + some(30), some(40), half + some(3), prefix + some(7)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("family", "block_size"), CASES)
def test_logits_and_greedy_tokens_are_transformers(
    family: str, block_size: int, depth: int, model_of: Any, engine_of: Any, watched: Any
) -> None:
    blocks, budget, shared = SHAPES[block_size]
    model = model_of(family)
    sizes = {"block_size": block_size, "num_blocks": blocks, "max_num_batched_tokens": budget}
    engine = engine_of(model.folder, **sizes, pipeline_depth=depth, log_events=True)
    logits = watched(engine)
    prompts = prompts_with_prefixes(shared)
    completions = engine.generate(prompts, [SamplingParams(max_tokens=64, n=n) for n in (1, 1, 2, 1, 3, 1)])

    kinds = {event.kind for event in engine.loop.scheduler.events}
    assert {EventKind.PREEMPTED, EventKind.REUSED, EventKind.COPIED} <= kinds
    texts = [(prompt, output) for prompt, c in zip(prompts, completions, strict=True) for output in c.outputs]
    assert len(texts) == 9
    for number, (prompt, output) in enumerate(texts):
        assert (output.finish_reason, len(output.token_ids)) == ("length", 64)
        expected = model.logits(prompt + output.token_ids)
        for position in range(len(prompt), len(prompt) + 64):
            theirs, ours = expected[position - 1], logits.rows[str(number), position]
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
            assert int(theirs.argmax()) == output.token_ids[position - len(prompt)]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_later_turn_finds_what_was_generated(depth: int, model_of: Any, engine_of: Any) -> None:
    model = model_of("llama")
    engine = engine_of(model.folder, pipeline_depth=depth)
    prompt = list(range(5, 30))
    (first,) = engine.generate([prompt], SamplingParams(max_tokens=40))
    history = prompt + first.outputs[0].token_ids + [7, 8, 9]
    (second,) = engine.generate([history], SamplingParams(max_tokens=20))
    (output,) = second.outputs
    assert output.cached_tokens == 64  # all whole blocks of 25 + 40 tokens, the last token's KV not computed
    expected = model.logits(history + output.token_ids)[len(history) - 1 : -1].argmax(-1)
    assert output.token_ids == expected.tolist()


# The sizes of Qwen3-0.6B's layers, whose products are our own kernel's on an H100 or H200.
_WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.03,
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in FAMILIES), pytest.param("qwen3", _WIDE, marks=pytest.mark.gpu)],
)
def test_bf16_is_as_near_to_fp32_as_transformers_is(
    family: str, changes: dict[str, Any], model_of: Any, engine_of: Any, watched: Any
) -> None:
    model = model_of(family, **changes)
    engine = engine_of(model.folder, dtype="bfloat16", max_num_batched_tokens=48)
    logits = watched(engine)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (60, 90, 33, 120)]
    completions = engine.generate(prompts, SamplingParams(max_tokens=24))
    rough = copy.deepcopy(model.theirs).to(torch.bfloat16)
    ours, theirs = [], []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = prompt + completion.outputs[0].token_ids
        exact = model.logits(ids)
        with torch.inference_mode():
            peer = rough(torch.tensor([ids])).logits[0].float()
        for position in range(len(prompt), len(ids)):
            scale = exact[position - 1].norm()
            ours.append((logits.rows[str(number), position].float() - exact[position - 1]).norm() / scale)
            theirs.append((peer[position - 1] - exact[position - 1]).norm() / scale)
    assert torch.stack(ours).mean() < 1.2 * torch.stack(theirs).mean()
